"""The weight recipe: the part of a graph that depends on weights only, as a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3fuse.errors import K3FuseError
from k3fuse.ir import Graph, Node, Value, print_node
from k3fuse.schedule.edges import launches_of


def weights_read(graph: Graph) -> list[Value]:
    """The static values that launches read, each once: weights first, then what is computed."""
    static = graph.static_values()
    read = {id(v) for launch in launches_of(graph) for v in launch.inputs() if id(v) in static}
    return [v for v in graph.values() if id(v) in read]


def weight_recipe(graph: Graph) -> Graph:
    """A graph from the weights to the static values that launches read, named as in `graph`.

    It holds only the weights and nodes that those values need; origins and placements are kept, so
    each rank computes its own part. `runtime.weights.evaluate_recipe` runs it.
    """
    outputs = weights_read(graph)
    needed = {id(v) for v in outputs}
    static = graph.static_values()
    nodes = [n for n in graph.nodes if not n.is_fused and all(id(r) in static for r in n.results)]
    chosen: list[Node] = []
    for node in reversed(nodes):
        if any(id(r) in needed for r in node.results):
            needed.update(id(v) for v in node.operands)
            chosen.append(node)
    recipe = Graph("recipe", {"tp": graph.tp})
    values: dict[str, Value] = {}
    for value in graph.inputs:
        if id(value) in needed:
            values[value.name] = Value(value.name, value.type, value.kind, value.binding)
            recipe.inputs.append(values[value.name])
    for node in reversed(chosen):
        _copy_node(node, values, recipe)
    recipe.outputs = [values[v.name] for v in outputs]
    return recipe


def merge_recipes(recipes: Sequence[Graph]) -> Graph:
    """One recipe for all buckets of a bundle: values of one name are the same value,
    made the same way from the same weights, whatever their origins.

    Raises K3FuseError when two buckets define a name differently, since they could not share the
    weights.
    """
    merged = Graph("recipe", dict(recipes[0].attrs))
    values: dict[str, Value] = {}
    lines: dict[str, str] = {}
    returned: dict[str, Value] = {}
    for recipe in recipes:
        for value in recipe.inputs:
            text = f"{value.binding}: {value.type}"
            if lines.setdefault(value.name, text) != text:
                raise _differs(value.name, lines[value.name], text)
            if value.name not in values:
                values[value.name] = Value(value.name, value.type, value.kind, value.binding)
                merged.inputs.append(values[value.name])
        for node in recipe.nodes:
            text = print_node(replace(node, origins=()))
            name = node.results[0].name
            if lines.setdefault(name, text) != text:
                raise _differs(name, lines[name], text)
            if name not in values:
                _copy_node(node, values, merged)
        for value in recipe.outputs:
            returned[value.name] = values[value.name]
    merged.outputs = list(returned.values())
    return merged


def _copy_node(node: Node, values: dict[str, Value], into: Graph) -> None:
    """Append a copy of a leaf to a graph whose values are given by name, and enter its results."""
    copy = Node(node.op, [values[v.name] for v in node.operands], dict(node.attrs), [])
    copy.origins = node.origins
    for index, operand in enumerate(copy.operands):
        operand.uses.append((copy, index))
    for result in node.results:
        values[result.name] = Value(result.name, result.type, producer=copy)
        copy.results.append(values[result.name])
    into.nodes.append(copy)


def _differs(name: str, first: str, second: str) -> K3FuseError:
    return K3FuseError(f"two buckets define weight %{name} differently:\n  {first}\n  {second}")
