"""Remove what nobody reads."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import op_named
from k3fuse.passes.base import Edit, Pass


class Dce(Pass):
    """Drop nodes without effect whose results are not read, then weights and states not read.

    Before:
        weight %u: bf16[128]
        %d = rms_norm(%x, %u) {eps=1e-05}
        return %x
    After:
        return %x

    Order: after canonicalize, before anything that costs nodes. Step inputs stay: they are the
    signature of the graph.
    """

    name: ClassVar[str] = "dce"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        outputs = {id(v) for v in edit.graph.outputs}
        for node in reversed(list(edit.graph.leaves())):
            read = any(r.uses or id(r) in outputs for r in node.results)
            if not read and not op_named(node.op).effect:
                edit.drop(node, "nobody reads its results")
        for value in list(edit.graph.inputs):
            if value.kind in ("weight", "state") and not value.uses and id(value) not in outputs:
                edit.graph.inputs.remove(value)
                edit.changes += 1
