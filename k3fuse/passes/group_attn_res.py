"""All AttnRes sites that read the same snapshots share one launch beside the critical path."""

from __future__ import annotations

import re
from typing import ClassVar

from k3fuse.ir import Node
from k3fuse.passes.base import Edit, Pass, parent_name


class GroupAttnRes(Pass):
    """Horizontal fusion of block parts over one set of snapshots.

    Before:
        %m0, %d0, %a0 = attn_res_blocks(%u0, %s0, %s1) {eps=1e-05}
        %m1, %d1, %a1 = attn_res_blocks(%u1, %s0, %s1) {eps=1e-05}
    After:
        fused @layers.12.attn_res_blocks { ...both... }

    The snapshots change once a block, so a block's sites (24 for K3) are known together as soon as
    the last snapshot is; each snapshot is read once for all of them. Order: after split-attn-res.
    """

    name: ClassVar[str] = "group-attn-res"

    def rewrite(self, edit: Edit) -> None:
        sites: dict[tuple[int, ...], list[Node]] = {}
        for node in edit.graph.nodes:
            if node.op == "attn_res_blocks":
                sites.setdefault(tuple(id(v) for v in node.operands[1:]), []).append(node)
        for nodes in sites.values():
            mix = re.sub(r"\.\d+$", "", parent_name(nodes[0].results[0].name))  # mix.2 is a mix
            layer = parent_name(mix)
            edit.try_fuse(nodes, f"{layer or 'output'}.attn_res_blocks")
