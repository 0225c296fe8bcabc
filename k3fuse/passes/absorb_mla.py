"""Let MLA attend in latent space: fold the key expansion into the query, the value's behind."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Attr, Node, Value
from k3fuse.passes.base import Edit, Pass


class AbsorbMla(Pass):
    """Replace an attention that expands every cached row by one that reads rows as they are.

    Before:
        %o = mla_attend(%q, %cache, %kv_b, %table, %lengths, %slots) {nope_dim=128, ...}
    After:
        %w = view(%kv_b) {shape=[96,256,512]}
        %uk = slice(%w) {dim=1, start=0, stop=128}
        %uv = slice(%w) {dim=1, start=128, stop=256}
        %ql = mla_absorb_query(%q, %uk) {nope_dim=128, rope_dim=64}
        %ol = mla_attend_latent(%ql, %cache, %table, %lengths, %slots) {kv_lora=512, ...}
        %o = mla_value(%ol, %uv)

    The slices are static: they go to the weight recipe. Order: before shard-stock, which splits
    the new ops by heads. (K3 spec 2.5)
    """

    name: ClassVar[str] = "absorb-mla"

    def rewrite(self, edit: Edit) -> None:
        static = edit.graph.static_values()
        for node in list(edit.graph.leaves()):
            if node.op != "mla_attend":
                continue
            if id(node.operands[2]) not in static:
                edit.refuse(node, "the expansion is no static weight", node.operands[2])
                continue
            _absorb(edit, node)


def _absorb(edit: Edit, node: Node) -> None:
    q, cache, kv_b, *where = node.operands
    nope, rope, v = (int(str(node.attrs[k])) for k in ("nope_dim", "rope_dim", "v_dim"))
    rows, rank = kv_b.type.shape
    assert isinstance(rows, int)
    assert isinstance(rank, int)

    def add(op: str, operands: list[Value], attrs: dict[str, Attr], *, role: str) -> Value:
        name = f"{node.result.name}.{op}"
        new = edit.make(op, operands, attrs, name=name, origins=node.origins, role=role)
        edit.insert_before(node, new)
        return new.result

    heads = rows // (nope + v)
    per_head = add("view", [kv_b], {"shape": (heads, nope + v, rank)}, role="made")
    w_uk = add("slice", [per_head], {"dim": 1, "start": 0, "stop": nope}, role="made")
    w_uv = add("slice", [per_head], {"dim": 1, "start": nope, "stop": nope + v}, role="made")
    query = add("mla_absorb_query", [q, w_uk], {"nope_dim": nope, "rope_dim": rope}, role="1/3")
    latent = add(
        "mla_attend_latent",
        [query, cache, *where],
        {
            "kv_lora": rank,
            "rope_dim": rope,
            "softmax_scale": (nope + rope) ** -0.5,
            "rows_per_request": node.attrs["rows_per_request"],
        },
        role="2/3",
    )
    value = add("mla_value", [latent, w_uv], {}, role="3/3")
    edit.replace_uses(node.result, value)
    edit.erase(node)
