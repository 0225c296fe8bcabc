"""Horizontal fusion: linears that read one input become one launch."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node
from k3fuse.passes.base import Edit, Pass, parent_name


class MergeProjections(Pass):
    """Group the linears on one row, whatever their placements and result dtypes.

    Before:
        %q = linear(%x, %wq)
        %k = linear(%x, %wk)
    After:
        fused @layers.3.self_attn.projections {
          %q = linear(%x, %wq)
          %k = linear(%x, %wk)
        }

    The weights are stacked at load (weight recipe); every result keeps its own dtype, so router
    logits stay f32. Order: after split-replicated; before the passes that absorb producers, which
    would take single linears away.
    """

    name: ClassVar[str] = "merge-projections"

    def rewrite(self, edit: Edit) -> None:
        static = edit.graph.static_values()
        by_input: dict[int, list[Node]] = {}
        for node in edit.graph.nodes:
            if node.op == "linear":
                by_input.setdefault(id(node.operands[0]), []).append(node)
        for siblings in by_input.values():
            for node in [n for n in siblings if id(n.operands[1]) not in static]:
                edit.refuse(node, "its weight is no static value", node.operands[1])
                siblings.remove(node)
            if len(siblings) > 1:
                prefix = parent_name(siblings[-1].result.name.removesuffix(".shard"))
                edit.try_fuse(siblings, f"{prefix}.projections")
            elif siblings and siblings[0].operands[0].kind != "result":
                edit.refuse(siblings[0], "nothing else reads its input", siblings[0].operands[0])
