"""Planned bytes against a count from the model's configuration, which knows no graph."""

from __future__ import annotations

import pytest

from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.roofline import rank_bytes
from tests.lowering.compiled import Compiled, compiled

REPLICATED = frozenset({"router", "down", "q_a", "kv_a"})


def counted(config: KimiConfig, tp: int, batch: int, split: frozenset[str]) -> int:
    """Bytes by `rank_bytes` without padding; `split` names the families cut by split-replicated."""
    whole = rank_bytes(config, tp, batch, scheme="stock").items
    cut = {(i.part, i.name): i for i in rank_bytes(config, tp, batch, scheme="sharded").items}
    items = [cut[i.part, i.name] if i.name in split else i for i in whole if not i.padding]
    return sum(item.bytes for item in items)


def attn_res_bytes(config: KimiConfig) -> tuple[int, int, int]:
    """What the count, the stock graph and the plan take for AttnRes vectors.

    The count has a norm and a projection of every mix in bf16. The first mix has one source, so no
    graph reads it. The plan folds the two vectors of a mix into one in fp32, which the block phase
    and the merge phase both read.
    """
    if config.attn_res_block_size is None:
        return 0, 0, 0
    one, mixes = 2 * config.hidden_size * 2, 2 * config.num_layers + 1
    return mixes * one, (mixes - 1) * one, 2 * (mixes - 1) * one


def uncounted(config: KimiConfig, batch: int, context: int) -> int:
    """What `rank_bytes` leaves out: embedding rows, MLA cache rows written and read."""
    cache_row = (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    cache = len(config.mla_layers) * batch * (1 + context) * cache_row
    return batch * config.hidden_size * 2 + cache


def check(it: Compiled, config: KimiConfig, split: frozenset[str], *, context: int = 1) -> None:
    plan = it.plan
    in_count, in_stock, in_plan = attn_res_bytes(config)
    extra = uncounted(config, plan.batch, context)
    planned = counted(config, plan.tp, plan.batch, split) - in_count + in_plan + extra
    assert plan.planned_bytes == planned
    padding = sum(
        item.bytes
        for item in rank_bytes(config, plan.tp, plan.batch, scheme="stock").items
        if item.part == "experts" and item.padding
    )
    assert plan.stock_padding_bytes == padding
    whole = counted(config, plan.tp, plan.batch, frozenset())
    assert plan.stock_bytes == whole - in_count + in_stock + extra + padding


@pytest.mark.parametrize(
    ("model", "tp", "batch", "context", "split"),
    [
        ("kimi-k3-tiny", 1, 1, 1, frozenset[str]()),
        ("kimi-k3-tiny", 2, 2, 1, frozenset[str]()),
        ("kimi-k3-tiny", 4, 8, 20, frozenset({"q_a", "kv_a"})),
        ("kimi-linear-tiny", 1, 3, 20, frozenset[str]()),
        ("kimi-linear-tiny", 4, 2, 1, frozenset({"kv_a"})),
    ],
)
def test_tiny_models_to_the_byte(
    model: str, tp: int, batch: int, context: int, split: frozenset[str]
) -> None:
    it = compiled(model, tp, batch, context=context)
    check(it, BUILTIN_CONFIGS[model], split, context=context)


def test_verify_reads_the_state_once_and_writes_journals() -> None:
    step = compiled("kimi-k3-tiny", 2, 2)
    verify = compiled("kimi-k3-tiny", 2, 2, rows=3, kind="verify")
    commit = compiled("kimi-k3-tiny", 2, 2, rows=3, kind="commit")
    config = BUILTIN_CONFIGS["kimi-k3-tiny"]
    layers = config.num_layers - len(config.mla_layers)
    width = config.kda_width // 2
    state = 2 * (width * config.kda_head_dim * 4 + 3 * width * 3 * 2)
    journal = 2 * 3 * (3 * width + width + config.kda_heads // 2) * 2
    row = (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    mla = len(config.mla_layers)

    def state_bytes(it: Compiled) -> int:
        return sum(launch.state_bytes for launch in it.plan.launches)

    assert state_bytes(step) == layers * 2 * state + mla * (2 + 2) * row
    assert state_bytes(verify) == layers * (state + journal) + mla * (6 + 2) * row
    assert state_bytes(commit) == layers * (journal + 2 * state)


@pytest.mark.slow
def test_k3_on_16_ranks() -> None:
    config = BUILTIN_CONFIGS["kimi-k3"]
    it = compiled("kimi-k3", 16)
    check(it, config, REPLICATED)
    assert it.plan.planned_bytes <= 8.80e9
    assert it.plan.stock_bytes / 1e9 == pytest.approx(15.51, abs=0.01)
    assert it.plan.stock_padding_bytes / 1e9 == pytest.approx(0.54, abs=0.005)
    assert it.plan.memory.total < 288e9
