"""Single faults of schedules that a plan might have had: made of an accepted variant of a plan.

A plan does not rely on the trigger of completion, empty the stage that it reads, or have grids. So
each of these first rewrites an accepted schedule into one that does, which must be accepted too
(`Mutant.base`), and then breaks one thing in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from k3fuse.schedule.model import Action, MailboxRule, Schedule, ScheduledLaunch
from k3fuse.schedule.mutations import MUTATIONS, Mutant, Mutate, changed, reads_of_predecessor
from k3fuse.target import get_target

SIDE_GRID = 8
"""CTAs of a launch on a side stream, and SMs that launches of the main stream leave to each."""


def early_trigger(schedule: Schedule) -> Iterator[Mutant]:
    """A launch without a wait relies on the trigger that completion gives, and it comes sooner.

    Base: the wait of a launch is gone, and the trigger of its PDL predecessor is its last action.
    """
    for launch, reads in reads_of_predecessor(schedule):
        source = next(edge.source for edge in launch.after if edge.kind == "pdl")
        before = schedule.launch(source)
        bare = replace(launch, program=tuple(a for a in launch.program if a.kind != "wait"))
        silent = tuple(a for a in before.program if a.kind != "trigger")
        late = replace(before, program=(*silent, Action("trigger")))
        base = _with(schedule, bare, late)
        needed = {read.target for read in reads}
        stores = [i for i, a in enumerate(silent) if a.kind == "write" and a.target in needed]
        places = {"at entry": 0, "before its last store": stores[-1]}
        if stores[-1] + 1 < len(silent):
            places["before it ends"] = stores[-1] + 1
        for where, at in places.items():
            program = (*silent[:at], Action("trigger"), *silent[at:])
            yield _broken(base, "trigger early", replace(before, program=program), where)
        yield _broken(base, "trigger early", replace(before, program=silent), "at any time")


def rearm_above_wait(schedule: Schedule) -> Iterator[Mutant]:
    """A re-arm moves above the wait while an earlier launch may still read that stage."""
    rules = {rule.name: rule for rule in schedule.mailboxes}
    by_name = {launch.name: launch for launch in schedule.launches}
    for launch in schedule.launches:
        if not launch.waits:
            continue
        read = set(_polls_still_running(launch, by_name))
        for action in launch.program:
            if action.kind != "rearm":
                continue
            rule = rules[action.target]
            if (rule.name, action.use + rule.rearm - rule.stages) in read:
                program = (action, *(a for a in launch.program if a is not action))
                broken = replace(launch, program=program)
                yield changed(schedule, "re-arm above the wait", broken, rule.name)


def rearm_own_stage(schedule: Schedule) -> Iterator[Mutant]:
    """A launch empties the stage that it reads before all of it has read it.

    Base: readers of one ring re-arm their own stage, behind a barrier. A barrier behind the re-arm
    would do as well (model: its CTAs come together before), so here there is none at all.
    """
    for rule in schedule.mailboxes:
        if not rule.rearm:
            continue
        base = _own_stage(schedule, rule)
        for launch in base.launches:
            rearms = [a for a in launch.program if a.kind == "rearm" and a.target == rule.name]
            polls = [a for a in launch.program if a.kind == "poll" and a.target == rule.name]
            if not rearms or not polls:
                continue
            rest = [a for a in launch.program if a is not rearms[0]]
            rest.insert(rest.index(polls[0]), rearms[0])
            early = replace(launch, program=tuple(rest))
            yield _broken(base, "re-arm before the poll", early, rule.name)
            bare = replace(launch, program=tuple(a for a in launch.program if a.kind != "barrier"))
            yield _broken(base, "re-arm without a barrier", bare, rule.name)


def widen_grid(schedule: Schedule) -> Iterator[Mutant]:
    """A launch that spins gets more CTAs than there are SMs for.

    Base: all launches have grids, those of side streams and beside them spin too, and all that may
    run at the same time fit the target together.
    """
    if not schedule.target or not any(launch.spins for launch in schedule.launches):
        return
    sms = get_target(schedule.target).sm_count
    base = _with_grids(schedule, sms)
    beside = _beside(base)
    for launch in base.launches:
        if not launch.spins:
            continue
        wide = replace(launch, grid=sms + 1)
        yield _broken(base, "widen grid", wide, f"to {sms + 1} CTAs, alone")
        if any(other.spins for other in beside[launch.name]):
            yield _broken(base, "widen grid", replace(launch, grid=sms), f"to {sms} CTAs, beside")


ALL_MUTATIONS: tuple[Mutate, ...] = (
    *MUTATIONS,
    early_trigger,
    rearm_above_wait,
    rearm_own_stage,
    widen_grid,
)
"""Every kind of single fault, in a fixed order."""


def _with(schedule: Schedule, *launches: ScheduledLaunch) -> Schedule:
    new = {launch.name: launch for launch in launches}
    return replace(schedule, launches=tuple(new.get(x.name, x) for x in schedule.launches))


def _broken(base: Schedule, kind: str, launch: ScheduledLaunch, detail: str) -> Mutant:
    return replace(changed(base, kind, launch, detail), base=base)


def _polls_still_running(
    launch: ScheduledLaunch, by_name: dict[str, ScheduledLaunch]
) -> Iterator[tuple[str, int]]:
    """Ring and use of polls in launches that may run when this one starts: those before it under
    PDL, as far back as each triggers above its wait and follows nothing else."""
    while len(launch.after) == 1 and launch.after[0].kind == "pdl":
        launch = by_name[launch.after[0].source]
        yield from ((a.target, a.use) for a in launch.program if a.kind == "poll")
        kinds = [action.kind for action in launch.program]
        if "trigger" not in kinds[: kinds.index("wait") if "wait" in kinds else None]:
            return


def _own_stage(schedule: Schedule, rule: MailboxRule) -> Schedule:
    boxes = tuple(replace(r, rearm=r.stages) if r is rule else r for r in schedule.mailboxes)
    launches: list[ScheduledLaunch] = []
    for launch in schedule.launches:
        moved = [a for a in launch.program if a.kind == "rearm" and a.target == rule.name]
        program = launch.program
        if moved:
            rest = (a for a in program if a not in moved)
            program = (*rest, Action("barrier", f"{launch.name}.read"), *moved)
        launches.append(replace(launch, program=program))
    return replace(schedule, mailboxes=boxes, launches=tuple(launches))


def _with_grids(schedule: Schedule, sms: int) -> Schedule:
    sides = {launch.stream for launch in schedule.launches} - {"main"}
    wide = sms - SIDE_GRID * len(sides)
    # What has nothing beside it spins only if its kernel does.
    alone = {n for n, beside in _beside(schedule).items() if not beside}
    alone -= {x.name for x in schedule.launches if x.spins}
    launches = tuple(
        replace(x, grid=wide if x.stream == "main" else SIDE_GRID, spins=x.name not in alone)
        for x in schedule.launches
    )
    return replace(schedule, launches=launches)


def _beside(schedule: Schedule) -> dict[str, list[ScheduledLaunch]]:
    """launch -> launches that no chain of edges orders before or after it."""
    before: dict[str, set[str]] = {}
    for launch in schedule.launches:
        sources = {edge.source for edge in launch.after}
        before[launch.name] = sources.union(*(before[source] for source in sources))
    side = [launch for launch in schedule.launches if launch.stream != "main"]
    return {
        launch.name: [
            other
            for other in (side if launch.stream == "main" else schedule.launches)
            if other is not launch
            and other.name not in before[launch.name]
            and launch.name not in before[other.name]
        ]
        for launch in schedule.launches
    }
