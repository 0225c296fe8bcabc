"""Plan -> schedule: what each launch touches, in the order in which its kernel will."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from k3fuse.runtime.plan import Launch, Operand, Plan
from k3fuse.runtime.selection import Resources
from k3fuse.schedule.edges import parse_edge
from k3fuse.schedule.model import Action, MailboxRule, Schedule, ScheduledLaunch, Storage


def schedule_of(
    plan: Plan, resources: Mapping[str, Resources] | None = None, *, ranks: int | None = None
) -> Schedule:
    """The schedule of a plan, by default for two ranks (all others are alike), one at TP 1.

    resources: what the kernel of a launch takes, by launch name; the others have none yet.

    A kernel loads weights, waits, re-arms what it is the first to read, polls, reads everything
    else, writes its results and publishes. It triggers first of all ("entry"), or once it has
    waited ("last_tile"). State versions share one storage, so an update is a read and a write.
    """
    resources = {} if resources is None else resources
    homes = {state.name for state in plan.states}
    readers = _first_readers(plan)
    return Schedule(
        name=f"{plan.model}.tp{plan.tp}.b{plan.batch}q{plan.rows_per_request}",
        target=plan.target,
        ranks=min(plan.tp, 2) if ranks is None else ranks,
        launches=tuple(
            _launch(launch, homes, readers, resources.get(launch.name)) for launch in plan.launches
        ),
        storages=tuple(
            Storage(buffer.value, "arena", buffer.offset, buffer.bytes) for buffer in plan.arena
        ),
        mailboxes=tuple(
            MailboxRule(
                box.name,
                box.stages,
                box.rearm,
                box.uses,
                sentinel=box.sentinel,
                protocol=box.protocol,
            )
            for box in plan.mailboxes
        ),
        outputs=tuple(value for _, value in plan.outputs),
    )


def _first_readers(plan: Plan) -> dict[tuple[str, int], str]:
    """(mailbox, use) -> the first launch that reads it."""
    found: dict[tuple[str, int], str] = {}
    for launch in plan.launches:
        for o in launch.operands:
            if o.access == "mailbox" and o.mode == "read":
                found.setdefault((o.storage, o.use), launch.name)
    return found


def _launch(
    launch: Launch,
    states: set[str],
    readers: Mapping[tuple[str, int], str],
    taken: Resources | None,
) -> ScheduledLaunch:
    reads = [o for o in launch.operands if o.mode in ("read", "update")]
    writes = [o for o in launch.operands if o.mode in ("write", "update")]
    static = [_read(o, states) for o in reads if o.access == "weight"]
    dynamic = [_read(o, states) for o in reads if o.access not in ("weight", "mailbox")]
    boxes = [o for o in reads if o.access == "mailbox"]
    program = [
        *static,
        Action("wait"),
        *(
            Action("rearm", o.storage, "mailbox", o.use)
            for o in boxes
            if readers[o.storage, o.use] == launch.name
        ),
        *(Action("poll", o.storage, "mailbox", o.use) for o in boxes),
        *dynamic,
        *(Action("write", _home(o, states), o.access) for o in writes if o.access != "mailbox"),
        *(Action("publish", o.storage, "mailbox", o.use) for o in writes if o.access == "mailbox"),
    ]
    at = 0 if launch.trigger == "entry" else program.index(Action("wait")) + 1
    program.insert(at, Action("trigger"))
    scheduled = ScheduledLaunch(
        name=launch.name,
        stream=launch.stream,
        after=tuple(parse_edge(edge) for edge in launch.after),
        program=tuple(program),
        spins=bool(boxes),
    )
    if taken is None:
        return scheduled
    return replace(
        scheduled,
        grid=taken.grid,
        cluster=taken.cluster,
        threads=taken.threads,
        smem=taken.smem,
        spins=taken.spins,
    )


def _home(operand: Operand, states: set[str]) -> str:
    return operand.storage if operand.storage in states else operand.value


def _read(operand: Operand, states: set[str]) -> Action:
    return Action("read", _home(operand, states), operand.access)
