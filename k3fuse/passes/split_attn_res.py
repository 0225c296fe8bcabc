"""Take the block part of an AttnRes mix off the critical path."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Attr, Node, Value
from k3fuse.passes.base import Edit, Pass


class SplitAttnRes(Pass):
    """Split a mix into the part that reads snapshots and the part that merges the running sum.

    Before:
        %h = attn_res_mix(%norm, %proj, %s0, %s1, %sum) {eps=1e-05}
    After:
        %u = mul(cast(%norm), view(cast(%proj)))          // static: weight recipe
        %m, %d, %a = attn_res_blocks(%u, %s0, %s1) {eps=1e-05}
        %h = attn_res_merge(%u, %m, %d, %a, %sum) {eps=1e-05}

    Snapshots change once a block, so the first part can run long before it is needed (K3 spec
    2.3). Order: after canonicalize, which removes mixes of one source.
    """

    name: ClassVar[str] = "split-attn-res"

    def rewrite(self, edit: Edit) -> None:
        static = edit.graph.static_values()
        for node in list(edit.graph.leaves()):
            if node.op != "attn_res_mix":
                continue
            moving = next((v for v in node.operands[:2] if id(v) not in static), None)
            if moving is not None:
                edit.refuse(node, "the query is not static", moving)
            elif len(node.operands) < 4:
                edit.refuse(node, "there is no snapshot to read early", node.operands[2])
            else:
                _split(edit, node)


def _split(edit: Edit, node: Node) -> None:
    norm, proj, *snapshots, total = node.operands
    eps: dict[str, Attr] = {"eps": node.attrs["eps"]}

    def add(
        op: str, operands: list[Value], attrs: dict[str, Attr], suffix: str, role: str
    ) -> list[Value]:
        name = f"{node.result.name}.{suffix}"
        new = edit.make(op, operands, attrs, name=name, origins=node.origins, role=role)
        edit.insert_before(node, new)
        return new.results

    width = total.type.shape[1]
    (wide_norm,) = add("cast", [norm], {"dtype": "f32"}, "norm", "made")
    (wide_proj,) = add("cast", [proj], {"dtype": "f32"}, "proj", "made")
    (flat,) = add("view", [wide_proj], {"shape": (width,)}, "proj_row", "made")
    (query,) = add("mul", [wide_norm, flat], {}, "query", "made")
    blocks = add("attn_res_blocks", [query, *snapshots], eps, "blocks", "1/2")
    (mixed,) = add("attn_res_merge", [query, *blocks, total], eps, "merge", "2/2")
    edit.replace_uses(node.result, mixed)
    edit.erase(node)
