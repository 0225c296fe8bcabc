"""Graph -> text. Total and deterministic; `ir.parser` reads it back to the same graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from k3fuse.ir.graph import Attr, Graph, Node, Origin, Value


def print_graph(graph: Graph) -> str:
    """The whole graph as text, one node a line."""
    lines = [f"graph {graph.name}{_attrs(graph.attrs)} {{"]
    for value in graph.inputs:
        binding = f" = {json.dumps(value.binding)}" if value.binding else ""
        lines.append(f"  {value.kind} %{value.name}: {value.type}{binding}")
    for site, reason in graph.dropped.items():
        lines.append(f"  dropped {json.dumps(site)}: {json.dumps(reason)}")
    for node in graph.nodes:
        lines.extend(_indent(print_node(node, graph)))
    lines.append(f"  return {_names(graph.outputs)}".rstrip())
    lines.append("}")
    return "\n".join(lines) + "\n"


def print_node(node: Node, graph: Graph | None = None) -> str:
    """One node (a group with its body) as text."""
    if not node.is_fused:
        return _leaf(node)
    head = f"fused @{node.name}{_attrs(node.attrs)} {{"
    if graph is not None:
        results = _names(node.outputs(graph))
        head += f"  // ({_names(node.inputs())}) -> ({results})"
    return "\n".join([head, *(f"  {_leaf(leaf)}" for leaf in node.body), "}"])


def _leaf(node: Node) -> str:
    results = ", ".join(f"%{r.name}: {r.type}" for r in node.results)
    call = f"{node.op}({_names(node.operands)}){_attrs(node.attrs)}"
    origins = " + ".join(_origin(o) for o in node.origins)
    text = f"{results} = {call}" if results else call
    return f"{text} from {origins}" if origins else text


def _origin(origin: Origin) -> str:
    role = "" if origin.role == "op" else f"[{origin.role}]"
    passes = f" ({', '.join(origin.passes)})" if origin.passes else ""
    return f"{origin.site}{role}{passes}"


def _names(values: Sequence[Value]) -> str:
    return ", ".join(f"%{v.name}" for v in values)


def _attrs(attrs: Mapping[str, Attr]) -> str:
    if not attrs:
        return ""
    return " {" + ", ".join(f"{k}={json.dumps(attrs[k])}" for k in sorted(attrs)) + "}"


def _indent(text: str) -> list[str]:
    return ["  " + line for line in text.split("\n")]
