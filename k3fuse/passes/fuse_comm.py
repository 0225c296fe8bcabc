"""Communication joins computation: producers push their results, tails reduce and publish."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.passes.base import Edit, Pass
from k3fuse.schedule.roles import has_bulk, waits_on_peers

EPILOGUE_OPS = (*PUSHES, "add", "cast", "argmax_local", "silu_mul", "situ_mul", "sigmoid_mul")
"""Elementwise or per-tile ops that a producer can apply to what it has just computed."""

_FROM_PEERS = ("sum_slots", *PUSHES)


class FuseComm(Pass):
    """Fuse pushes and elementwise epilogues into the launch that makes their data.

    Before:
        %y.local: bf16[M,7168]@P = linear(%o, %wo)
        %y.slots: bf16[16,M,7168] = push_partial(%y.local)
        %y = sum_slots(%y.slots)
    After:
        fused @layers.0.self_attn.o_proj {
          %y.local: bf16[M,7168]@P = linear(%o, %wo)
          %y.slots: bf16[16,M,7168] = push_partial(%y.local)
        }
        %y = sum_slots(%y.slots)

    An epilogue's other operands must be known before the launch (a residual), or come from peers to
    a launch that itself waits on peers (the MoE tail: latent sum in, shared sum added, row out);
    sums over slots otherwise stay with their reader. Order: after lower-collectives;
    fuse-prologue then gives the sums to their readers.
    """

    name: ClassVar[str] = "fuse-comm"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.parent is not None or node.op not in EPILOGUE_OPS:
                continue
            late = [v for v in node.operands if v.producer and v.producer.op in _FROM_PEERS]
            early = (v.producer.top for v in node.operands if v.producer and v not in late)
            producers = [top for top in dict.fromkeys(early) if has_bulk(top)]
            if not producers:
                continue
            home = max(producers, key=lambda n: n.position)
            if late and not any(waits_on_peers(v) for v in home.inputs()):
                edit.refuse(
                    node, "its other operand waits on peers, its producer does not", late[0]
                )
                continue
            sums = [v.producer for v in late if v.producer and v.producer.op == "sum_slots"]
            edit.try_fuse([home, *sums, node], launch_name(home))


def launch_name(node: Node) -> str:
    """A name for the launch around a node: the group's own, or that of its first result."""
    if node.is_fused:
        return node.name
    name = node.results[0].name
    for suffix in (".local", ".shard"):
        name = name.removesuffix(suffix)
    return name
