"""Is a mailbox protocol safe? Every interleaving of a few ranks, over any number of steps."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from k3fuse.errors import VerifyError
from k3fuse.schedule.model import MailboxRule, Schedule, ScheduledLaunch
from k3fuse.schedule.order import Deadlock, Order, unroll
from k3fuse.schedule.protocol_states import (
    Explorer,
    FindingKind,
    Op,
    Protocol,
    Ring,
    Verdict,
)

__all__ = [
    "Op",
    "Protocol",
    "ProtocolResult",
    "Ring",
    "check_mailboxes",
    "check_protocol",
    "one_shot",
    "two_shot",
]

STATE_LIMIT = 400_000
"""States that an exploration takes on; beyond it the answer is "not proven"."""

RANKS = (2, 3)
"""Numbers of ranks that the protocols of a schedule are explored for."""


@dataclass(frozen=True)
class ProtocolResult:
    """What an exploration found. `counterexample` is a shortest bad schedule, one line a step;
    `reason` says what went wrong, or why nothing is proven."""

    protocol: Protocol
    verdict: Verdict
    states: int
    seconds: float
    kind: FindingKind = ""
    reason: str = ""
    counterexample: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.protocol.name} on {self.protocol.ranks} ranks: {self.verdict}"
        why = f" ({self.kind or 'open'}: {self.reason})" if self.reason else ""
        return "\n".join([f"{head}, {self.states} states{why}", *self.counterexample])


def one_shot(
    ranks: int,
    stages: int,
    rearm: int,
    *,
    end_barrier: bool = False,
    payload_excludes_sentinel: bool = True,
    name: str = "push_partial",
) -> Protocol:
    """One launch publishes a use, the next reads it and re-arms: push_partial, push_chunks and
    push_gather alike, since only the contents of the words differ."""
    ring = Ring(name, stages, rearm, payload_excludes_sentinel)
    return Protocol(name, ranks, (ring,), ((Op("publish"),), _reader(0, rearm, end_barrier)))


def two_shot(ranks: int, stages: int, rearm: int, *, end_barrier: bool = False) -> Protocol:
    """Chunks to their owners; the owners read them, and gather the sums in the same launch."""
    rings = (Ring("push_chunks", stages, rearm), Ring("push_gather", stages, rearm))
    poll, *rest = _reader(0, rearm, end_barrier)
    owner = (poll, Op("publish", 1), *rest)
    launches = ((Op("publish"),), owner, _reader(1, rearm, end_barrier))
    return Protocol("two-shot", ranks, rings, launches)


def _reader(ring: int, rearm: int, end_barrier: bool) -> tuple[Op, ...]:
    program = [Op("poll", ring)]
    if rearm:
        program.append(Op("rearm", ring))
    if end_barrier:
        program.append(Op("barrier"))
    return tuple(program)


def check_protocol(protocol: Protocol, *, limit: int = STATE_LIMIT) -> ProtocolResult:
    """Explore every interleaving. REJECT comes with a shortest counter-example, ACCEPT means that
    no word is ever lost, stale or overwritten unread and no rank ever waits for ever.

    Raises VerifyError when a turn has more uses than words can tell apart.
    """
    # names do not tell protocols apart, so a result that is known may bear another one
    return dataclasses.replace(_explored(protocol, limit), protocol=protocol)


@functools.lru_cache(maxsize=256)
def _explored(protocol: Protocol, limit: int) -> ProtocolResult:
    begin = time.perf_counter()
    explorer = Explorer(protocol)
    found = explorer.explore(limit)
    if found.verdict == "REJECT":  # once more, with all moves, for a shortest counter-example
        again = Explorer(protocol, reduce=False).explore(limit)
        found = found if again.verdict == "NOT PROVEN" else again
    return ProtocolResult(
        protocol,
        found.verdict,
        len(explorer.parents),
        time.perf_counter() - begin,
        found.kind,
        found.reason,
        found.steps,
    )


def check_mailboxes(schedule: Schedule, *, ranks: tuple[int, ...] = RANKS) -> list[ProtocolResult]:
    """Check every distinct mailbox rule of a schedule, as its launches use the ring.

    Rings with equal rules that are used alike give one result a number of ranks, under the name of
    the first. Other rings and other launches can only add order, so each ring is explored alone.
    A ring whose launches may overlap, or repeat after too many uses, is NOT PROVEN.
    """
    if not schedule.mailboxes:
        return []
    try:
        order = unroll(dataclasses.replace(schedule, ranks=1), 1)
    except Deadlock as deadlock:
        reason = f"the launches wait for each other: {deadlock}"
        return [_open(rule, count, reason) for rule in schedule.mailboxes for count in ranks]
    results: dict[tuple[Protocol, str], ProtocolResult] = {}
    for rule in schedule.mailboxes:
        overlap = _overlap(order, rule)
        for count in ranks:
            protocol = _protocol(schedule, rule, count)
            key = (protocol, overlap)
            if key in results:
                continue
            if overlap:
                results[key] = _open(rule, count, overlap)
                continue
            try:
                results[key] = check_protocol(protocol)
            except VerifyError as error:
                results[key] = _open(rule, count, str(error))
    return list(results.values())


def _open(rule: MailboxRule, ranks: int, reason: str) -> ProtocolResult:
    protocol = Protocol(rule.name, ranks, (Ring(rule.name, rule.stages, rule.rearm),), ())
    return ProtocolResult(protocol, "NOT PROVEN", 0, 0.0, "", reason)


def _users(schedule: Schedule, rule: MailboxRule) -> Iterator[ScheduledLaunch]:
    for launch in schedule.launches:
        if any(a.target == rule.name and a.kind != "barrier" for a in launch.program):
            yield launch


def _overlap(order: Order, rule: MailboxRule) -> str:
    """Why two launches that use a ring may run at once, so that no rank has a program; or ""."""
    last: ScheduledLaunch | None = None
    for launch in _users(order.schedule, rule):
        index = next(i for i, a in enumerate(launch.program) if a.target == rule.name)
        if last is not None and not order.before(
            order.end(0, 0, last.name), order.at(0, 0, launch.name, index)
        ):
            action = launch.program[index].kind
            return f"@{launch.name} may {action} {rule.name} before @{last.name} has ended"
        last = launch
    return ""


def _protocol(schedule: Schedule, rule: MailboxRule, ranks: int) -> Protocol:
    """What every rank does with a ring, over the shortest stretch that repeats within the step."""
    launches: list[tuple[Op, ...]] = []
    for launch in _users(schedule, rule):
        ops: list[Op] = []
        for action in launch.program:
            if action.kind == "barrier":
                ops.append(Op("barrier"))
            elif action.target != rule.name:
                continue
            elif action.kind in ("publish", "poll", "rearm"):
                ops.append(Op(action.kind, 0, action.use))
        launches.append(tuple(ops))
    ring = Ring(rule.name, rule.stages, rule.rearm, rule.payload_excludes_sentinel)
    uses = _period(launches, rule.uses)
    turn = tuple(launches[: len(launches) * uses // max(rule.uses, 1)])
    return Protocol(rule.name, ranks, (ring,), turn, uses)


def _period(launches: list[tuple[Op, ...]], uses: int) -> int:
    """The least number of uses after which the launches of a step do the same again."""
    for period in range(1, uses):
        count, rest = divmod(len(launches) * period, uses)
        if uses % period == 0 and rest == 0 and count:
            turn = launches[:count]
            again = [
                tuple(dataclasses.replace(op, use=op.use + at * period * _counts(op)) for op in ops)
                for at in range(uses // period)
                for ops in turn
            ]
            if again == launches:
                return period
    return uses


def _counts(op: Op) -> bool:
    return op.kind != "barrier"
