"""Order between launches as data: PDL edges, events across streams, wait and trigger points."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import Attr, Graph, Node
from k3fuse.passes.base import Edit, Pass
from k3fuse.schedule.edges import launch_dependencies
from k3fuse.schedule.roles import weight_bytes
from k3fuse.target import Target


class InsertPdl(Pass):
    """Give every launch its edges, the place of its wait and the moment of its trigger.

    Before:
        fused @kda_core {stream="main"} { ... }
    After:
        fused @kda_core {after=["pdl:projections"], stream="main", trigger="entry", wait=0} { ... }

    A launch follows its predecessor on the stream by a PDL edge and waits before the first leaf
    that reads anything but static values (`wait` is that leaf's index), so weights stream above the
    wait. Every launch waits, which makes the edges transitive. Launches let the next one start at
    entry; one that streams more weights than the SMs hold at once triggers with its last tile, or
    the next launches take its bandwidth (H200: 16 instead of 11 us for the in-projection). Other
    streams are ordered by events, and joined before the step ends. Order: last.
    """

    name: ClassVar[str] = "insert-pdl"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        graph = edit.graph
        static = graph.static_values()
        same_stream = "pdl" if edit.target.pdl else "full"
        edges = launch_dependencies(graph, same_stream=same_stream)
        for launch in [n for n in graph.nodes if n.is_fused]:
            after: tuple[Attr, ...] = tuple(str(e) for e in edges[launch.name])
            edit.set_attr(launch, "after", after)
            edit.set_attr(launch, "wait", _first_dynamic(launch, static))
            trigger = _trigger(launch, graph, static, edit.target)
            edit.set_attr(launch, "trigger", trigger)


def _first_dynamic(launch: Node, static: set[int]) -> int:
    for index, leaf in enumerate(launch.body):
        if any(id(v) not in static for v in leaf.operands):
            return index
    return len(launch.body)


def _trigger(launch: Node, graph: Graph, static: set[int], target: Target) -> str:
    experts = any(leaf.op == "moe_experts" for leaf in launch.body)
    held = target.sm_count * target.smem_per_block
    large = experts or weight_bytes(launch, graph, static) > held
    return "last_tile" if large else "entry"
