from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3fuse.errors import RefusedError
from k3fuse.ir import FUSED, Graph, Node, Value
from k3fuse.lowering import assign_buffers as lowering
from k3fuse.lowering.assign_buffers import (
    Window,
    arena_bytes,
    assign_buffers,
    check_buffers,
    launch_windows,
    place_buffers,
)
from k3fuse.lowering.lower import lower
from k3fuse.runtime.plan import Buffer, Operand, Plan
from k3fuse.schedule.edges import launches_of, parse_edge
from k3fuse.tensor_type import DType, TensorType
from tests.lowering.compiled import compiled

intervals = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12)), max_size=40
)


@settings(deadline=None, max_examples=200)
@given(intervals)
def test_live_buffers_never_overlap(items: list[tuple[int, int, int]]) -> None:
    buffers = [
        Buffer(f"v{i}", 0, size, first, first + length)
        for i, (size, first, length) in enumerate(items)
    ]
    placed = place_buffers(buffers)
    check_buffers(placed)
    assert [replace(b, offset=0) for b in placed] == buffers
    assert place_buffers(buffers) == placed
    assert all(b.offset % 256 == 0 for b in placed)
    # brute force, position by position and byte by byte in whole lines
    for position in range(43):
        lines = [
            line
            for b in placed
            if b.first <= position <= b.last
            for line in range(b.offset // 256, -(-(b.offset + b.bytes) // 256))
        ]
        assert len(lines) == len(set(lines))


def test_bytes_are_reused_and_the_arena_is_no_larger_than_needed() -> None:
    chain = [Buffer(f"v{i}", 0, 1000, i, i + 1) for i in range(10)]
    placed = place_buffers(chain)
    assert arena_bytes(placed) == 2 * 1024
    assert {b.offset for b in placed} == {0, 1024}


def test_an_overlap_names_both_values() -> None:
    a, b = Buffer("a", 0, 512, 0, 4), Buffer("b", 256, 512, 4, 6)
    with pytest.raises(RefusedError, match=r"%a .*%b .*overlap"):
        check_buffers([a, b])
    check_buffers([a, replace(b, first=5)])
    check_buffers([a, replace(b, offset=512)])
    with pytest.raises(RefusedError, match="aligned"):
        check_buffers([replace(a, offset=8)])


def step(*launches: tuple[str, str, tuple[str, ...], tuple[str, ...]]) -> Graph:
    """Launches as (name, stream, edges, names of launches it reads); the last is returned."""
    type_ = TensorType(DType.F32, (64,))
    source = Value("x", type_, "input", "inputs.x")
    graph = Graph("g", inputs=[source])
    values = {"x": source}
    for name, stream, after, reads in launches:
        leaf = Node("sigmoid", [], {}, [])
        group = Node(FUSED, [], {"stream": stream, "after": after}, [], name=name, body=[leaf])
        leaf.parent = group
        for index, read in enumerate(reads):
            leaf.operands.append(values[read])
            values[read].uses.append((leaf, index))
        values[name] = Value(name, type_, producer=leaf)
        leaf.results.append(values[name])
        graph.nodes.append(group)
    graph.outputs = [values[launches[-1][0]]]
    return graph


def test_a_side_launch_keeps_its_operands_to_the_join() -> None:
    graph = step(
        ("a", "main", (), ("x",)),
        ("b", "main", ("pdl:a",), ("a",)),
        ("side", "aux", ("event:b",), ("a", "b")),
        ("c", "main", ("pdl:b",), ("b",)),
        ("d", "main", ("pdl:c",), ("c",)),
        ("side2", "aux", ("full:side",), ("x",)),
        ("e", "main", ("pdl:d", "event:side2"), ("d",)),
        ("f", "main", ("pdl:e",), ("e", "side", "side2")),
    )
    windows = [(w.first, w.last) for w in launch_windows(graph)]
    assert windows == [(0, 0), (1, 1), (2, 6), (3, 3), (4, 4), (2, 6), (6, 6), (7, 7)]
    live = {b.value: (b.first, b.last) for b in assign_buffers(graph)}
    assert live == {
        "a": (0, 6),
        "b": (1, 6),
        "side": (2, 7),
        "c": (3, 4),
        "d": (4, 6),
        "side2": (2, 7),
        "e": (6, 7),
        "f": (7, 7),
    }
    check_buffers(assign_buffers(graph))


def test_a_side_launch_that_nobody_joins_runs_to_the_end() -> None:
    graph = step(
        ("a", "main", (), ("x",)),
        ("side", "aux", (), ("a",)),
        ("b", "main", ("pdl:a",), ("a",)),
        ("c", "main", ("pdl:b",), ("b",)),
    )
    assert [(w.first, w.last) for w in launch_windows(graph)][1] == (0, 3)


def check_plan(plan: Plan) -> None:
    """The arena of a plan, from its operands alone: whoever reads finds what was written."""
    check_buffers(plan.arena)
    buffers = {b.value: b for b in plan.arena}
    where = {launch.name: i for i, launch in enumerate(plan.launches)}
    for launch in plan.launches:
        for operand in launch.operands:
            if operand.access != "activation":
                continue
            buffer = buffers[operand.value]
            assert (operand.storage, operand.offset) == (buffer.value, buffer.offset)
            assert operand.bytes == buffer.bytes
            assert buffer.first <= where[launch.name] <= buffer.last
    for _, value in plan.outputs:
        assert buffers[value].last == len(plan.launches) - 1
    assert plan.memory.arena == arena_bytes(plan.arena)


@pytest.mark.parametrize("model", ["kimi-k3-tiny", "kimi-linear-tiny"])
@pytest.mark.parametrize(("tp", "batch"), [(1, 1), (2, 8), (4, 2)])
def test_tiny_plans(model: str, tp: int, batch: int) -> None:
    check_plan(compiled(model, tp, batch).plan)
    check_plan(compiled(model, tp, batch, rows=3, kind="verify").plan)


def lines(operand: Operand) -> range:
    """The 256-byte lines of the arena that an activation fills."""
    return range(operand.offset // 256, -(-(operand.offset + operand.bytes) // 256))


def replay(plan: Plan, random: Random) -> None:
    """Run the launches in a random order that the edges allow, on an arena of value names."""
    waiting = {x.name: {parse_edge(e).source for e in x.after} for x in plan.launches}
    by_name = {x.name: x for x in plan.launches}
    arena: dict[int, str] = {}
    while waiting:
        ready = sorted(name for name, sources in waiting.items() if not sources & set(waiting))
        launch = by_name[random.choice(ready)]
        del waiting[launch.name]
        mine = [o for o in launch.operands if o.access == "activation"]
        for operand in mine:
            if operand.mode == "read":
                assert {arena.get(line) for line in lines(operand)} == {operand.value}, launch.name
        for operand in mine:
            if operand.mode == "write":
                arena.update(dict.fromkeys(lines(operand), operand.value))


@pytest.mark.parametrize(("tp", "batch"), [(1, 8), (4, 2)])
def test_any_order_that_the_edges_allow_reads_what_was_written(tp: int, batch: int) -> None:
    plan = compiled("kimi-k3-tiny", tp, batch).plan
    assert {x.stream for x in plan.launches} >= {"main", "aux"}
    for seed in range(30):
        replay(plan, Random(seed))


def test_without_the_windows_of_side_launches_reads_go_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_place(graph: Graph) -> list[Window]:
        return [Window(i, i) for i, _ in enumerate(launches_of(graph))]

    it = compiled("kimi-k3-tiny", 1, 8)
    monkeypatch.setattr(lowering, "launch_windows", in_place)
    plan = lower(it.graph, it.stock)
    with pytest.raises(AssertionError):
        replay(plan, Random(0))


@pytest.mark.slow
def test_k3_snapshots_keep_their_bytes_until_their_last_reader() -> None:
    """A temporary that took the place of a late snapshot once gave garbage from layer 85 on."""
    it = compiled("kimi-k3", 16)
    plan = it.plan
    check_plan(plan)
    buffers = {b.value: b for b in plan.arena}
    readers: dict[str, int] = {}
    for index, launch in enumerate(plan.launches):
        for operand in launch.operands:
            readers[operand.value] = index
    late = [x for x in plan.launches if x.layer >= 84 and "attn_res_blocks" in x.ops]
    snapshots = {
        o.value for x in late for o in x.operands if o.access == "activation" and o.mode == "read"
    }
    assert len(snapshots) >= 8
    for value in snapshots:
        kept = buffers[value]
        assert kept.last >= readers[value]
        for other in plan.arena:
            apart = (
                other.offset + other.bytes <= kept.offset
                or kept.offset + kept.bytes <= other.offset
            )
            assert other is kept or apart or other.last < kept.first or other.first > kept.last
    # the fault itself: a temporary of layer 85 in the bytes of a snapshot that is still read
    victim = buffers[sorted(snapshots)[0]]
    temporary = next(
        b
        for b in plan.arena
        if b.value.startswith("layers.85.") and victim.first < b.first <= victim.last
    )
    aliased = [replace(b, offset=victim.offset) if b is temporary else b for b in plan.arena]
    with pytest.raises(RefusedError, match=r"layers\.85"):
        check_buffers(aliased)
