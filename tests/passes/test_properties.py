"""Random straight-line graphs: text round trip, meaning under clean-up passes, fusing at random."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from k3fuse.ir import parse_graph, print_graph, verify
from k3fuse.passes.base import Edit
from k3fuse.passes.pipeline import PIPELINE, pass_named
from k3fuse.schedule.edges import launches_of
from k3fuse.testing import (
    apply_pass,
    assert_round_trip,
    assert_same_meaning,
    interpret,
    random_inputs,
)

WIDTHS = (4, 8)


@dataclass
class Sketch:
    """Text of a graph that grows by one op at a time. All rows are [M, width], bf16 or f32."""

    lines: list[str] = field(default_factory=list[str])
    weights: list[str] = field(default_factory=list[str])
    rows: list[tuple[str, str, int]] = field(default_factory=lambda: [("x", "bf16", 8)])

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(f"weight %{name}: bf16[{','.join(map(str, shape))}]")
        return name

    def add(self, op: str, operands: list[str], dtype: str, width: int, attrs: str = "") -> None:
        name = f"v{len(self.rows)}"
        call = f"{op}({', '.join(f'%{o}' for o in operands)}){attrs}"
        site = f"n{len(self.rows)}/{op}"
        self.lines.append(f"%{name}: {dtype}[M,{width}] = {call} from {site}")
        self.rows.append((name, dtype, width))

    def text(self, tp: int, outputs: list[str]) -> str:
        body = ["input %x: bf16[M,8]", *self.weights, *self.lines]
        returned = ", ".join(f"%{o}" for o in outputs)
        head = f'graph g {{dim.M=1, target="gb300", tp={tp}}} {{'
        return "\n".join([head, *(f"  {line}" for line in body), f"  return {returned}", "}", ""])


OPS = ("linear", "wide_linear", "add", "mul", "rms_norm", "situ_mul", "silu", "sigmoid", "view",
       "split_view", "slice", "cast")  # fmt: skip


@st.composite
def graph_texts(draw: st.DrawFn, *, tps: tuple[int, ...] = (1, 2)) -> str:
    sketch = Sketch()
    for op in draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=12)):
        name, dtype, width = draw(st.sampled_from(sketch.rows))
        alike = [r[0] for r in sketch.rows if r[1:] == (dtype, width)]
        other = draw(st.sampled_from(alike))
        if op in ("linear", "wide_linear"):
            out = draw(st.sampled_from(WIDTHS))
            weight = sketch.weight(out, width)
            wide = op == "wide_linear"
            attrs = ' {out="f32"}' if wide else ""
            sketch.add("linear", [name, weight], "f32" if wide else dtype, out, attrs)
        elif op in ("add", "mul"):
            sketch.add(op, [name, other], dtype, width)
        elif op == "situ_mul":
            sketch.add(op, [name, other], dtype, width, " {beta=4.0, linear_beta=25.0}")
        elif op == "rms_norm":
            sketch.add(op, [name, sketch.weight(width)], dtype, width, " {eps=1e-05}")
        elif op in ("silu", "sigmoid"):
            sketch.add(op, [name], dtype, width)
        elif op == "view":
            sketch.add(op, [name], dtype, width, f' {{shape=["M", {width}]}}')
        elif op == "split_view":
            halves = f"h{len(sketch.lines)}"
            sketch.lines.append(
                f"%{halves}: {dtype}[M,2,{width // 2}] = view(%{name}) "
                f'{{shape=["M", 2, {width // 2}]}} from {halves}/view'
            )
            sketch.add("view", [halves], dtype, width, f' {{shape=["M", {width}]}}')
        elif op == "slice" and width == 8:
            start = draw(st.sampled_from([0, 2, 4]))
            attrs = f" {{dim=1, start={start}, stop={start + 4}}}"
            sketch.add("slice", [name], dtype, 4, attrs)
        elif op == "cast":
            wanted = draw(st.sampled_from(["bf16", "f32"]))
            sketch.add("cast", [name], wanted, width, f' {{dtype="{wanted}"}}')
    names = [row[0] for row in sketch.rows]
    outputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    return sketch.text(draw(st.sampled_from(tps)), outputs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(graph_texts())
def test_text_round_trip(text: str) -> None:
    graph = parse_graph(text)
    verify(graph)
    assert print_graph(graph) == text
    assert_round_trip(graph)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(graph_texts())
def test_clean_up_and_fusions_keep_the_meaning(text: str) -> None:
    for name in ("canonicalize", "dce", "merge-projections", "fuse-comm", "fuse-prologue"):
        graph, _ = apply_pass(pass_named(name), text)
        text = print_graph(graph)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(graph_texts(tps=(1, 2, 4)))
def test_the_whole_pipeline_keeps_the_meaning(text: str) -> None:
    before, graph = parse_graph(text), parse_graph(text)
    for item in PIPELINE:
        old = print_graph(graph)
        result = item.run(graph)
        verify(graph)
        assert (result.changes == 0) == (print_graph(graph) == old), item.name
    assert_same_meaning(before, graph)
    assert all(not n.is_fused or n.attrs["after"] is not None for n in launches_of(graph))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(graph_texts(), st.data())
def test_fusing_at_random_never_breaks_a_graph(text: str, data: st.DataObject) -> None:
    graph = parse_graph(text)
    inputs = random_inputs(graph)
    wanted = interpret(graph, inputs)
    leaves = [id(leaf) for leaf in graph.leaves()]
    edit = Edit(graph, "trial")
    for _ in range(data.draw(st.integers(1, 6))):
        members = data.draw(
            st.lists(st.sampled_from(list(graph.nodes)), min_size=1, max_size=4, unique_by=id)
        )
        edit.try_fuse(members, "launch")
        verify(graph)
        assert_round_trip(graph)
    assert sorted(id(leaf) for leaf in graph.leaves()) == sorted(leaves)
    for found, value in zip(interpret(graph, inputs), wanted, strict=True):
        assert found.equal(value)  # the same ops in another order
