"""Which launches run beside the main stream."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.passes.base import Edit, Pass

_SIDE = {"attn_res_blocks": "aux", "l2_prefetch": "prefetch"}
MOST_SIDE_ROWS = 8
"""Rows of a step whose block parts run beside the main stream."""
STREAMS = ("main", "aux", "prefetch")


class AssignStreams(Pass):
    """Put every launch on a stream: block parts of AttnRes on aux, L2 prefetch on its own.

    Before:
        fused @layers.12.attn_res_blocks { ... }
    After:
        fused @layers.12.attn_res_blocks {stream="aux"} { ... }

    Side launches depend on little and are waited for late, so they leave the critical path. Of
    many rows the block parts stay on main, where they get the whole GPU: on the SMs that a side
    stream may take, K3 at M=64 waited 200 us for each of them (H200, TP16).
    Order: after form-launches and insert-l2-prefetch, before insert-pdl.
    """

    name: ClassVar[str] = "assign-streams"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        for node in edit.graph.nodes:
            if node.is_fused:
                sides = {_SIDE.get(leaf.op, "main") for leaf in node.body}
                stream = sides.pop() if len(sides) == 1 else "main"
                if stream == "aux" and edit.graph.dims.get("M", 1) > MOST_SIDE_ROWS:
                    stream = "main"
                edit.set_attr(node, "stream", stream)
