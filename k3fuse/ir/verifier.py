"""Invariants of the IR, checked after every pass: SSA, order, types, groups, state versions."""

from __future__ import annotations

from k3fuse.errors import VerifyError
from k3fuse.ir.graph import Graph, Node, Value
from k3fuse.ir.op import Context, TypeRuleError, op_named
from k3fuse.ir.printer import print_node
from k3fuse.ir.state import check_versions


def verify(graph: Graph) -> None:
    """Raise VerifyError, with the text of the bad node, unless the graph is well formed."""
    names: set[str] = set()
    groups: set[str] = set()
    defined: set[int] = set()

    def define(value: Value, at: str) -> None:
        if value.name in names:
            raise VerifyError(f"%{value.name} is defined twice\n{at}")
        names.add(value.name)
        defined.add(id(value))

    for value in graph.inputs:
        define(value, f"  {value.kind} {value}")
    for top in graph.nodes:
        if top.parent is not None or (top.is_fused and (top.operands or not top.body)):
            raise VerifyError(f"malformed top-level node\n{print_node(top)}")
        if top.is_fused:
            if top.name in groups:
                raise VerifyError(f"two launches are called @{top.name}\n{print_node(top)}")
            groups.add(top.name)
        for node in top.leaves:
            if node is not top and node.parent is not top:
                raise VerifyError(f"a node does not know its group\n{print_node(top)}")
            _check_node(graph, node, defined)
            for result in node.results:
                if result.producer is not node:
                    raise VerifyError(f"%{result.name} names another producer\n{print_node(node)}")
                define(result, print_node(node))
    nodes = {id(node) for node in graph.leaves()}
    for value in graph.values():
        if any(id(node) not in nodes or node.operands[i] is not value for node, i in value.uses):
            raise VerifyError(f"%{value.name} lists a use that is not in the graph")
    for value in graph.outputs:
        if id(value) not in defined:
            raise VerifyError(f"the graph returns %{value.name}, which nothing defines")
    check_versions(graph)


def _check_node(graph: Graph, node: Node, defined: set[int]) -> None:
    for index, value in enumerate(node.operands):
        if id(value) not in defined:
            raise VerifyError(f"%{value.name} is read before it is defined\n{print_node(node)}")
        if (node, index) not in value.uses:
            raise VerifyError(f"%{value.name} does not list a use\n{print_node(node)}")
    try:
        op = op_named(node.op)
        unknown = set(node.attrs) - op.attrs
        if unknown:
            raise TypeRuleError(f"{node.op} has no attribute {', '.join(sorted(unknown))}")
        types = op.infer([v.type for v in node.operands], node.attrs, Context(graph.tp))
    except KeyError as error:
        raise VerifyError(f"{node.op} needs attribute {error}\n{print_node(node)}") from None
    except (TypeRuleError, IndexError, ValueError) as error:
        raise VerifyError(f"{node.op}: {error}\n{print_node(node)}") from None
    stated = [r.type for r in node.results]
    if types != stated:
        inferred = ", ".join(map(str, types))
        raise VerifyError(f"stated types differ from inferred ({inferred})\n{print_node(node)}")
