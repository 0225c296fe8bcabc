from __future__ import annotations

import re
from dataclasses import replace

import pytest

from k3fuse.errors import InputError, RefusedError
from k3fuse.ir import parse_graph, print_graph
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.lowering.lower import layer_of, lower
from k3fuse.lowering.mailboxes import assign_mailboxes
from k3fuse.runtime.plan import Launch, Operand, Plan
from k3fuse.schedule.edges import launches_of
from k3fuse.tensor_type import parse_type
from tests.lowering.compiled import compiled

MODELS = ["kimi-k3-tiny", "kimi-linear-tiny"]


def launch_with(plan: Plan, op: str) -> Launch:
    return next(launch for launch in plan.launches if op in launch.ops)


def operand(launch: Launch, value: str) -> Operand:
    return next(o for o in launch.operands if o.value == value)


def test_a_plan_is_deterministic_and_follows_from_the_text_of_the_graph() -> None:
    it = compiled("kimi-k3-tiny", 2, 2)
    read = lower(parse_graph(print_graph(it.graph)), parse_graph(print_graph(it.stock)))
    assert read == it.plan
    assert read.hash() == it.plan.hash()


@pytest.mark.parametrize("model", MODELS)
def test_one_launch_a_group_in_order(model: str) -> None:
    it = compiled(model, 2, 2)
    groups = launches_of(it.graph)
    assert [launch.name for launch in it.plan.launches] == [g.name for g in groups]
    for launch, group in zip(it.plan.launches, groups, strict=True):
        assert launch.ops == tuple(leaf.op for leaf in group.body)
        assert (launch.stream, launch.wait) == (group.attrs["stream"], group.attrs["wait"])
        assert launch.after == group.attrs["after"]


def test_operands_of_the_kda_core() -> None:
    core = launch_with(compiled("kimi-k3-tiny", 2, 2).plan, "kda_step")
    prefix = "layers.0.self_attn"
    assert operand(core, f"{prefix}.q_conv1d.weight") == Operand(
        f"{prefix}.q_conv1d.weight",
        "weight",
        "read",
        "f32[256,1,4]@S(0)",
        128 * 4 * 4,
        f"{prefix}.q_conv1d.weight",
    )
    assert operand(core, f"{prefix}.slice.shard").access == "weight"
    slots = operand(core, "inputs.slots")
    assert (slots.access, slots.mode, slots.bytes) == ("host", "read", 2 * 4)
    q = operand(core, f"{prefix}.q_proj")
    assert (q.access, q.mode, q.bytes, q.storage) == ("activation", "read", 2 * 128 * 2, q.value)
    assert operand(core, f"{prefix}.o_norm").mode == "write"
    # the state once, as the version that the launch leaves
    state = [o for o in core.operands if o.access == "state"]
    assert [(o.value, o.mode, o.storage) for o in state] == [
        (f"{prefix}.kda_step.1", "update", "state.0.conv"),
        (f"{prefix}.kda_step.2", "update", "state.0.recurrent"),
    ]
    assert state[1].bytes == 3 * 4 * 32 * 32 * 4  # 3 slots, 4 of 8 heads
    # inside the launch only
    assert all(o.value != f"{prefix}.f_b_proj" for o in core.operands)


def test_verify_reads_states_and_updates_journals() -> None:
    core = launch_with(compiled("kimi-k3-tiny", 2, 2, rows=3, kind="verify").plan, "kda_verify")
    modes = {o.storage: o.mode for o in core.operands if o.access == "state"}
    assert modes == {
        "state.0.conv": "read",
        "state.0.recurrent": "read",
        "state.0.journal_qkv": "update",
        "state.0.journal_f": "update",
        "state.0.journal_b": "update",
    }


def test_the_cache_is_appended_in_one_launch_and_read_in_the_next() -> None:
    plan = compiled("kimi-k3-tiny", 2, 2).plan
    append, attend = launch_with(plan, "mla_append"), launch_with(plan, "mla_attend_latent")
    (written,) = [o for o in append.operands if o.access == "state"]
    (read,) = [o for o in attend.operands if o.access == "state"]
    assert (written.mode, read.mode) == ("update", "read")
    assert written.value == read.value
    assert written.storage == read.storage == "state.3.cache"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_mailboxes_are_rings_of_one_protocol_and_type(model: str, tp: int) -> None:
    plan = compiled(model, tp, 2).plan
    assert bool(plan.mailboxes) == (tp > 1)
    for box in plan.mailboxes:
        assert (box.stages, box.rearm) == (3, 2)
        floats = re.match(r"(bf16|f32)\[", box.type)
        assert box.sentinel == ("negative_zero" if floats else "minus_one")
        mine = [o for x in plan.launches for o in x.operands if o.storage == box.name]
        writes = [o for o in mine if o.mode == "write"]
        assert [o.use for o in writes] == list(range(box.uses))
        assert {o.access for o in mine} == {"mailbox"}
        assert {o.type for o in mine} == {box.type}
        assert all(o.bytes <= box.stage_bytes for o in mine)
        assert box.stage_bytes % 256 == 0
        by_value = {o.value: o.use for o in writes}
        assert all(by_value[o.value] == o.use for o in mine)
        assert {o.value for o in mine if o.mode == "read"} == set(by_value)
    pushes = sum(op in PUSHES for x in plan.launches for op in x.ops)
    assert pushes == sum(box.uses for box in plan.mailboxes)
    assert plan.memory.mailboxes == sum(3 * box.stage_bytes for box in plan.mailboxes)


