"""Edges between launches: who must have finished before whom, and by which mechanism."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.errors import ParseError
from k3fuse.ir import Graph, Node, op_named

KINDS = ("pdl", "full", "event")


@dataclass(frozen=True)
class Edge:
    """An ordering before a launch. `kind`: pdl (programmatic, the launch waits inside), full
    (ordinary stream order), event (recorded on another stream)."""

    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.source}"


def parse_edge(text: str) -> Edge:
    """Read what `str(Edge)` writes."""
    kind, colon, source = text.partition(":")
    if not colon or kind not in KINDS or not source:
        raise ParseError(f"not an edge: '{text}' (expected pdl:NAME, full:NAME or event:NAME)")
    return Edge(kind, source)


def launches_of(graph: Graph) -> list[Node]:
    """The launches of a graph after form-launches, in order."""
    return [node for node in graph.nodes if node.is_fused]


def stream_of(launch: Node) -> str:
    """The stream of a launch: main, aux or prefetch."""
    return str(launch.attrs.get("stream", "main"))


def direct_sources(graph: Graph) -> dict[str, list[Node]]:
    """launch name -> launches whose results or state versions it needs, or whose reads it ends."""
    static = graph.static_values()
    sources: dict[str, list[Node]] = {}
    for launch in launches_of(graph):
        found: dict[int, Node] = {}
        for leaf in launch.body:
            for value in leaf.operands:
                if value.producer is not None and id(value) not in static:
                    found[id(value.producer.top)] = value.producer.top
            for operand in op_named(leaf.op).updates:  # write after read of the old version
                for reader in leaf.operands[operand].users():
                    found[id(reader.top)] = reader.top
        found.pop(id(launch), None)
        sources[launch.name] = list(found.values())
    return sources


def launch_dependencies(graph: Graph, *, same_stream: str) -> dict[str, list[Edge]]:
    """The edges that every launch needs, without those that others already imply.

    A launch follows its predecessor on its stream. A source on another stream needs an event,
    unless an earlier launch of the same stream already waited for it or for a later one there.
    A launch that prefetches for a window follows the launch before it in the list. The last main
    launch joins every other stream.
    """
    sources = direct_sources(graph)
    order = {launch.name: i for i, launch in enumerate(launches_of(graph))}
    seen: dict[tuple[str, str], int] = {}  # (stream, other stream) -> latest position waited for
    last: dict[str, Node] = {}
    edges: dict[str, list[Edge]] = {}
    previous: Node | None = None
    for launch in launches_of(graph):
        stream = stream_of(launch)
        needed = (
            [Edge(same_stream if stream == "main" else "full", last[stream].name)]
            if stream in last
            else []
        )
        others = [s for s in sources[launch.name] if stream_of(s) != stream]
        if stream == "prefetch" and previous is not None:
            others.append(previous)
        needed += _events(launch, others, order, seen)
        edges[launch.name] = needed
        last[stream] = launch
        if stream == "main":
            previous = launch
    if "main" in last:
        final = last["main"]
        ends = [node for stream, node in last.items() if stream != "main"]
        edges[final.name] += _events(final, ends, {**order}, seen)
    return edges


def _events(
    launch: Node,
    sources: list[Node],
    order: dict[str, int],
    seen: dict[tuple[str, str], int],
) -> list[Edge]:
    """One event a stream, for the latest source there, if nothing earlier has waited for it."""
    latest: dict[str, Node] = {}
    for source in sources:
        stream = stream_of(source)
        if stream not in latest or order[source.name] > order[latest[stream].name]:
            latest[stream] = source
    found: list[Edge] = []
    for stream, source in latest.items():
        key = (stream_of(launch), stream)
        if order[source.name] > seen.get(key, -1):
            seen[key] = order[source.name]
            found.append(Edge("event", source.name))
    return found
