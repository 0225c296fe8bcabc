"""Launch of a graph -> kernel program: names and layers go, sizes and places of one rank stay."""

from __future__ import annotations

from collections.abc import Mapping

from k3fuse.errors import RefusedError
from k3fuse.ir import Graph, Node, Value, state_roots
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.kernels.program import Attribute, Held, Place, Program, Ring, Step
from k3fuse.runtime.plan import Mailbox, Plan
from k3fuse.schedule.edges import launches_of


def launch_programs(graph: Graph, plan: Plan) -> dict[str, Program]:
    """The program of every launch by launch name. Equal bodies give equal programs."""
    maker = _Maker(graph, plan)
    return {launch.name: maker.program(launch) for launch in launches_of(graph)}


def program_operands(
    graph: Graph, launch: Node, roots: Mapping[int, Value] | None = None
) -> list[Value]:
    """The graph's values in the order of the program's values. roots: `state_roots(graph)`, for
    who asks often."""
    found: dict[int, Value] = {}
    roots = state_roots(graph) if roots is None else roots
    for leaf in launch.body:
        for value in (*leaf.operands, *leaf.results):
            for seen in (roots.get(id(value)), value):
                if seen is not None:
                    found.setdefault(id(seen), seen)
    return list(found.values())


class _Maker:
    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph = graph
        self._roots = state_roots(graph)
        self._static = graph.static_values()
        self._rings = {box.name: box for box in plan.mailboxes}
        self._box: dict[str, str] = {}
        self._first_readers: dict[str, str] = {}
        for launch in plan.launches:
            for operand in launch.operands:
                if operand.access != "mailbox":
                    continue
                self._box[operand.value] = operand.storage
                if operand.mode == "read":
                    self._first_readers.setdefault(operand.value, launch.name)

    def program(self, launch: Node) -> Program:
        """The program of one launch."""
        values = program_operands(self._graph, launch, self._roots)
        index = {id(value): i for i, value in enumerate(values)}
        inside = {id(r) for leaf in launch.body for r in leaf.results}
        leaving = {id(v) for v in launch.outputs(self._graph)}
        channels: dict[str, int] = {}
        held: list[Held] = []
        for i, value in enumerate(values):
            place = self._place(value, inside, leaving)
            ring = None
            if place in ("mailbox", "pushed"):
                box = self._rings[self._box[value.name]]
                channel = channels.setdefault(box.name, len(channels))
                first = self._first_readers.get(value.name) == launch.name
                ring = _ring(box, channel, first=place == "mailbox" and first)
            root = self._roots.get(id(value))
            held.append(
                Held(
                    value.type.dtype.value,
                    _shape(value, self._graph),
                    place,
                    i if root is None else index[id(root)],
                    ring,
                )
            )
        steps = tuple(
            Step(
                leaf.op,
                _attributes(launch, leaf),
                tuple(index[id(v)] for v in leaf.operands),
                tuple(index[id(v)] for v in leaf.results),
            )
            for leaf in launch.body
        )
        written = tuple(
            i for i, v in enumerate(values) if id(v) in inside and held[i].place == "activation"
        )
        trigger = str(launch.attrs.get("trigger", "entry"))
        return Program(self._graph.tp, tuple(held), steps, written, trigger)

    def _place(self, value: Value, inside: set[int], leaving: set[int]) -> Place:
        if id(value) in self._roots:
            return "state"
        pushed = value.producer is not None and value.producer.op in PUSHES
        if id(value) in inside:
            if pushed:
                return "pushed"
            return "activation" if id(value) in leaving else "internal"
        if pushed:
            return "mailbox"
        if id(value) in self._static:
            return "weight"
        return "host" if value.kind == "input" else "activation"


def _ring(box: Mailbox, channel: int, *, first: bool) -> Ring:
    return Ring(channel, box.stage_bytes, box.stages, box.uses, box.rearm, first)


def _shape(value: Value, graph: Graph) -> tuple[int, ...]:
    dims: Mapping[str, int] = graph.dims
    local = value.type.local_shape(graph.tp)
    return tuple(dims[d] if isinstance(d, str) else d for d in local)


def _attributes(launch: Node, leaf: Node) -> tuple[tuple[str, Attribute], ...]:
    """Attributes by name, with what the placements say that a program does not keep."""
    found = {k: _attribute(launch, k, v) for k, v in leaf.attrs.items()}
    if leaf.op == "embedding" and leaf.operands[1].type.placement.is_shard:
        found["sharded"] = True  # the table holds a rank's part of the vocabulary
    cut = {"linear": 0, "moe_experts": 3}.get(leaf.op)
    if cut is not None and found.get("out") and leaf.operands[cut].type.placement.is_shard:
        found["unrounded"] = True  # a term of a sum over ranks
    return tuple(sorted(found.items()))


def _attribute(launch: Node, name: str, value: object) -> Attribute:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple):  # the shape of a view: the result's shape says it
        return None
    raise RefusedError(f"@{launch.name}: attribute {name} = {value!r} is no plain value")
