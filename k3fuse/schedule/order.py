"""Happens-before of a schedule, unrolled over ranks and replays, as one directed graph.

Nodes are a launch's start, each of its actions, and its end (completion, with all its stores
visible). An edge says "not before". What is known at a node is the set of ends, polls and
re-arms that have certainly happened: a Python integer used as a bit set, one pass in topological
order, so the cost is linear in the graph and exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import networkx

from k3fuse.schedule.model import Action, Schedule, ScheduledLaunch

nx = cast(Any, networkx)  # what it says of its types is partial

Key = tuple[int, int, str]
"""(step, rank, launch name)."""


@dataclass
class Moment:
    """One node: `index` is -1 for the start, the number of actions for the end."""

    step: int
    rank: int
    launch: ScheduledLaunch
    index: int
    bit: int = -1
    known: int = 0

    @property
    def action(self) -> Action | None:
        inside = 0 <= self.index < len(self.launch.program)
        return self.launch.program[self.index] if inside else None

    def __str__(self) -> str:
        if self.index < 0:
            what = "start"
        else:
            action = self.action
            what = "end" if action is None else f"{action.kind} {action.target}".strip()
            if action is not None and action.kind in ("publish", "poll", "rearm"):
                what += f" use {action.use}"
        return f"step {self.step} rank {self.rank} @{self.launch.name}: {what}"


class Deadlock(Exception):  # noqa: N818 - a finding, which the proof reports with its cycle
    """The edges form a cycle: each moment waits for the next one."""

    def __init__(self, cycle: list[Moment]) -> None:
        super().__init__(" <- ".join(str(m) for m in cycle))
        self.cycle = cycle


@dataclass
class Order:
    """The unrolled graph; `moments[key]` lists start, actions and end of one launch in order."""

    schedule: Schedule
    steps: int
    moments: dict[Key, list[Moment]] = field(default_factory=dict[Key, "list[Moment]"])
    edges: list[tuple[Moment, Moment]] = field(default_factory=list["tuple[Moment, Moment]"])

    def at(self, step: int, rank: int, launch: str, index: int) -> Moment:
        """The moment of an action; index -1 is the start."""
        return self.moments[step, rank, launch][index + 1]

    def end(self, step: int, rank: int, launch: str) -> Moment:
        return self.moments[step, rank, launch][-1]

    def before(self, earlier: Moment, later: Moment) -> bool:
        """Whether `earlier` (an end, poll, re-arm or barrier) has certainly happened at `later`."""
        return bool(later.known >> earlier.bit & 1)


def unroll(schedule: Schedule, steps: int) -> Order:
    """Build the graph and fill in what is known at every moment. Raises Deadlock."""
    order = Order(schedule, steps)
    _add_moments(order)
    _add_stream_edges(order)
    _add_exchange_edges(order)
    _learn(order)
    return order


def _add_moments(order: Order) -> None:
    for step in range(order.steps):
        for rank in range(order.schedule.ranks):
            for launch in order.schedule.launches:
                count = len(launch.program)
                line = [Moment(step, rank, launch, i) for i in range(-1, count + 1)]
                order.moments[step, rank, launch.name] = line
                order.edges.extend(pairwise(line))


def _add_stream_edges(order: Order) -> None:
    for (step, rank, name), line in list(order.moments.items()):
        launch = line[0].launch
        for edge in launch.after:
            source = order.moments[step, rank, edge.source]
            if edge.kind == "pdl":
                order.edges.append((_trigger(source), line[0]))
                order.edges.extend(
                    (source[-1], m) for m in line if m.action and m.action.kind == "wait"
                )
            else:
                order.edges.append((source[-1], line[0]))
        if step > 0:  # a replay starts when the one before has completed
            order.edges.append((order.end(step - 1, rank, name), _gate(order, step, rank)))
            order.edges.append((_gate(order, step, rank), line[0]))


def _gate(order: Order, step: int, rank: int) -> Moment:
    """One node between two replays, so that the edges stay linear in number."""
    key = (step, rank, "")
    if key not in order.moments:
        nothing = ScheduledLaunch("(replay)", "main", (), ())
        order.moments[key] = [Moment(step, rank, nothing, -1)]
    return order.moments[key][0]


def _trigger(line: list[Moment]) -> Moment:
    """When the next launch may start: at the trigger; at the end if the trigger is the last action;
    at any time if there is none, which is all that a PDL edge alone promises."""
    found = next((m for m in line if m.action and m.action.kind == "trigger"), line[0])
    return line[-1] if found is line[-2] and found is not line[0] else found


def _add_exchange_edges(order: Order) -> None:
    """A poll comes after all publishes of its use; nobody leaves a barrier before all arrived."""
    published: dict[tuple[int, str, int], list[Moment]] = {}
    barriers: dict[tuple[int, str, int], list[Moment]] = {}
    polls: list[tuple[tuple[int, str, int], Moment]] = []
    for line in list(order.moments.values()):
        for moment in line:
            action = moment.action
            if action is None:
                continue
            key = (moment.step, action.target, action.use)
            if action.kind == "publish":
                published.setdefault(key, []).append(moment)
            elif action.kind == "poll":
                polls.append((key, moment))
            elif action.kind == "barrier":  # all ranks run the same program
                at = (moment.step, moment.launch.name, moment.index)
                barriers.setdefault(at, []).append(moment)
    for key, moment in polls:
        order.edges.extend((source, moment) for source in published.get(key, []))
    for moments in barriers.values():
        for moment in moments:  # arrive before the barrier, leave behind it
            arrive = order.moments[moment.step, moment.rank, moment.launch.name][moment.index]
            for other in moments:
                if other is not moment:
                    order.edges.append((arrive, other))


def _learn(order: Order) -> None:
    lines = [m for line in order.moments.values() for m in line]
    number = {id(m): i for i, m in enumerate(lines)}
    sources: list[list[int]] = [[] for _ in lines]
    for earlier, later in order.edges:
        sources[number[id(later)]].append(number[id(earlier)])
    topological = _sorted(sources, lines)
    bits = 0
    for moment in lines:
        action = moment.action
        is_end = moment.index == len(moment.launch.program) and moment.launch.name != "(replay)"
        if is_end or (action is not None and action.kind in ("poll", "rearm", "barrier")):
            moment.bit = bits
            bits += 1
    for node in topological:
        moment = lines[node]
        for source in sources[node]:
            earlier = lines[source]
            moment.known |= earlier.known
            if earlier.bit >= 0:
                moment.known |= 1 << earlier.bit


def _sorted(sources: list[list[int]], lines: list[Moment]) -> list[int]:
    """Node numbers in topological order. Raises Deadlock with one cycle."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(lines)))
    graph.add_edges_from((a, b) for b, earlier in enumerate(sources) for a in earlier)
    try:
        return list(nx.topological_sort(graph))
    except networkx.NetworkXUnfeasible:
        raise Deadlock([lines[a] for a, _ in nx.find_cycle(graph)]) from None
