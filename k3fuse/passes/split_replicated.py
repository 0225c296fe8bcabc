"""Stop every rank from reading the same projection: split it by rows and gather the result."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Attr, Context, Node, Value, op_named
from k3fuse.passes.base import Edit, Pass
from k3fuse.tensor_type import shard

MIN_SAVED_SHARE = 0.25
"""Least share of a launch's bytes that must go. An exchange costs a hop of about 2 us where the
in-projection of a TP16 rank takes 10.7 us on an H200 (94 % of its read bandwidth): a fifth."""


class SplitReplicated(Pass):
    """Split replicated linears over the ranks where an exchange costs less than the bytes.

    Before:
        %lg: f32[M,896] = linear(%x, %wr) {out="f32"}
    After (wr cut by rows):
        %lg.shard: f32[M,896]@S(1) = linear(%x, %wr) {out="f32"}
        %lg: f32[M,896] = all_gather(%lg.shard) {dim=1}

    All linears on one input are judged together: they become one launch and one exchange. The
    share is that of their merged launch, so it does not depend on the size of the model. Order:
    after shard-stock; before merge-projections, which sees the shards. (K3 spec 3.2: replication
    costs 25 % of the bytes at TP8, 44 % at TP16.)
    """

    name: ClassVar[str] = "split-replicated"

    def rewrite(self, edit: Edit) -> None:
        if edit.graph.tp == 1:
            return
        static = edit.graph.static_values()
        groups: dict[int, list[Node]] = {}
        for node in edit.graph.leaves():
            if node.op == "linear" and id(node.operands[1]) in static:
                groups.setdefault(id(node.operands[0]), []).append(node)
        for siblings in groups.values():
            _split_siblings(edit, siblings)


def _split_siblings(edit: Edit, siblings: list[Node]) -> None:
    tp = edit.graph.tp
    whole = [
        n
        for n in siblings
        if n.operands[0].type.placement.is_replicate and n.operands[1].type.placement.is_replicate
    ]
    candidates: list[Node] = []
    for node in whole:
        weight = node.operands[1]
        rows = weight.type.shape[0]
        if weight.kind != "weight" or len(weight.uses) > 1:
            edit.refuse(node, "the weight is shared or derived", weight)
        elif not isinstance(rows, int) or rows % tp:
            edit.refuse(node, f"its {rows} rows do not divide by {tp} ranks", weight)
        else:
            candidates.append(node)
    total = sum(n.operands[1].type.local_bytes(tp, {}) for n in siblings)
    saved = sum(n.operands[1].type.local_bytes(tp, {}) for n in candidates) * (tp - 1) / tp
    if candidates and saved < MIN_SAVED_SHARE * total:
        for node in candidates:
            edit.refuse(
                node,
                f"saves {saved / total:.0%} of the bytes of its launch, an exchange needs "
                f"{MIN_SAVED_SHARE:.0%}",
                node.operands[1],
            )
        return
    for node in candidates:
        edit.retype(node.operands[1], node.operands[1].type.at(shard(0)))
        gather_result(edit, node)


def gather_result(edit: Edit, node: Node) -> Value:
    """Re-infer a column-cut node and gather its result, which keeps its name."""
    types = op_named(node.op).infer(
        [v.type for v in node.operands], node.attrs, Context(edit.graph.tp)
    )
    result = node.result
    edit.retype(result, types[0])
    name, attrs = result.name, dict[str, Attr](dim=1)
    result.name = edit.unique(f"{name}.shard")
    new = edit.make(
        "all_gather", [result], attrs, name=f"{name}.whole", origins=node.origins, role="made"
    )
    edit.insert_after(node, new)
    edit.replace_uses(result, new.result, keep=[new])
    new.result.name = name
    edit.touch(node)
    return new.result
