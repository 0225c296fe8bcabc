"""Runs the launches of one rank in a random order that their edges allow, and looks for conflicts.

It shares nothing with the proof but the data model: an access lasts from its action to the end of
its launch, and every read has to find what the schedule, read from top to bottom, would give it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from k3fuse.schedule.model import Action, Schedule, ScheduledLaunch


@dataclass
class _Run:
    """A launch on its way: `done` actions are over; it runs once started and until ended."""

    launch: ScheduledLaunch
    started: bool = False
    done: int = 0
    ended: bool = False
    open: list[Action] = field(default_factory=list[Action])

    @property
    def released(self) -> bool:
        """Whether a launch behind it may start under PDL."""
        kinds = [action.kind for action in self.launch.program]
        if "trigger" not in kinds:
            return self.started
        first = kinds.index("trigger")
        return self.ended if first == len(kinds) - 1 else self.done > first


def conflict(schedule: Schedule, chance: random.Random, steps: int = 2) -> str:
    """The first conflict of one random run of several steps; "" if there is none."""
    ranges = {s.name: range(s.offset, s.offset + s.bytes) for s in schedule.storages}
    for name in {a.target for x in schedule.launches for a in x.program} - ranges.keys():
        ranges[name] = range(-len(ranges) - 1, -len(ranges))
    expected = _expected(schedule, ranges, steps)
    memory: dict[int, object] = {}
    for step in range(steps):
        runs = {launch.name: _Run(launch) for launch in schedule.launches}
        slow = chance.choice(list(runs))  # one launch lags as long as anything else can go on
        while not all(run.ended for run in runs.values()):
            ready = [run for run in runs.values() if _may_go_on(run, runs)]
            quick = [run for run in ready if run.launch.name != slow] or ready
            run = chance.choice(quick if chance.random() < 0.9 else ready)
            if not run.started:
                run.started = True
            elif run.done == len(run.launch.program):
                run.ended = True
                run.open.clear()
            else:
                found = _act(run, step, runs, ranges, memory, expected)
                if found:
                    return found
    return ""


def _may_go_on(run: _Run, runs: dict[str, _Run]) -> bool:
    edges = run.launch.after
    if not run.started:
        return all(
            runs[e.source].released if e.kind == "pdl" else runs[e.source].ended for e in edges
        )
    if run.done < len(run.launch.program) and run.launch.program[run.done].kind == "wait":
        return all(runs[e.source].ended for e in edges if e.kind == "pdl")
    return not run.ended


def _act(
    run: _Run,
    step: int,
    runs: dict[str, _Run],
    ranges: dict[str, range],
    memory: dict[int, object],
    expected: dict[tuple[int, str, int], list[object]],
) -> str:
    action = run.launch.program[run.done]
    run.done += 1
    if action.kind not in ("read", "write"):
        return ""
    mine = set(ranges[action.target])
    for other in runs.values():
        for access in other.open:
            apart = mine.isdisjoint(ranges[access.target])
            if other is not run and not apart and "write" in (access.kind, action.kind):
                return f"{run.launch.name} {action} beside {other.launch.name} {access}"
    run.open.append(action)
    if action.kind == "write":
        memory.update(dict.fromkeys(mine, (step, run.launch.name, run.done)))
    elif [memory.get(cell) for cell in mine] != expected[step, run.launch.name, run.done]:
        return f"{run.launch.name} {action} finds another value"
    return ""


def _expected(
    schedule: Schedule, ranges: dict[str, range], steps: int
) -> dict[tuple[int, str, int], list[object]]:
    """What each read finds when launches run one after the other as they are listed, an object
    each in bytes of its own."""
    own: dict[tuple[str, int], object] = {}
    found: dict[tuple[int, str, int], list[object]] = {}
    for step in range(steps):
        for launch in schedule.launches:
            for done, action in enumerate(launch.program, start=1):
                cells = [(action.target, c) for c in set(ranges.get(action.target, ()))]
                if action.kind == "write":
                    own.update(dict.fromkeys(cells, (step, launch.name, done)))
                elif action.kind == "read":
                    found[step, launch.name, done] = [own.get(cell) for cell in cells]
    return found
