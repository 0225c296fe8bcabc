"""A pass of your own, outside the package: checked alone, then run in the pipeline."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.compiler import trace_bucket
from k3fuse.ir import Node, print_graph
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.passes.base import Edit, Pass
from k3fuse.passes.manager import run_passes
from k3fuse.passes.pipeline import PIPELINE
from k3fuse.runtime.bundle import Bucket
from k3fuse.testing import apply_pass


class FoldCastPair(Pass):
    """Remove a cast to a wider dtype and back.

    Before:
        %w = cast(%x) {dtype="f32"}
        %y = cast(%w) {dtype="bf16"}
        return %y
    After:
        return %x

    A pair whose first cast narrows is refused: it rounds. Order: after canonicalize.
    """

    name: ClassVar[str] = "fold-cast-pair"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            inner = node.operands[0].producer if node.op == "cast" else None
            if inner is not None and inner.op == "cast":
                _fold(edit, inner, node)


def _fold(edit: Edit, inner: Node, outer: Node) -> None:
    source, between = inner.operands[0], inner.result
    if outer.result.type != source.type:
        return  # a real conversion
    if between.type.dtype.itemsize < source.type.dtype.itemsize:
        edit.refuse(outer, "the first cast rounds", between)
        return
    edit.replace_uses(outer.result, source)
    edit.drop(outer, "a cast to a wider dtype and back")
    if not between.uses and between not in edit.graph.outputs:
        edit.drop(inner, "a cast to a wider dtype and back")


TEXT = """
graph g {dim.M=3, target="gb300", tp=1} {
  input %x: bf16[M,8]
  input %z: f32[M,8]
  %w: f32[M,8] = cast(%x) {dtype="f32"}
  %y: bf16[M,8] = cast(%w) {dtype="bf16"}
  %s: bf16[M,8] = silu(%y)
  %n: bf16[M,8] = cast(%z) {dtype="bf16"}
  %r: f32[M,8] = cast(%n) {dtype="f32"}
  return %s, %r
}
"""


def main() -> None:
    # Checks all a pass promises: well formed, idempotent, honest about changes, same meaning.
    graph, result = apply_pass(FoldCastPair(), TEXT)
    print(print_graph(graph))
    for refusal in result.refusals:
        print(f"refused at {refusal.site}: {refusal.reason} ({refusal.value})")

    model = family_of("kimi-k3-tiny").build(builtin_config("kimi-k3-tiny"), "meta")
    bucket, options = Bucket(1, 1, "step"), CompileOptions(target="gb300", tp=4)
    step = trace_bucket(model, "kimi-k3-tiny", bucket, options)
    results = run_passes(step, [PIPELINE[0], FoldCastPair(), *PIPELINE[1:]])
    print(f"\nin the pipeline: {results[1].changes} changes, {len(results[1].refusals)} refusals")


if __name__ == "__main__":
    main()
