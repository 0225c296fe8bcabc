"""What ops are to a launch: the bulk work it is built around, or row-wise work beside it."""

from __future__ import annotations

from k3fuse.ir import Graph, Node, Value
from k3fuse.ir.ops.collective import PUSHES

BULK_OPS = frozenset(
    {
        "linear",
        "moe_experts",
        "embedding",
        "kda_step",
        "kda_verify",
        "kda_commit",
        "mla_absorb_query",
        "mla_attend_latent",
        "mla_attend",
        "mla_value",
        "attn_res_blocks",
    }
)
"""Ops that read weights or states in bulk, or that must run apart: each makes a launch."""

ROW_OPS = frozenset(
    {
        "add",
        "mul",
        "sigmoid",
        "silu",
        "situ_mul",
        "silu_mul",
        "sigmoid_mul",
        "cast",
        "rms_norm",
        "gated_rms_norm",
        "attn_res_merge",
        "attn_res_mix",
        "sum_slots",
        "receive",
        "slice",
        "view",
        "argmax_pick",
        "argmax_local",
        "route_topk",
    }
)
"""Cheap work on whole rows: a launch can do it on the way in."""

VIEW_OPS = frozenset({"view", "slice", "take_shard"})
"""Ops that move no data by themselves."""


def has_bulk(node: Node) -> bool:
    """Whether a launch has bulk work."""
    return any(leaf.op in BULK_OPS for leaf in node.leaves)


def is_rows_only(node: Node) -> bool:
    """Whether a node or group is row-wise work and nothing else."""
    return all(leaf.op in ROW_OPS for leaf in node.leaves)


def waits_on_peers(value: Value) -> bool:
    """Whether a value comes out of a mailbox, directly or through row-wise ops of one launch."""
    node = value.producer
    if node is None:
        return False
    if node.op in PUSHES:
        return True
    return node.op in ROW_OPS and any(waits_on_peers(v) for v in node.operands if v.producer)


def static_leaf(node: Node, static: set[int]) -> bool:
    """Whether a plain node belongs to the weight recipe and not to a launch."""
    return bool(node.results) and all(id(r) in static for r in node.results)


def weight_bytes(node: Node, graph: Graph, static: set[int]) -> int:
    """Bytes of static operands that one rank holds for a launch (experts counted whole)."""
    return sum(
        v.type.local_bytes(graph.tp, graph.dims)
        for v in node.inputs()
        if id(v) in static and not any(u.op == "moe_experts" for u in v.users())
    )
