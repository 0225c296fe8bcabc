"""The launches around latent attention: query side before it, value side behind it."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node, Value
from k3fuse.passes.base import Edit, Pass, parent_name

_ROW_OPS = ("rms_norm", "slice", "view", "cast")


class FuseMlaQuery(Pass):
    """Norm, projection and absorption of the query, and the insertion of the cache row.

    Before:
        %a = rms_norm(%qa, %w) {eps=1e-06}
        %q = linear(%a, %wqb)
        %ql = mla_absorb_query(%q, %uk)
        %c = rms_norm(slice(%kv), %wc)
        %cache.1 = mla_append(%cache, %c, slice(%kv), ...)
    After:
        fused @layers.3.self_attn.mla_query { ...all of them... }

    Both sides need the same gathered low-rank rows, and attention needs both. A projection merged
    with others on its input stays where it is. Order: after merge-projections and absorb-mla.
    """

    name: ClassVar[str] = "fuse-mla-query"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op != "mla_attend_latent":
                continue
            query, append = node.operands[0].producer, node.operands[1].producer
            members: list[Node] = []
            if query is None or query.op != "mla_absorb_query":
                edit.refuse(node, "the query is not absorbed", node.operands[0])
            else:
                members += [*_chain(edit, query.operands[0]), query]
            if append is None or append.op != "mla_append":
                edit.refuse(node, "the cache is not appended to in this step", node.operands[1])
            else:
                rows = [n for v in append.operands[1:3] for n in _chain(edit, v)]
                members += [*rows, append]
            if members:
                prefix = parent_name(node.result.name).removesuffix(".mla_attend")
                edit.try_fuse(list(dict.fromkeys(members)), f"{prefix}.mla_query")


def _chain(edit: Edit, value: Value) -> list[Node]:
    """Row-wise ops and unmerged linears behind a value that nobody else reads."""
    producer = value.producer
    if producer is None or producer.parent is not None or len(value.uses) > 1:
        return []
    if producer.op == "linear":
        return [*_chain(edit, producer.operands[0]), producer]
    if producer.op in _ROW_OPS:
        return [*_chain(edit, producer.operands[0]), producer]
    return []


class FuseMlaValue(Pass):
    """Value expansion and output gate in one launch.

    Before:
        %o = mla_value(%ol, %uv)
        %y = sigmoid_mul(%o, %g)
    After:
        fused @layers.3.self_attn.mla_value { ...both... }

    Order: after absorb-mla. Without an output gate the expansion stays alone.
    """

    name: ClassVar[str] = "fuse-mla-value"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op != "mla_value":
                continue
            users = node.result.users()
            if len(users) == 1 and users[0].op == "sigmoid_mul":
                prefix = parent_name(node.result.name).removesuffix(".mla_attend")
                edit.try_fuse([node, users[0]], f"{prefix}.mla_value")
            else:
                edit.refuse(node, "no output gate follows", node.result)
