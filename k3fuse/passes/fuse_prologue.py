"""Row-wise work between launches: one launch of its own, or the way into the next projection."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node
from k3fuse.passes.base import Edit, Pass
from k3fuse.passes.fuse_comm import launch_name
from k3fuse.schedule.roles import has_bulk, is_rows_only, static_leaf, weight_bytes

MAX_ROWS = 2
"""Rows (times mailbox slots) that every CTA of a large projection may prepare for itself. All 132
CTAs of an H200 repeat a prologue: 57 KB a row at hidden 7168, 7.5 MB or 1 us of L2 traffic at one
row, where a launch of its own costs an edge of 0.7 us and the trip through memory."""

SMALL_PROJECTION = 8 << 20
"""Weight bytes up to which a projection runs on so few CTAs, split along K over a cluster, that
they share one prologue, and it is fused at any M."""


class FusePrologue(Pass):
    """Chain sums, residual adds, AttnRes merges and norms, and put the chain before its reader.

    Before:
        %m = sum_slots(%m.slots)
        %p = add(%prefix, %m)
        %x = rms_norm(%p, %w) {eps=1e-05}
        fused @projections { %q = linear(%x, %wq) ... }
    After, few rows:
        fused @projections { %m = ...  %p = ...  %x = ...  %q = linear(%x, %wq) ... }
    After, many rows:
        fused @x { %m = ...  %p = ...  %x = ... }
        fused @projections { %q = linear(%x, %wq) ... }

    Order: after fuse-comm, so that every bulk launch already has its epilogue.
    """

    name: ClassVar[str] = "fuse-prologue"

    def rewrite(self, edit: Edit) -> None:
        static = edit.graph.static_values()
        for node in list(edit.graph.nodes):
            if not node.is_fused and is_rows_only(node) and not static_leaf(node, static):
                _chain(edit, node, static)
        for node in list(edit.graph.nodes):
            if is_rows_only(node) and not (not node.is_fused and static_leaf(node, static)):
                _into_reader(edit, node, static)


def _chain(edit: Edit, node: Node, static: set[int]) -> None:
    """Join a row-wise node to the row-wise launches that it reads, where no bulk lies between."""
    for value in node.operands:
        producer = value.producer
        if producer is None or id(value) in static:
            continue
        source, own = producer.top, node.top
        if source is own or not is_rows_only(source):
            continue
        if edit.closes_cycle([source, own]) is None:
            edit.try_fuse([source, own], launch_name(own))


def _into_reader(edit: Edit, node: Node, static: set[int]) -> None:
    outputs = node.outputs(edit.graph)
    readers = list(
        dict.fromkeys(user.top for value in outputs for user in value.users() if _is_next(user))
    )
    candidates = [r for r in readers if edit.closes_cycle([node, r]) is None]
    if not candidates:
        return
    if len(candidates) > 1:
        edit.refuse(node, f"{len(candidates)} launches read it", outputs[0])
        return
    (reader,) = candidates
    slots = edit.graph.tp if any(leaf.op == "sum_slots" for leaf in node.leaves) else 1
    small = weight_bytes(reader, edit.graph, static) <= SMALL_PROJECTION
    if not small and edit.rows * slots > MAX_ROWS:
        edit.refuse(
            node,
            f"{edit.rows} rows of {slots} slots would be prepared by every CTA of a large "
            f"projection (at most {MAX_ROWS})",
            outputs[0],
        )
        return
    edit.try_fuse([node, reader], launch_name(reader))


def _is_next(user: Node) -> bool:
    """Whether a reader is the launch a prologue is made for: not a later residual add, and not the
    block part of AttnRes, which runs beside the critical path."""
    residual = user.op == "add" and user.parent is not None and has_bulk(user.parent)
    return has_bulk(user.top) and not residual and user.op != "attn_res_blocks"
