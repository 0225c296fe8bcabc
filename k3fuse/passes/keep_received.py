"""A row that arrived in a mailbox and is needed for long moves out of it with its first reader."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node, Value
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.passes.base import Edit, Pass


class KeepReceived(Pass):
    """Let only one launch read a mailbox: it keeps what others need in an activation.

    Before:
        fused @a { %x = rms_norm(%row, %w) {eps=1e-05} }      // %row: a mailbox
        fused @b { %s = add(%row, %m) }
    After:
        fused @a { %row.kept = receive(%row)  %x = rms_norm(%row.kept, %w) {eps=1e-05} }
        fused @b { %s = add(%row.kept, %m) }

    The stages of a ring are used again a few exchanges later, and whoever reads a use empties a
    stage for it, so a second reader would find another row or none. Order: after fuse-prologue,
    when it is settled who reads what, before form-launches.
    """

    name: ClassVar[str] = "keep-received"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op in PUSHES and len({id(u.top) for u in node.result.users()}) > 1:
                _keep(edit, node, node.result)


def _keep(edit: Edit, push: Node, row: Value) -> None:
    readers = sorted(dict.fromkeys(user.top for user in row.users()), key=lambda n: n.position)
    # What runs beside the main stream may come too late for the readers on it.
    first = next((r for r in readers if r.leaves[0].op != "attn_res_blocks"), readers[0])
    kept = edit.make("receive", [row], name=f"{row.name}.kept", origins=push.origins, role="made")
    edit.insert_before(first.leaves[0], kept)
    if first.parent is None and not first.is_fused:
        edit.fuse([kept, first], first.results[0].name)
    edit.replace_uses(row, kept.result, keep=[kept])
