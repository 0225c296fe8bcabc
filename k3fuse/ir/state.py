"""Versions of states: which storage each version lives in, and that none is read when dead."""

from __future__ import annotations

from k3fuse.errors import VerifyError
from k3fuse.ir.graph import Graph, Node, Value
from k3fuse.ir.op import op_named


def state_roots(graph: Graph) -> dict[int, Value]:
    """id of each version of a state -> the graph input whose storage all its versions share."""
    roots = {id(v): v for v in graph.inputs if v.kind == "state"}
    for node in graph.leaves():
        for operand, result in op_named(node.op).updates.items():
            root = roots.get(id(node.operands[operand]))
            if root is not None:
                roots[id(node.results[result])] = root
    return roots


def check_versions(graph: Graph) -> None:
    """Raise VerifyError when a node reads a version that an earlier node has already replaced."""
    replaced: dict[int, Node] = {}
    for node in graph.leaves():
        for value in node.operands:
            if (writer := replaced.get(id(value))) is not None:
                raise VerifyError(
                    f"{node} reads version %{value.name} of a state, but {writer} has replaced it"
                )
        for operand in op_named(node.op).updates:
            replaced[id(node.operands[operand])] = node
    for value in graph.outputs:
        if (writer := replaced.get(id(value))) is not None:
            raise VerifyError(
                f"the graph returns dead version %{value.name} ({writer} replaced it)"
            )
