"""Where activations live: offsets in one arena, reused by what is never alive at the same time.

Only values that cross launches have a buffer. A buffer is alive over positions in the launch
list, both ends included. A launch of the main stream runs at its own position. A launch of a side
stream runs beside the main stream at any position from the one behind its event sources to the
main launch that joins it, so what it reads stays alive, and what it writes is reserved, for that
whole window. What the graph returns stays alive to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from k3fuse.errors import RefusedError
from k3fuse.ir import Graph, Node, Value, state_roots
from k3fuse.lowering.mailboxes import is_pushed
from k3fuse.runtime.plan import Buffer
from k3fuse.schedule.edges import launches_of, parse_edge, stream_of

ALIGNMENT = 256
"""Bytes; offsets are multiples, so that every row of a value can be loaded by 16-byte words."""


@dataclass(frozen=True)
class Window:
    """Positions between which a launch may run."""

    first: int
    last: int


def assign_buffers(graph: Graph) -> tuple[Buffer, ...]:
    """Buffers of the activations that cross launches of a graph after insert-pdl, by value order.

    Bytes are those of one rank, with the graph's dims bound. Deterministic.
    """
    return place_buffers(live_buffers(graph))


def launch_windows(graph: Graph) -> list[Window]:
    """When each launch may run, in list order, by its stream and its event edges."""
    launches = launches_of(graph)
    position = {launch.name: i for i, launch in enumerate(launches)}
    edges = [[parse_edge(text) for text in _after(launch)] for launch in launches]
    first: list[int] = []
    stream_first: dict[str, int] = {}  # earliest start of the latest launch of a side stream
    for index, launch in enumerate(launches):
        stream = stream_of(launch)
        if stream == "main":
            first.append(index)
            continue
        start = stream_first.get(stream, 0)
        for edge in edges[index]:
            if edge.kind == "event":
                source = position[edge.source]
                on_main = stream_of(launches[source]) == "main"
                start = max(start, source + 1 if on_main else first[source])
        stream_first[stream] = start
        first.append(start)
    last = [len(launches) - 1] * len(launches)
    joined: dict[str, int] = {}  # earliest main launch that waits for this launch or a later one
    waits: dict[str, list[int]] = {}
    for index, launch in enumerate(launches):
        if stream_of(launch) == "main":
            last[index] = index
            for edge in edges[index]:
                if edge.kind == "event":
                    waits.setdefault(edge.source, []).append(index)
    for index in reversed(range(len(launches))):
        stream = stream_of(launches[index])
        if stream != "main":
            here = waits.get(launches[index].name, [])
            joined[stream] = min([joined.get(stream, len(launches) - 1), *here])
            last[index] = joined[stream]
    return [Window(a, b) for a, b in zip(first, last, strict=True)]


def live_buffers(graph: Graph) -> list[Buffer]:
    """The activations that cross launches, all at offset 0, with the positions they live over."""
    launches = launches_of(graph)
    windows = {id(n): w for n, w in zip(launches, launch_windows(graph), strict=True)}
    returned = {id(v) for v in graph.outputs}
    elsewhere = state_roots(graph)
    found: list[Buffer] = []
    for launch in launches:
        for value in launch.outputs(graph):
            if id(value) in elsewhere or is_pushed(value):
                continue
            readers = [windows[id(top)].last for top in _tops(value)]
            last = len(launches) - 1 if id(value) in returned else max(readers)
            size = value.type.local_bytes(graph.tp, graph.dims)
            window = windows[id(launch)]
            last = max(last, window.last)
            found.append(Buffer(value.name, 0, size, window.first, last))
    return found


def place_buffers(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """Give offsets: largest first, each into the lowest gap among those alive with it."""
    order = list(buffers)
    placed: list[Buffer] = []
    offsets: dict[str, int] = {}
    for buffer in sorted(order, key=lambda b: (-b.bytes, b.first, b.value)):
        offset = 0
        for other in sorted(_alive_with(buffer, placed), key=lambda b: b.offset):
            if offset + buffer.bytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.bytes))
        offsets[buffer.value] = offset
        placed.append(replace(buffer, offset=offset))
    return tuple(replace(b, offset=offsets[b.value]) for b in order)


def arena_bytes(buffers: Iterable[Buffer]) -> int:
    """Size of the arena that holds the buffers."""
    return _aligned(max((b.offset + b.bytes for b in buffers), default=0))


def check_buffers(buffers: Sequence[Buffer]) -> None:
    """Raise RefusedError, naming both values, when two buffers share bytes while both live."""
    alive: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: b.first):
        if buffer.offset % ALIGNMENT:
            raise RefusedError(
                f"buffer %{buffer.value} at {buffer.offset} is not {ALIGNMENT}-aligned"
            )
        alive = [b for b in alive if b.last >= buffer.first]
        for other in alive:
            if (
                other.offset < buffer.offset + buffer.bytes
                and buffer.offset < other.offset + other.bytes
            ):
                raise RefusedError(
                    f"buffers of {_span(other)} and {_span(buffer)} overlap: assign them again"
                )
        alive.append(buffer)


def _after(launch: Node) -> tuple[str, ...]:
    after = launch.attrs.get("after", ())
    assert isinstance(after, tuple)
    return tuple(str(text) for text in after)


def _tops(value: Value) -> list[Node]:
    return [node.top for node, _ in value.uses]


def _alive_with(buffer: Buffer, others: Iterable[Buffer]) -> list[Buffer]:
    return [b for b in others if b.first <= buffer.last and buffer.first <= b.last]


def _span(buffer: Buffer) -> str:
    end = buffer.offset + buffer.bytes
    positions = f"launches {buffer.first} to {buffer.last}"
    return f"%{buffer.value} ({positions}, bytes {buffer.offset} to {end})"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
