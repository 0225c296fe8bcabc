"""Use the time a rank waits on its peers: bring the next weights into L2."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.ir import FUSED, Node, Value
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.passes.base import Edit, Pass

L2_SHARE = 0.5
"""Part of L2 that prefetched lines may fill: the rest serves what the running launches read."""


class InsertL2Prefetch(Pass):
    """After each launch that pushes to peers, prefetch what the launches behind the wait read.

    Before:
        fused @o_proj { ... push_partial ... }
        fused @x { ... sum_slots ... }
        fused @front { %lg = linear(%x, %wr) ... }
    After:
        fused @o_proj { ... push_partial ... }
        fused @o_proj.prefetch { l2_prefetch(%wr, ...) {bytes=16000000} }
        fused @x { ... } ...

    A window holds what memory can deliver during one hop, and never more than a share of L2. Only
    static values are prefetched; expert weights are not, since the route is not known. Order:
    after form-launches. Attribute `prefetch=false` switches it off, and `compile` does so unless
    it is asked for: on an H200 with local mailboxes the step of K3 at TP16 and M=1 took 8.5 ms with
    the windows and 5.8 ms without, since the side stream falls behind the step that it serves.
    """

    name: ClassVar[str] = "insert-l2-prefetch"

    def rewrite(self, edit: Edit) -> None:
        graph, target = edit.graph, edit.target
        if graph.tp == 1 or graph.attrs.get("prefetch", True) is False:
            return
        window = min(
            int(target.hop_us * 1e-6 * target.read_bandwidth), int(target.l2_bytes * L2_SHARE)
        )
        if any(leaf.op == "l2_prefetch" for leaf in graph.leaves()):
            return  # the windows are taken
        static = graph.static_values()
        launches = [n for n in graph.nodes if n.is_fused]
        fetched: set[int] = set()
        for index, launch in enumerate(launches):
            if not any(leaf.op in PUSHES for leaf in launch.body):
                continue
            values = _next_weights(launches[index + 1 :], static, fetched)
            chosen: list[Value] = []
            size = 0
            for value in values:
                if size >= window:
                    break
                chosen.append(value)
                size += value.type.local_bytes(graph.tp, graph.dims)
            if not chosen:
                edit.refuse(launch, "no static weights follow before the next exchange")
                continue
            fetched.update(id(v) for v in chosen)
            _insert(edit, launch, chosen, min(size, window))


def _next_weights(launches: list[Node], static: set[int], fetched: set[int]) -> list[Value]:
    """Static operands of the launches up to and including the next one that pushes."""
    found: list[Value] = []
    for launch in launches:
        for leaf in launch.body:
            if leaf.op == "linear":
                found += [v for v in leaf.operands if id(v) in static and id(v) not in fetched]
        if any(leaf.op in PUSHES for leaf in launch.body):
            break
    return list(dict.fromkeys(found))


def _insert(edit: Edit, launch: Node, values: list[Value], size: int) -> None:
    origins = launch.body[-1].origins
    hint = edit.make(
        "l2_prefetch", values, {"bytes": size}, name="hint", origins=origins, role="made"
    )
    group = Node(FUSED, [], {}, [], name=edit.unique_launch(f"{launch.name}.prefetch"), body=[hint])
    hint.parent = group
    nodes = edit.graph.nodes
    nodes.insert(nodes.index(launch) + 1, group)
    group.position = launch.position
    edit.changes += 1
