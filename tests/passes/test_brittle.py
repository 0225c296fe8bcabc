"""The same model written another way gives the same launches."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from k3fuse.ir import Graph, Rewriter, parse_graph, print_graph, verify
from k3fuse.ir.graph import Attr
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.passes.pipeline import pass_named
from k3fuse.schedule.edges import launches_of, stream_of
from k3fuse.testing import apply_pass
from k3fuse.trace import trace_step
from tests.passes.whole_models import TINY, Case, run_pipeline, traced

Shape = list[tuple[str, tuple[str, ...]]]


def launches(graph: Graph) -> Shape:
    """Stream and ops of each launch, without names."""
    run_pipeline(graph)
    verify(graph)
    return [(stream_of(n), tuple(leaf.op for leaf in n.body)) for n in launches_of(graph)]


def with_views(graph: Graph) -> Graph:
    """A view to the same shape behind every result, a split and a merge behind every matrix."""
    edit = Rewriter(graph, "views")
    for node in list(graph.leaves()):
        for result in node.results:
            shape: tuple[Attr, ...] = result.type.shape
            steps = [shape]
            width = shape[-1] if shape else None
            if len(shape) == 2 and isinstance(width, int) and width % 2 == 0:
                steps = [shape, (shape[0], width // 2, 2), shape]
            last, value = node, result
            for step in steps:
                new = edit.make("view", [value], {"shape": step}, name="v", origins=(), role="made")
                edit.insert_after(last, new)
                last, value = new, new.result
            first = result.uses[-1][0]  # the chain's own reader came last
            edit.replace_uses(result, value, keep=[first])
    verify(graph)
    return graph


def with_swapped_sums(graph: Graph) -> Graph:
    edit = Rewriter(graph, "swap")
    for node in graph.leaves():
        if node.op in ("add", "mul"):
            a, b = node.operands
            edit.set_operand(node, 0, b)
            edit.set_operand(node, 1, a)
    return graph


def with_other_names(graph: Graph) -> Graph:
    for index, value in enumerate(graph.values()):
        value.name = f"v{index}"
        value.binding = f"b{index}" if value.binding else ""
    for index, node in enumerate(graph.leaves()):
        node.origins = tuple(replace(o, site=f"n{index}/{node.op}") for o in node.origins)
    return graph


def with_dtype(graph: Graph, dtype: str) -> Graph:
    text = print_graph(graph).replace("bf16[", f"{dtype}[").replace('"bf16"', f'"{dtype}"')
    return parse_graph(text)


CASES = [Case(name, tp) for name in TINY for tp in (1, 4)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_views_do_not_matter(case: Case) -> None:
    assert launches(with_views(traced(case))) == launches(traced(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operand_order_does_not_matter(case: Case) -> None:
    assert launches(with_swapped_sums(traced(case))) == launches(traced(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_names_do_not_matter(case: Case) -> None:
    assert launches(with_other_names(traced(case))) == launches(traced(case))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtypes_do_not_matter(case: Case, dtype: str) -> None:
    found, usual = launches(with_dtype(traced(case), dtype)), launches(traced(case))
    assert without_casts(found) == without_casts(usual)


def without_casts(shape: Shape) -> Shape:
    """A model in f32 rounds less often: its casts change nothing."""
    return [(stream, tuple(op for op in ops if op != "cast")) for stream, ops in shape]


@pytest.mark.parametrize("block", [2, 4, 5])
def test_attn_res_blocks_of_other_sizes_give_the_same_kinds_of_launches(block: int) -> None:
    """One block launch a snapshot, and the same set of launches on the main stream."""

    def of_block(size: int) -> Shape:
        config = replace(BUILTIN_CONFIGS["kimi-k3-tiny"], attn_res_block_size=size)
        step = trace_step(KimiModel(config, "meta"), rows_per_request=1, mode="commit", page_size=8)
        step.attrs.update(traced(Case("kimi-k3-tiny", 4)).attrs)
        return launches(step)

    shape, usual = of_block(block), of_block(3)
    blocks = [ops for stream, ops in shape if stream == "aux"]
    assert len(blocks) == -(-8 // block)  # a snapshot every `block` layers, from layer 0 on
    assert all(set(ops) == {"attn_res_blocks"} for ops in blocks)
    # Which layer kind meets a snapshot differs with the size; whether it does is all that matters.
    assert main_kinds(shape) == main_kinds(usual)


def main_kinds(shape: Shape) -> set[str]:
    """Main launches, without whether the running sum was just snapshotted (no add before it)."""
    text = (" ".join(ops) for stream, ops in shape if stream == "main")
    return {re.sub(r"\badd (?=attn_res_merge)", "", ops) for ops in text}


def test_a_view_between_reduction_and_norm_does_not_block_the_match() -> None:
    body = """graph g {{dim.M=1, target="gb300", tp=2}} {{
      input %x: bf16[M,8]@S(1)
      input %residual: bf16[M,8]
      weight %wo: bf16[8,8]@S(1)
      weight %norm: bf16[8]
      weight %w: bf16[16,8]@S(0)
      %p: bf16[M,8]@P = linear(%x, %wo)
      %r: bf16[M,8] = all_reduce(%p)
      {view}
      %h: bf16[M,8] = add({operands})
      %n: bf16[M,8] = rms_norm(%h, %norm) {{eps=1e-05}}
      %y: bf16[M,16]@S(1) = linear(%n, %w)
      return %y, %h
    }}"""
    view = '%v: bf16[M,8] = view(%r) {shape=["M", 8]}'
    variants = [("", "%residual, %r"), (view, "%residual, %v"), (view, "%v, %residual")]
    found: list[list[list[str]]] = []
    for extra, operands in variants:
        text = body.format(view=extra, operands=operands)
        for name in ("canonicalize", "lower-collectives", "fuse-comm", "fuse-prologue"):
            graph, _ = apply_pass(pass_named(name), text)
            text = print_graph(graph)
        found.append([[leaf.op for leaf in n.body] for n in parse_graph(text).nodes if n.is_fused])
    assert found[0] == [
        ["linear", "push_partial"],
        ["sum_slots", "add", "rms_norm", "linear"],
    ]
    assert found[0] == found[1] == found[2]
