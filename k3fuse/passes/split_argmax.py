"""Choose the token from the ranks' best candidates instead of gathering all logits."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node, Value
from k3fuse.passes.base import Edit, Pass


class SplitArgmax(Pass):
    """Let each rank find the best logit of its vocabulary shard, and exchange only those.

    Before:
        %l = all_gather(%l.local) {dim=1}
        %t = argmax(%l)
        return %l, %t
    After:
        %v, %i = argmax_local(%l.local)
        %vs = all_gather(%v) {dim=1}
        %is = all_gather(%i) {dim=1}
        %t = argmax_pick(%vs, %is)
        return %l.local, %t

    M * T pairs travel instead of M * V logits; logits that the graph returns stay sharded, and the
    runtime assembles them when somebody asks. Order: after shard-stock.
    """

    name: ClassVar[str] = "split-argmax"
    required: ClassVar[bool] = True  # gathered logits would be returned from a mailbox

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op != "argmax":
                continue
            gather = node.operands[0].producer
            if gather is None or gather.op != "all_gather":
                edit.refuse(node, "the logits are not gathered from shards", node.operands[0])
            elif len(gather.result.uses) > 1:
                edit.refuse(node, "the gathered logits are read elsewhere", gather.result)
            else:
                _split(edit, node, gather)


def _split(edit: Edit, node: Node, gather: Node) -> None:
    shards, name = gather.operands[0], node.result.name
    local = edit.make(
        "argmax_local", [shards], name=f"{name}.local", origins=node.origins, role="1/2"
    )
    edit.insert_before(node, local)
    gathered: list[Value] = []
    for value in local.results:
        new = edit.make(
            "all_gather",
            [value],
            {"dim": 1},
            name=f"{value.name}.all",
            origins=node.origins,
            role="made",
        )
        edit.insert_before(node, new)
        gathered.append(new.result)
    pick = edit.make("argmax_pick", gathered, name=f"{name}.pick", origins=node.origins, role="2/2")
    edit.insert_before(node, pick)
    edit.replace_uses(node.result, pick.result)
    edit.erase(node)
    edit.replace_uses(gather.result, shards)
    edit.erase(gather)
