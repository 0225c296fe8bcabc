"""The expert launch: routing, routed experts, and the down-projection of the shared expert."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node
from k3fuse.passes.base import Edit, Pass, parent_name


class FuseExperts(Pass):
    """Let the expert launch choose its experts itself.

    Before:
        %ids, %p = route_topk(%lg, %bias) {top_k=16, ...}
        %u = moe_experts(%z, %ids, %p, %w1, %w3, %w2, ...)
    After:
        fused @layers.1.block_sparse_moe.experts { ...both... }

    Each CTA repeats the choice (1.5 us on an H200), which saves a launch and its edge. Order:
    after merge-projections.
    """

    name: ClassVar[str] = "fuse-experts"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op != "moe_experts":
                continue
            route = node.operands[1].producer
            if (
                route is None
                or route.op != "route_topk"
                or route.results[0] is not node.operands[1]
            ):
                edit.refuse(node, "its ids come from no route_topk", node.operands[1])
            elif route.results[1] is not node.operands[2]:
                edit.refuse(node, "ids and weights come from different routes", node.operands[2])
            elif len(route.results[0].uses) + len(route.results[1].uses) > 2:
                edit.refuse(node, "the route is also read elsewhere", node.operands[1])
            else:
                prefix = parent_name(node.result.name)
                edit.try_fuse([route, node], f"{prefix}.routed_experts")


class FuseSharedExpert(Pass):
    """Run the shared expert's gate/up beside the router, its down-projection beside the experts.

    Before:
        fused @front { %lg, %z, %sg, %su = four linears of %x }
        %s = situ_mul(%sg, %su) {beta=4.0, linear_beta=25.0}
        fused @routed_experts { ... }
        %sd = linear(%s, %wd)
    After:
        fused @front { ... %s = situ_mul(%sg, %su) ... }
        fused @routed_experts { ... %sd = linear(%s, %wd) }

    A gated activation of two results of one launch joins that launch as an epilogue (a dense MLP's
    too). Its down-projection joins the expert launch that reads the same launch, so that its bytes
    stream while the route is being decided. Order: after fuse-experts.
    """

    name: ClassVar[str] = "fuse-shared-expert"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op in ("situ_mul", "silu_mul"):
                front = _join_producer(edit, node)
                if front is not None and len(node.result.users()) == 1:
                    _join_experts(edit, node, front)


def _join_producer(edit: Edit, node: Node) -> Node | None:
    sources = [v.producer.top if v.producer is not None else None for v in node.operands]
    if sources[0] is None or any(s is not sources[0] for s in sources):
        edit.refuse(node, "gate and up come from different launches", node.operands[1])
        return None
    return edit.try_fuse([sources[0], node])


def _join_experts(edit: Edit, node: Node, front: Node) -> None:
    (down,) = node.result.users()
    if down.op != "linear" or down.parent is not None:
        edit.refuse(node, "its reader is no free linear", node.result)
        return
    beside = [
        user.top
        for value in front.outputs(edit.graph)
        for user in _readers(value.users())
        if any(leaf.op == "moe_experts" for leaf in user.top.leaves)
    ]
    if not beside:
        edit.refuse(down, "no routed experts read the same launch (a dense MLP)", node.result)
        return
    edit.try_fuse([beside[0], down])


def _readers(users: list[Node]) -> list[Node]:
    """Users, looking through gathers."""
    found: list[Node] = []
    for user in users:
        if user.op in ("all_gather", "push_gather"):
            found.extend(user.result.users())
        else:
            found.append(user)
    return found