def test_a_returned_mailbox_is_refused() -> None:
    text = print_graph(compiled("kimi-k3-tiny", 2, 2).graph)
    graph = parse_graph(re.sub(r"return %[\w.]+,", "return %embed_tokens.slots,", text))
    with pytest.raises(RefusedError, match=r"embed_tokens\.slots"):
        assign_mailboxes(graph)


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_what_launches_read(model: str) -> None:
    plan = compiled(model, 2).plan
    read = {o.value for x in plan.launches for o in x.operands if o.access == "weight"}
    assert {w.value for w in plan.weights} == read
    assert len(plan.weights) == len(read)
    assert plan.memory.weights == sum(w.bytes for w in plan.weights)
    # resident: the absorbed halves and not the parameter that they are cut from
    names = {w.value: w.binding for w in plan.weights}
    assert "layers.3.self_attn.kv_b_proj.weight" not in names
    assert names["layers.3.self_attn.mla_attend.slice"] == ""
    assert names["lm_head.weight"] == "lm_head.weight"


def test_states_outputs_and_memory() -> None:
    plan = compiled("kimi-k3-tiny", 2, 2).plan
    assert [name for name, _ in plan.outputs] == ["logits", "tokens", "hidden"]
    assert {s.binding for s in plan.states} >= {"state.0.conv", "state.3.cache"}
    assert plan.memory.state == sum(s.bytes for s in plan.states)
    memory = plan.memory
    assert memory.total == memory.weights + memory.state + memory.arena + memory.mailboxes
    assert (plan.batch, plan.rows_per_request, plan.rows, plan.tp) == (2, 1, 2, 2)
    commit = compiled("kimi-k3-tiny", 2, 2, rows=3, kind="commit").plan
    assert (commit.outputs, commit.rows) == ((), 6)


def test_layers_and_stock_launches() -> None:
    it = compiled("kimi-k3-tiny", 2, 2)
    by_name = {n.name: n for n in launches_of(it.graph)}
    for name, group in by_name.items():
        match = re.match(r"layers\.(\d+)\.", name)
        if match is not None and group.attrs["stream"] == "main":
            assert layer_of(group) == int(match[1]), name
    # the block parts of the mixes up to the next snapshot belong to the first of them
    assert layer_of(by_name["layers.0.attn_res_blocks"]) == 0
    assert it.plan.launches[0].layer == -1
    stock = dict(it.plan.stock_launches)
    assert set(stock) == set(range(-1, 8))
    fused: dict[int, int] = {}
    for launch in it.plan.launches:
        if launch.stream == "main":
            fused[launch.layer] = fused.get(launch.layer, 0) + 1
    assert all(stock[layer] > 2 * count for layer, count in fused.items() if layer >= 0)


def test_a_graph_without_launches_is_refused() -> None:
    it = compiled("kimi-k3-tiny", 2, 2)
    with pytest.raises(InputError, match="run the passes"):
        lower(it.stock, it.stock)


@pytest.mark.parametrize("model", MODELS)
def test_stated_bytes_are_those_of_the_stated_types(model: str) -> None:
    it = compiled(model, 4, 8)
    for launch in it.plan.launches:
        for o in launch.operands:
            assert o.bytes == parse_type(o.type).local_bytes(4, it.graph.dims), o.value
    for w in it.plan.weights:
        assert w.bytes == parse_type(w.type).local_bytes(4, it.graph.dims), w.value


def test_another_bucket_is_another_hash() -> None:
    plan = compiled("kimi-k3-tiny", 2, 2).plan
    assert plan.hash() != compiled("kimi-k3-tiny", 2, 8).plan.hash()
    first = replace(plan.launches[0], trigger="last_tile")
    assert replace(plan, launches=(first, *plan.launches[1:])).hash() != plan.hash()
