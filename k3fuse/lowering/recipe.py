"""The weight recipe: the part of a graph that depends on weights only, as a graph of its own."""

from __future__ import annotations

from k3fuse.ir import Graph, Node, Value
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
    copies: dict[int, Value] = {}
    for value in graph.inputs:
        if id(value) in needed:
            copies[id(value)] = Value(value.name, value.type, value.kind, value.binding)
            recipe.inputs.append(copies[id(value)])
    for node in reversed(chosen):
        copy = Node(node.op, [copies[id(v)] for v in node.operands], dict(node.attrs), [])
        copy.origins = node.origins
        for index, operand in enumerate(copy.operands):
            operand.uses.append((copy, index))
        for result in node.results:
            copies[id(result)] = Value(result.name, result.type, producer=copy)
            copy.results.append(copies[id(result)])
        recipe.nodes.append(copy)
    recipe.outputs = [copies[id(v)] for v in outputs]
    return recipe
