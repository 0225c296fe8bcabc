from __future__ import annotations

import dataclasses
import math

import pytest

from k3fuse.errors import InputError
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.models.kimi_parameters import kimi_parameters
from k3fuse.roofline import (
    Scheme,
    expected_distinct_experts,
    floor_bytes,
    parameter_bytes,
    rank_bytes,
    roofline,
)
from k3fuse.target import get_target

K3 = BUILTIN_CONFIGS["kimi-k3"]
KIMI_LINEAR = BUILTIN_CONFIGS["kimi-linear"]

SCHEMES: tuple[Scheme, ...] = ("stock", "stock_replicated_up", "sharded")


def test_k3_parameter_bytes_to_the_byte() -> None:
    sizes = parameter_bytes(K3)
    assert sizes.kda_sublayer == 887_800_832
    assert sizes.mla_sublayer == 464_392_192
    assert sizes.moe_trunk == 379_857_408
    assert sizes.layer_vectors == 86_016
    assert sizes.dense_mlp == 1_453_326_336
    assert sizes.trunk == 108_811_877_376
    assert sizes.ends == 4_697_663_488
    assert sizes.resident == 113_509_540_864
    assert sizes.expert == 17_547_264
    assert sizes.all_experts == 1_446_456_066_048
    assert sizes.total == 113_509_540_864 + 1_446_456_066_048


def test_kimi_linear_parameter_bytes() -> None:
    # By hand from the tensor list: bf16, with A_log, dt_bias and the router bias in fp32.
    h, p = 2304, 4096
    kda = 2 * (4 * h * p + 2 * 128 * (h + p) + 32 * h + 3 * p * 4 + 128) + 4 * (p + 32)
    mla = 2 * (6144 * h + 576 * h + 512 + 8192 * 512 + p * h)
    moe = 2 * (256 * h + 3 * h * 1024) + 4 * 256
    sizes = parameter_bytes(KIMI_LINEAR)
    assert sizes.kda_sublayer == kda
    assert sizes.mla_sublayer == mla
    assert sizes.moe_trunk == moe
    assert sizes.expert == 2 * 3 * 1024 * h
    assert sizes.trunk == 20 * kda + 7 * mla + 26 * moe + 2 * 3 * h * 9216 + 27 * 2 * h * 2
    assert sizes.ends == 2 * (2 * 163840 * h + h)
    assert sizes.total == pytest.approx(98e9, rel=0.01)


@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_counted_bytes_are_those_of_the_checkpoint_layout(name: str) -> None:
    config = BUILTIN_CONFIGS[name]
    size = {"BF16": 2, "F32": 4, "U8": 1}
    sources = [s for parameter in kimi_parameters(config) for s in parameter.sources]
    stored = sum(math.prod(s.shape) * size[s.dtype] for s in sources)
    assert parameter_bytes(config).total == stored


def test_tied_head_is_stored_once_and_still_read() -> None:
    tied = dataclasses.replace(KIMI_LINEAR, tie_word_embeddings=True)
    table = 163840 * 2304 * 2
    assert parameter_bytes(KIMI_LINEAR).ends - parameter_bytes(tied).ends == table
    assert floor_bytes(tied, 1).lm_head == floor_bytes(KIMI_LINEAR, 1).lm_head


def test_expected_distinct_experts() -> None:
    assert expected_distinct_experts(896, 16, 1) == pytest.approx(16)
    assert expected_distinct_experts(896, 16, 8) == pytest.approx(120.3, abs=0.05)
    assert expected_distinct_experts(8, 8, 3) == 8
    assert expected_distinct_experts(896, 16, 10_000) == pytest.approx(896)


def test_k3_floor_bytes() -> None:
    one = floor_bytes(K3, 1)
    assert one.trunk == 108_811_877_376
    assert one.experts == 25_829_572_608
    assert one.published == 134_641_449_984
    assert one.published + 163840 * 7168 * 2 == pytest.approx(136.99e9, abs=5e6)
    assert one.lm_head == (163840 + 3) * 7168 * 2
    assert one.state == 2 * (434_110_464 + 15_261_696)
    assert one.total == one.published + one.lm_head + one.state
    eight = floor_bytes(K3, 8)
    assert eight.published == pytest.approx(303.0e9, abs=0.1e9)
    assert eight.state == 8 * one.state


@pytest.mark.parametrize(
    ("tp", "measured_ms", "floor_ms", "share", "rest_ms"),
    [
        (16, 3.90, 1.05, 0.27, 2.85),
        (16, 7.38, 1.05, 0.14, 6.33),
        (8, None, 2.10, None, None),
    ],
)
def test_k3_roofline_on_gb300(
    tp: int, measured_ms: float | None, floor_ms: float, share: float | None, rest_ms: float | None
) -> None:
    line = roofline(K3, get_target("gb300"), tp, 1, measured_ms)
    assert line.bandwidth == tp * 8.0e12
    assert line.floor_ms == pytest.approx(floor_ms, abs=0.005)
    assert line.tokens_per_s == pytest.approx(1e3 / line.floor_ms)
    if share is None:
        assert (line.share, line.everything_else_ms) == (None, None)
        assert line.everything_else_us_per_layer is None
    else:
        assert line.share == pytest.approx(share, abs=0.005)
        assert line.everything_else_ms == pytest.approx(rest_ms, abs=0.005)


