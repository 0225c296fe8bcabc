"""Schedules that are wrong by construction: single faults of the kinds this field has shipped.

Each mutation takes an accepted schedule and breaks one thing whose breakage must be noticed: it
says what would go wrong and for whom. The campaign (`make prove-campaign`) demands that the proof
rejects every one of them. `schedule.derived_mutations` has those that need a base of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from k3fuse.schedule.model import Action, MailboxRule, Schedule, ScheduledLaunch


@dataclass(frozen=True)
class Mutant:
    """A schedule with one fault. `kind` is the mutation, `detail` and `where` say of what.

    base: the accepted schedule that it was made of, if that is not the plan's own.
    """

    kind: str
    where: str
    schedule: Schedule
    detail: str = ""
    base: Schedule | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.detail, "at", self.where)))


Mutate = Callable[[Schedule], Iterator[Mutant]]


def drop_wait(schedule: Schedule) -> Iterator[Mutant]:
    """A launch under PDL reads what the launch before it writes, and does not wait."""
    for launch, _ in reads_of_predecessor(schedule):
        program = tuple(a for a in launch.program if a.kind != "wait")
        yield changed(schedule, "drop wait", replace(launch, program=program))


def late_wait(schedule: Schedule) -> Iterator[Mutant]:
    """The wait stands behind the last read instead of before the first."""
    for launch, _ in reads_of_predecessor(schedule):
        program = [a for a in launch.program if a.kind != "wait"]
        last = max(i for i, a in enumerate(program) if a.kind == "read")
        program.insert(last + 1, Action("wait"))
        yield changed(schedule, "late wait", replace(launch, program=tuple(program)))


def hoist_read(schedule: Schedule) -> Iterator[Mutant]:
    """One read of the predecessor's result moves above the wait."""
    for launch, reads in reads_of_predecessor(schedule):
        for read in reads:
            program = list(launch.program)
            program.remove(read)
            program.insert(0, read)
            broken = replace(launch, program=tuple(program))
            yield changed(schedule, "hoist read", broken, read.target)


def drop_edge(schedule: Schedule) -> Iterator[Mutant]:
    """An edge from the launch that wrote what this one reads is missing."""
    writers = _writers(schedule)
    for launch in schedule.launches:
        needed = {writers[a.target].name for a in launch.program if a.target in writers}
        for edge in launch.after:
            if edge.source in needed and edge.source != launch.name:
                after = tuple(e for e in launch.after if e is not edge)
                yield changed(schedule, "drop edge", replace(launch, after=after), str(edge))


def drop_join(schedule: Schedule) -> Iterator[Mutant]:
    """The last launch of a side stream is never waited for."""
    last = {x.stream: x.name for x in schedule.launches if x.stream != "main"}
    for launch in schedule.launches:
        for edge in launch.after:
            if launch.stream == "main" and edge.source in last.values():
                after = tuple(e for e in launch.after if e is not edge)
                yield changed(schedule, "drop join", replace(launch, after=after), edge.source)


def fewer_stages(schedule: Schedule) -> Iterator[Mutant]:
    """A ring with one stage less: its reader empties the stage that it is still reading."""
    for rule in schedule.mailboxes:
        if rule.rearm:
            boxes = tuple(
                replace(r, stages=r.stages - 1) if r is rule else r for r in schedule.mailboxes
            )
            detail = f"{rule.stages - 1} of {rule.stages}"
            yield Mutant("fewer stages", rule.name, replace(schedule, mailboxes=boxes), detail)


def other_rearm(schedule: Schedule) -> Iterator[Mutant]:
    """A reader empties the stage that a faster peer may already have filled, or none at all."""
    for rule in _unguarded(schedule):
        if rule.rearm == 2 and rule.stages == 3:
            boxes = tuple(replace(r, rearm=1) if r is rule else r for r in schedule.mailboxes)
            yield Mutant("re-arm one ahead", rule.name, replace(schedule, mailboxes=boxes))


def drop_action(kind: str, what: str) -> Mutate:
    """A launch forgets to publish, to poll or to re-arm one use."""

    def mutate(schedule: Schedule) -> Iterator[Mutant]:
        for launch in schedule.launches:
            for index, action in enumerate(launch.program):
                if action.kind == kind:
                    program = launch.program[:index] + launch.program[index + 1 :]
                    yield changed(schedule, what, replace(launch, program=program), action.target)

    return mutate


