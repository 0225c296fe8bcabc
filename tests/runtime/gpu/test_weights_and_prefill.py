"""Weights byte for byte as the interpreter has them, and prefill op by op on them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.models.kimi import KimiModel, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_parameters import kimi_init, kimi_parameters
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.gpu.memory import RankMemory, allocate
from k3fuse.runtime.gpu.op_by_op import OpByOp
from k3fuse.runtime.gpu.ranks import Loopback, RankMode, VirtualRanks
from k3fuse.runtime.gpu.weights import load_weights, random_shards
from k3fuse.runtime.slots import SlotManager
from k3fuse.runtime.stock import StockExecutor
from k3fuse.runtime.weights import LoadShard, evaluate_recipe, shard_slice
from k3fuse.tensor_type import TensorType
from tests.runtime.conftest import prompt, tiny_model
from tests.runtime.gpu.conftest import CPU, Made, made


def shards_of(model: KimiModel, tp: int) -> LoadShard:
    def load(path: str, type_: TensorType, rank: int) -> Tensor:
        whole = model.get_parameter(path).detach()
        cut = shard_slice(type_, tp, rank)
        return whole if cut is None else whole.narrow(cut[0], cut[1], cut[2] - cut[1])

    return load


def loaded(found: Made, mode: RankMode, model: KimiModel) -> dict[int, RankMemory]:
    memories = allocate(found.layout, mode, CPU)
    load_weights(found.recipe, shards_of(model, mode.tp), memories)
    for memory in memories.values():
        for state in memory.states.values():
            state.zero_()
    return memories


@pytest.mark.parametrize("mode", [VirtualRanks(1), VirtualRanks(2), Loopback(2, 1)])
def test_weights_are_those_of_the_recipe(mode: RankMode) -> None:
    found, model = made(tp=mode.tp), tiny_model()
    memories = loaded(found, mode, model)
    wanted = evaluate_recipe(found.recipe, lambda path: model.get_parameter(path).detach())
    for rank, memory in memories.items():
        assert set(memory.weights) == set(wanted)
        for name, place in memory.weights.items():
            assert torch.equal(bits(place), bits(wanted[name][rank])), name


def test_progress_ends_at_all_bytes() -> None:
    found, model, done = made(), tiny_model(), list[int]()
    load_weights(
        found.recipe, shards_of(model, 2), allocate(found.layout, VirtualRanks(2), CPU), done.append
    )
    assert sum(done) == sum(place.bytes for place in found.layout.weights.values())


def test_a_parameter_of_another_shape_is_refused_by_name() -> None:
    found = made()

    def load(path: str, type_: TensorType, rank: int) -> Tensor:
        return torch.zeros(3)

    with pytest.raises(
        InputError, match=r"parameter model\.layers\.0\.self_attn\.A_log has shape \[3\]"
    ):
        load_weights(found.recipe, load, allocate(found.layout, VirtualRanks(2), CPU))


def test_random_weights_follow_the_rules_of_synth() -> None:
    config = BUILTIN_CONFIGS["kimi-k3-tiny"]
    found, seen = made(), list[dict[str, Tensor]]()
    for seed in (0, 0, 1):
        memories = allocate(found.layout, VirtualRanks(2), CPU)
        specs = kimi_parameters(config)
        load = random_shards(specs, lambda path: kimi_init(config, path), 2, CPU, seed)
        load_weights(found.recipe, load, memories)
        seen.append({k: v.clone() for k, v in memories[0].weights.items()})
        replicated = [k for k in found.layout.weights if "input_layernorm" in k]
        for name in replicated:
            assert torch.equal(memories[0].weights[name], memories[1].weights[name])
    assert all(torch.equal(bits(a), bits(seen[1][k])) for k, a in seen[0].items())
    assert not torch.equal(seen[0]["embed_tokens.weight"], seen[2]["embed_tokens.weight"])
    scale = next(v for k, v in seen[0].items() if k.endswith("w1_scale"))
    assert 100 < int(scale.min()) <= int(scale.max()) < 135


@pytest.mark.parametrize("tp", [1, 2])
def test_prefill_and_decode_op_by_op_equal_stock(tp: int) -> None:
    """Chunks of any length, then single rows, on two requests: all bits, states too."""
    found, model = made(tp=tp), tiny_model()
    mode = VirtualRanks(tp)
    memories = loaded(found, mode, model)
    run = OpByOp(
        found.buckets[0].graph,
        {n: [m.weights[n] for m in memories.values()] for n in found.layout.weights},
        {n: [m.states[n] for m in memories.values()] for n in found.layout.states},
        mode.mine,
        mode.gather,
    )
    capacity = Capacity.of(found.options)
    stock, slots = StockExecutor(model, capacity), SlotManager(capacity)
    leases = [slots.join(40), slots.join(20)]
    for count, seed in ((7, 1), (1, 2), (3, 3)):
        for lease in leases:
            inputs = slots.inputs([lease], [prompt(count, seed)], 1)
            same(run(inputs._asdict(), count), stock.prefill(inputs, count)._asdict())
            lease.length += count
    inputs: StepInputs = slots.inputs(leases, [prompt(1, 4), prompt(1, 5)], 3)
    got, wanted = run(inputs._asdict(), 1), stock.step(inputs, 1, "commit")
    same({k: v[:2] for k, v in got.items()}, {k: v[:2] for k, v in wanted._asdict().items()})


def same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(bits(got[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
