"""One launch for the recurrence: decay projection, convolution, delta rule, gated norm."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node
from k3fuse.passes.base import Edit, Pass, parent_name


class FuseKdaCore(Pass):
    """Fold what only the recurrence needs, and what only it feeds, into its launch.

    Before:
        %f = linear(%fa, %wfb)
        %o, %conv.1, %s.1 = kda_step(%q, %k, %v, %f, %b, ...)
        %y = gated_rms_norm(%o, %g, %w) {eps=1e-05}
    After:
        fused @layers.0.self_attn.kda_core { ...the three... }

    All parts are per head, so a CTA needs nothing from another. The second half of a low-rank
    output gate joins as the decay projection does. Order: after merge-projections, which leaves
    both alone (their inputs have no other reader).
    """

    name: ClassVar[str] = "fuse-kda-core"

    def rewrite(self, edit: Edit) -> None:
        for node in list(edit.graph.leaves()):
            if node.op in ("kda_step", "kda_verify"):
                members = [*_decay(edit, node), node, *_gated_norm(edit, node)]
                edit.try_fuse(members, f"{parent_name(node.results[0].name)}.kda_core")


def _decay(edit: Edit, node: Node) -> list[Node]:
    f = node.operands[3]
    producer = f.producer
    if producer is None or producer.op != "linear":
        edit.refuse(node, "the decay logits come from no linear", f)
    elif len(f.uses) > 1:
        edit.refuse(node, "the decay logits are also read elsewhere", f)
    elif producer.parent is not None:
        edit.refuse(node, "the decay projection already belongs to another launch", f)
    else:
        return [producer]
    return []


def _gated_norm(edit: Edit, node: Node) -> list[Node]:
    o = node.results[0]
    users = o.users()
    if len(users) != 1 or o in edit.graph.outputs:
        edit.refuse(node, "the recurrence's output has other readers than a gated norm", o)
    elif users[0].op != "gated_rms_norm":
        edit.refuse(node, f"a {users[0].op} follows, not a gated norm", o)
    else:
        return [*_gate_projection(users[0]), *users]
    return []


def _gate_projection(norm: Node) -> list[Node]:
    """A second-level gate projection (low-rank output gate) that only the norm reads."""
    gate = norm.operands[1]
    producer = gate.producer
    free = producer is not None and producer.op == "linear" and producer.parent is None
    return [producer] if producer is not None and free and len(gate.uses) == 1 else []