def other_epoch(schedule: Schedule) -> Iterator[Mutant]:
    """A reader polls the use before the one that was sent for it."""
    for launch in schedule.launches:
        for index, action in enumerate(launch.program):
            if action.kind == "poll" and action.use > 0:
                program = list(launch.program)
                program[index] = replace(action, use=action.use - 1)
                broken = replace(launch, program=tuple(program))
                yield changed(schedule, "poll an old epoch", broken, action.target)


def alias_buffers(schedule: Schedule) -> Iterator[Mutant]:
    """Two buffers that are live at the same time share their bytes."""
    spans = _spans(schedule)
    homes = {s.name: s for s in schedule.storages}
    names = [name for name in spans if name in homes]
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            a, b = spans[first], spans[second]
            if a[0] < b[0] < a[1] and homes[first].offset != homes[second].offset:
                moved = replace(homes[second], offset=homes[first].offset)
                storages = tuple(moved if s.name == second else s for s in schedule.storages)
                yield Mutant("alias", f"{first}, {second}", replace(schedule, storages=storages))
                break


def write_weight(schedule: Schedule) -> Iterator[Mutant]:
    """The launch before changes a weight that a launch loads above its wait."""
    for launch in schedule.launches:
        weights = [a.target for a in launch.program if a.access == "weight" and a.kind == "read"]
        for edge in launch.after:
            if edge.kind == "pdl" and weights and launch.waits:
                before = schedule.launch(edge.source)
                program = (*before.program, Action("write", weights[0], "weight"))
                broken = replace(before, program=program)
                yield changed(schedule, "write weight", broken, weights[0])


MUTATIONS: tuple[Mutate, ...] = (
    drop_wait,
    late_wait,
    hoist_read,
    drop_edge,
    drop_join,
    fewer_stages,
    other_rearm,
    drop_action("publish", "drop publish"),
    drop_action("poll", "drop poll"),
    drop_action("rearm", "drop re-arm"),
    other_epoch,
    alias_buffers,
    write_weight,
)


def _unguarded(schedule: Schedule) -> Iterator[MailboxRule]:
    """Rings with two uses in a row that no exchange on another ring separates.

    Elsewhere that other exchange keeps a peer from running ahead, and the fault does no harm.
    """
    sent = [a.target for launch in schedule.launches for a in launch.program if a.kind == "publish"]
    twice = {a for a, b in pairwise(sent) if a == b}
    for rule in schedule.mailboxes:
        if rule.name in twice:
            yield rule


def changed(schedule: Schedule, kind: str, launch: ScheduledLaunch, detail: str = "") -> Mutant:
    """The schedule with another launch in the place of the one of that name."""
    launches = tuple(launch if x.name == launch.name else x for x in schedule.launches)
    return Mutant(kind, launch.name, replace(schedule, launches=launches), detail)


def _writers(schedule: Schedule) -> dict[str, ScheduledLaunch]:
    """activation -> the launch that writes it."""
    return {
        a.target: launch
        for launch in schedule.launches
        for a in launch.program
        if a.kind == "write" and a.access == "activation"
    }


def reads_of_predecessor(
    schedule: Schedule,
) -> Iterator[tuple[ScheduledLaunch, list[Action]]]:
    """Launches with the reads of what their PDL predecessor writes."""
    writers = _writers(schedule)
    for launch in schedule.launches:
        before = {edge.source for edge in launch.after if edge.kind == "pdl"}
        reads = [
            a
            for a in launch.program
            if a.kind == "read" and a.target in writers and writers[a.target].name in before
        ]
        if reads and launch.waits:
            yield launch, reads


def _spans(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """activation -> positions of the launch that writes it and of its last main-stream reader."""
    spans: dict[str, tuple[int, int]] = {}
    for position, launch in enumerate(schedule.launches):
        for action in launch.program:
            if action.access != "activation" or launch.stream != "main":
                continue
            if action.kind == "write":
                spans[action.target] = (position, position)
            elif action.kind == "read" and action.target in spans:
                spans[action.target] = (spans[action.target][0], position)
    return {name: span for name, span in spans.items() if span[0] < span[1]}