def test_k3_roofline_published_lines() -> None:
    line = roofline(K3, get_target("sm_103a"), 16, 1, 3.90)
    assert round(line.tokens_per_s) == 951
    assert line.everything_else_us_per_layer == pytest.approx(30.6, abs=0.05)
    assert line.reachable_ms > line.floor_ms
    assert line.counted_bytes == line.bytes.published
    full = roofline(K3, get_target("gb300"), 16, 1, include_head_and_state=True)
    assert full.counted_bytes == line.bytes.total
    assert full.floor_ms > line.floor_ms
    eight = roofline(K3, get_target("gb300"), 16, 8)
    assert eight.tokens_per_s == pytest.approx(8e3 / eight.floor_ms)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_roofline_refuses_impossible_times(ms: float) -> None:
    with pytest.raises(InputError, match="measured_ms"):
        roofline(K3, get_target("h200"), 16, 1, ms)


# Spec 3.2 prints GB with two decimals; its 23.17 stands for an exact 23.16486.
@pytest.mark.parametrize(
    ("tp", "scheme", "total"),
    [
        (8, "stock", 23.17),
        (8, "stock_replicated_up", 27.30),
        (8, "sharded", 17.36),
        (16, "stock", 15.51),
        (16, "stock_replicated_up", 19.95),
        (16, "sharded", 8.76),
    ],
)
def test_k3_rank_totals(tp: int, scheme: Scheme, total: float) -> None:
    assert rank_bytes(K3, tp, 1, scheme=scheme).total / 1e9 == pytest.approx(total, abs=0.0055)


@pytest.mark.parametrize(
    ("tp", "part", "scheme", "megabytes"),
    [
        (8, "kda", "stock", 112.6),
        (8, "state", "stock", 1.6),
        (8, "mla", "stock", 84.6),
        (8, "router+down", "stock", 64.2),
        (8, "up", "stock", 6.4),
        (8, "up", "stock_replicated_up", 51.4),
        (8, "shared", "stock", 33.0),
        (8, "experts", "stock", 35.1),
        (16, "kda", "stock", 57.3),
        (16, "state", "stock", 0.8),
        (16, "mla", "stock", 57.4),
        (16, "router+down", "stock", 64.2),
        (16, "up", "stock", 3.2),
        (16, "shared", "stock", 16.5),
        (16, "experts", "stock", 23.4),
        (16, "experts", "sharded", 17.5),
    ],
)
def test_k3_rank_table(tp: int, part: str, scheme: Scheme, megabytes: float) -> None:
    sizes = rank_bytes(K3, tp, 1, scheme=scheme)
    assert sizes.per_layer(part) / 1e6 == pytest.approx(megabytes, abs=0.1)


def test_k3_replicated_mla_projections() -> None:
    items = rank_bytes(K3, 16, 1, scheme="stock").items
    replicated = sum(i.bytes_per_layer for i in items if i.name in ("q_a", "kv_a"))
    assert replicated / 1e6 == pytest.approx(30.3, abs=0.05)


def test_k3_padding() -> None:
    def padding(tp: int, scheme: Scheme, part: str) -> int:
        items = rank_bytes(K3, tp, 1, scheme=scheme).items
        return sum(i.bytes for i in items if i.padding and i.part == part)

    assert padding(16, "stock", "experts") / 1e9 == pytest.approx(0.54, abs=0.005)
    assert padding(8, "stock", "experts") == 0
    assert padding(16, "sharded", "experts") == 0
    assert padding(16, "sharded", "kda") == 69 * (3216 - 3206) * 7168 * 2


def test_k3_replication_cost_and_bandwidth_floors() -> None:
    for tp, cost, stock_ms, sharded_ms in [(8, 0.25, 2.90, 2.17), (16, 0.44, 1.94, 1.09)]:
        stock = rank_bytes(K3, tp, 1, scheme="stock").total
        sharded = rank_bytes(K3, tp, 1, scheme="sharded").total
        assert 1 - sharded / stock == pytest.approx(cost, abs=0.01)
        assert 1e3 * stock / 8.0e12 == pytest.approx(stock_ms, abs=0.006)
        assert 1e3 * sharded / 8.0e12 == pytest.approx(sharded_ms, abs=0.006)


@pytest.mark.parametrize(
    ("config", "unread"),
    [(K3, 69 * (128 - 96) * 4), (KIMI_LINEAR, 0)],  # K3 stores A_log entries that nothing reads
    ids=["k3", "kimi_linear"],
)
def test_one_rank_alone_reads_the_floor(config: KimiConfig, unread: int) -> None:
    sizes, floor = rank_bytes(config, 1, 4, scheme="sharded"), floor_bytes(config, 4)
    # Experts are rounded to bytes per layer here and once over all layers there.
    assert sizes.total - sizes.padding + unread == pytest.approx(floor.total, abs=92)


def test_kimi_linear_rank_bytes() -> None:
    stock, up, sharded = (rank_bytes(KIMI_LINEAR, 8, 1, scheme=s) for s in SCHEMES)
    assert stock.total == up.total  # no latent projections
    assert stock.per_layer("up") == 0
    assert {i.part for i in stock.items if i.padding} <= {"kda"}  # bf16 experts are not padded
    replicated = 26 * 256 * 2304 * 2 + 7 * 576 * 2304 * 2
    assert stock.total - sharded.total == replicated * 7 // 8
    assert stock.per_layer("experts") == 8 * 2 * 3 * 1024 * 2304 // 8


def test_batch_grows_state_and_experts_only() -> None:
    one, eight = (rank_bytes(K3, 16, b, scheme="sharded") for b in (1, 8))
    changed = {a.part for a, b in zip(one.items, eight.items, strict=True) if a.bytes != b.bytes}
    assert changed == {"state", "experts"}
    assert eight.per_layer("state") == 8 * one.per_layer("state")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InputError, match="tp 5 does not divide kda_heads = 96"):
        rank_bytes(K3, 5, 1, scheme="stock")
    with pytest.raises(InputError, match="batch is 0"):
        floor_bytes(K3, 0)
    with pytest.raises(InputError, match="tp is 0"):
        roofline(K3, get_target("h200"), 0, 1)
