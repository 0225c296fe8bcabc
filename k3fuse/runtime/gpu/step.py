"""One bucket on one rank: its launches bound to memory, put on streams or captured in a graph."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch

from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.gpu.memory import RankMemory
from k3fuse.runtime.gpu.partition import Streams
from k3fuse.runtime.launcher import KernelFolder, Launch
from k3fuse.schedule.edges import Edge, parse_edge


@dataclass(frozen=True)
class BoundLaunch:
    """A launch of the plan, ready to go on its stream behind these events."""

    name: str
    stream: str
    events: tuple[str, ...]
    launch: Launch


@dataclass
class BoundStep:
    """All launches of one bucket on one rank, in the plan's order."""

    launches: list[BoundLaunch]
    streams: Streams
    _events: dict[str, torch.cuda.Event] = field(default_factory=dict[str, torch.cuda.Event])

    def __post_init__(self) -> None:
        self._awaited = {name for item in self.launches for name in item.events}
        self._sides = {item.stream for item in self.launches} - {"main"}

    @classmethod
    def bind(
        cls, memory: RankMemory, bucket: Bucket, kernels: KernelFolder, streams: Streams
    ) -> BoundStep:
        """Give every parameter of every kernel its value. InputError for a kernel that does not
        load on this GPU."""
        held = memory.buckets[bucket]
        plan, selection = held.layout.plan, held.layout.selection
        bound: list[BoundLaunch] = []
        for launch, item in zip(plan.launches, selection.launches, strict=True):
            edges = [parse_edge(text) for text in launch.after]
            arguments = held.arguments(item, launch.stream)
            made = kernels.bind(item.kernel, arguments, dependent=_is_dependent(edges))
            events = tuple(edge.source for edge in edges if edge.kind == "event")
            bound.append(BoundLaunch(launch.name, launch.stream, events, made))
        return cls(bound, streams)

    def begin(self) -> None:
        """Side streams start behind what the main stream has been given so far."""
        start = torch.cuda.Event()
        start.record(self.streams["main"])
        for name in self._sides:
            self.streams[name].wait_event(start)

    def put(self, position: int) -> None:
        """Put the launch at that place of the plan on its stream."""
        item = self.launches[position]
        stream = self.streams[item.stream]
        for name in item.events:
            stream.wait_event(self._events[name])
        item.launch(stream.cuda_stream)
        if item.name in self._awaited:
            event = self._events[item.name] = torch.cuda.Event()
            event.record(stream)

    def capture(self) -> torch.cuda.CUDAGraph:
        """One CUDA graph of the whole step."""
        graph, main = torch.cuda.CUDAGraph(), self.streams["main"]
        with torch.cuda.stream(main):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.begin()
                for position in range(len(self.launches)):
                    self.put(position)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that is broken already
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


def _is_dependent(edges: list[Edge]) -> bool:
    return any(edge.kind == "pdl" for edge in edges)
