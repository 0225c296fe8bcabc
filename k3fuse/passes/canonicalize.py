"""Bring what different sources write in different ways into one form."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Node, Value, op_named
from k3fuse.passes.base import Edit, Pass
from k3fuse.tensor_type import DType

_GATED = {"silu": "silu_mul", "sigmoid": "sigmoid_mul"}


class Canonicalize(Pass):
    """Remove views, casts and slices that say nothing, order operands, recognise gated products.

    Before:
        %v = view(%x) {shape=["M",7168]}
        %s = sigmoid(%g)
        %y = mul(%s, %v)
    After:
        %y = sigmoid_mul(%x, %g)

    Order: first, so that no later pattern has to know these variants.
    """

    name: ClassVar[str] = "canonicalize"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        before = -1
        while before != edit.changes:  # one rewrite can uncover another
            before = edit.changes
            position = {id(v): i for i, v in enumerate(edit.graph.values())}
            for node in list(edit.graph.leaves()):
                _drop_noop(edit, node)
            for node in list(edit.graph.leaves()):
                _order_operands(edit, node, position)
                _gated_product(edit, node)
                _widened_linear(edit, node)


def _drop_noop(edit: Edit, node: Node) -> None:
    if node.op in ("view", "cast", "slice") and node.operands[0].type == node.result.type:
        edit.replace_uses(node.result, node.operands[0])
        edit.drop(node, f"{node.op} to the same type")
    elif node.op == "view" and (inner := node.operands[0].producer) and inner.op == "view":
        source = inner.operands[0]
        edit.set_operand(node, 0, source)
        if not inner.result.uses and inner.result not in edit.graph.outputs:
            edit.drop(inner, "view of a view")
    elif node.op == "attn_res_mix" and len(node.operands) == 3:
        edit.replace_uses(node.result, node.operands[2])
        edit.drop(node, "a mix of one source is that source")


def _order_operands(edit: Edit, node: Node, position: dict[int, int]) -> None:
    if not op_named(node.op).commutative:
        return
    a, b = node.operands
    if position.get(id(a), 0) > position.get(id(b), 0):
        edit.set_operand(node, 0, b)
        edit.set_operand(node, 1, a)


def _gated_product(edit: Edit, node: Node) -> None:
    if node.op != "mul":
        return
    for gate, other in (node.operands, node.operands[::-1]):
        inner = gate.producer
        if inner is None or inner.op not in _GATED:
            continue
        if len(gate.uses) > 1 or gate in edit.graph.outputs:
            edit.refuse(node, f"{inner.op} of the gate is also read elsewhere", gate)
            continue
        source = inner.operands[0]
        operands = [source, other] if inner.op == "silu" else [other, source]
        _replace(edit, node, [inner], _GATED[inner.op], operands)
        return


def _widened_linear(edit: Edit, node: Node) -> None:
    """linear(cast(x), cast(w)) to f32 is a linear with an f32 result: sums are f32 anyway."""
    if node.op != "linear" or "out" in node.attrs:
        return
    casts = [v.producer for v in node.operands]
    x, w = casts
    if x is None or w is None or x.op != "cast" or w.op != "cast":
        return
    narrow = [c.operands[0] for c in (x, w)]
    if node.result.type.dtype == DType.F32 and all(v.type.dtype == DType.BF16 for v in narrow):
        spent = [c for c in (x, w) if len(c.result.uses) == 1]
        _replace(edit, node, spent, "linear", narrow, {"out": "f32"})


def _replace(
    edit: Edit,
    node: Node,
    spent: list[Node],
    op: str,
    operands: list[Value],
    attrs: dict[str, str] | None = None,
) -> None:
    """One op instead of `node` and the nodes in `spent` that only it read."""
    origins = (*(o for n in spent for o in n.origins), *node.origins)
    new = edit.make(op, operands, dict(attrs or {}), name=node.result.name, origins=origins)
    edit.insert_before(node, new)
    edit.replace_uses(node.result, new.result)
    edit.erase(node)
    new.result.name = node.result.name
    for inner in spent:
        edit.erase(inner)
