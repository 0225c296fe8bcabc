"""Turn whole collectives into mailbox exchanges: who pushes what, and what the reader does."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.errors import InputError
from k3fuse.ir import Attr, Node
from k3fuse.passes.base import Edit, Pass


class LowerCollectives(Pass):
    """Choose a protocol for every collective and spell it out.

    Before:
        %y: bf16[M,7168] = all_reduce(%y.local) {out="bf16"}
    After, one-shot (every rank sends all it has to every rank):
        %y.slots: f32[16,M,7168] = push_partial(%y.local)
        %y: bf16[M,7168] = sum_slots(%y.slots) {out="bf16"}
    After, two-shot (owners of column blocks reduce, then broadcast):
        %y.slots: f32[16,M,7168]@S(2) = push_chunks(%y.local) {dim=1}
        %y.shard: bf16[M,7168]@S(1) = sum_slots(%y.slots) {out="bf16"}
        %y: bf16[M,7168] = push_gather(%y.shard) {dim=1}

    One-shot costs one hop and T messages a rank, two-shot two hops, a launch and two messages'
    worth of bytes; the cheaper one by the target's link figures is taken, or the one that the
    attribute `protocol` names. Sums run in rank order either way, so the choice changes no bit.
    Order: after the passes that split bytes over ranks; before fuse-comm.
    """

    name: ClassVar[str] = "lower-collectives"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op == "all_reduce":
                _all_reduce(edit, node)
            elif node.op == "reduce_scatter":
                dim = node.attrs["dim"]
                slots = _push(edit, node, "push_chunks", {"dim": dim})
                _rename(edit, node, _sum(edit, node, slots))
            elif node.op == "all_gather":
                _rename(edit, node, _push(edit, node, "push_gather", {"dim": node.attrs["dim"]}))


def one_shot_is_cheaper(edit: Edit, node: Node) -> bool:
    """Compare the two protocols for the bytes of one all-reduce, by the target's link figures."""
    target, tp = edit.target, edit.graph.tp
    size = node.operands[0].type.local_bytes(tp, edit.graph.dims)
    microseconds = 1e6 / target.link_bandwidth
    one = target.hop_us + (tp - 1) * size * microseconds
    launch = target.launch_edge_us + target.cold_start_us  # the owners' sum is one more
    shard = (size + node.result.type.local_bytes(tp, edit.graph.dims)) / tp
    two = 2 * target.hop_us + launch + (tp - 1) * shard * microseconds
    return one <= two


def _all_reduce(edit: Edit, node: Node) -> None:
    forced = edit.graph.attrs.get("protocol", "auto")
    if forced not in ("auto", "one_shot", "two_shot"):
        raise InputError(f"protocol '{forced}' is none of auto, one_shot, two_shot")
    width = node.operands[0].type.shape[-1]
    cuts = isinstance(width, int) and width % edit.graph.tp == 0
    one_shot = forced == "one_shot" or (forced == "auto" and one_shot_is_cheaper(edit, node))
    if not one_shot and not cuts:
        edit.refuse(node, f"two-shot needs {width} columns to divide by {edit.graph.tp} ranks")
        one_shot = True
    if one_shot:
        slots = _push(edit, node, "push_partial", {})
        _rename(edit, node, _sum(edit, node, slots))
        return
    slots = _push(edit, node, "push_chunks", {"dim": len(node.operands[0].type.shape) - 1})
    shard = _sum(edit, node, slots)
    gathered = edit.make(
        "push_gather",
        [shard.result],
        {"dim": len(node.operands[0].type.shape) - 1},
        name=f"{node.result.name}.whole",
        origins=node.origins,
    )
    edit.insert_before(node, gathered)
    _rename(edit, node, gathered)


def _push(edit: Edit, node: Node, op: str, attrs: dict[str, Attr]) -> Node:
    new = edit.make(
        op, node.operands, attrs, name=f"{node.result.name}.slots", origins=node.origins
    )
    edit.insert_before(node, new)
    return new


def _sum(edit: Edit, node: Node, slots: Node) -> Node:
    rounding = {"out": node.attrs["out"]} if "out" in node.attrs else {}
    name = f"{node.result.name}.sum"
    new = edit.make("sum_slots", [slots.result], rounding, name=name, origins=node.origins)
    edit.insert_before(node, new)
    return new


def _rename(edit: Edit, node: Node, new: Node) -> None:
    """`new` takes the place and the name of `node`'s result."""
    name = node.result.name
    edit.replace_uses(node.result, new.result)
    node.result.name = edit.unique(f"{name}.gone")
    edit.erase(node)
    new.result.name = name
