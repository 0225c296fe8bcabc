"""The proof that a schedule has no race: every access is ordered after those it depends on.

Linear sweeps over the unrolled order; no pair of launches is compared unless they touch the same
bytes. A check that cannot be completed is reported as not proven, never skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from k3fuse.schedule.model import MailboxRule, Schedule, ScheduledLaunch
from k3fuse.schedule.order import Deadlock, Moment, Order, unroll

MAX_MOMENTS = 2_000_000
"""Unrolled moments that a proof takes on; beyond it the answer is "not proven"."""


@dataclass(frozen=True)
class Finding:
    """One reason why a schedule is rejected (or not proven); names the launches and the object."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Proof:
    """The outcome. `proved` only when every check ran and none failed."""

    schedule: str
    findings: list[Finding] = field(default_factory=list[Finding])
    not_proven: list[str] = field(default_factory=list[str])
    moments: int = 0
    checks: int = 0
    seconds: float = 0.0

    @property
    def rejected(self) -> bool:
        return bool(self.findings)

    @property
    def proved(self) -> bool:
        return not self.findings and not self.not_proven

    @property
    def verdict(self) -> str:
        return "REJECT" if self.rejected else "ACCEPT" if self.proved else "NOT PROVEN"


def prove_order(schedule: Schedule, *, limit: int = MAX_MOMENTS) -> Proof:
    """Prove data and mailbox accesses ordered over replays and ranks, or say what is not."""
    begin = time.perf_counter()
    proof = Proof(schedule.name)
    steps = _steps(schedule)
    size = steps * schedule.ranks * sum(len(x.program) + 2 for x in schedule.launches)
    if size > limit:
        proof.not_proven.append(
            f"the schedule unrolls to {size} moments over {steps} replays and {schedule.ranks} "
            f"ranks, the limit is {limit}"
        )
        return proof
    proof.findings += _local_rules(schedule)
    if not proof.findings:
        try:
            order = unroll(schedule, steps)
        except Deadlock as deadlock:
            proof.findings.append(Finding("deadlock", f"each waits for the next: {deadlock}"))
        else:
            proof.moments = sum(len(line) for line in order.moments.values())
            for check in (_data_accesses, _mailbox_uses, _joins):
                for finding in check(order, proof):
                    proof.findings.append(finding)
    proof.seconds = time.perf_counter() - begin
    return proof


def _steps(schedule: Schedule) -> int:
    """Replays that show every reuse: a whole turn of the ring with the fewest uses, at least 2."""
    turns = [-(-rule.stages // max(rule.uses, 1)) for rule in schedule.mailboxes]
    return max([2, *(1 + turn for turn in turns)])


def _local_rules(schedule: Schedule) -> Iterator[Finding]:
    """What can be said of a launch or a mailbox by itself."""
    written = {a.target for x in schedule.launches for a in x.program if a.kind == "write"}
    rules = {rule.name: rule for rule in schedule.mailboxes}
    names = {x.name for x in schedule.launches}
    for launch in schedule.launches:
        yield from _launch_rules(launch, written, rules, names)
    control: dict[str, str] = {}
    for rule in schedule.mailboxes:
        if not rule.payload_excludes_sentinel:
            yield Finding(
                "sentinel",
                f"mailbox {rule.name}: a payload may equal its empty pattern ({rule.sentinel}), "
                "which would look like data that has not arrived",
            )
        if rule.control:
            other = control.setdefault(rule.control, rule.name)
            if other != rule.name:
                yield Finding(
                    "shared control word",
                    f"mailboxes {other} and {rule.name} both count their uses in {rule.control}",
                )


def _launch_rules(
    launch: ScheduledLaunch, written: set[str], rules: dict[str, MailboxRule], names: set[str]
) -> Iterator[Finding]:
    for edge in launch.after:
        if edge.source not in names:
            yield Finding("unknown launch", f"@{launch.name} follows @{edge.source}, not there")
    if launch.host_metadata:
        yield Finding(
            "host value", f"@{launch.name} reads a host value at launch: a replay would not see it"
        )
    waited = not launch.waits
    for action in launch.program:
        if action.kind == "wait":
            waited = True
        static = action.access in ("weight", "host") and action.target not in written
        if action.kind == "read" and not waited and not static:
            why = " (written in this graph, so not static)" if action.access == "weight" else ""
            yield Finding(
                "read before wait", f"@{launch.name} reads {action.target} above its wait{why}"
            )
        if action.kind == "check" and action.via not in ("epoch", "counter"):
            yield Finding(
                "stale flag",
                f"@{launch.name} compares flag {action.target} with {action.via}, which repeats at "
                "replay: compare it with an epoch or counter held in memory",
            )
        if action.kind in ("publish", "poll", "rearm"):
            if action.target not in rules:
                yield Finding("unknown mailbox", f"@{launch.name} uses {action.target}, not there")
            elif action.kind == "publish":
                multicast = rules[action.target].space == "multicast"
                if multicast != (action.via == "multimem"):
                    yield Finding(
                        "store class",
                        f"@{launch.name} stores to {rules[action.target].space} mailbox "
                        f"{action.target} by {action.via}",
                    )


def _data_accesses(order: Order, proof: Proof) -> Iterator[Finding]:
    """Reads after their writers, overwrites after all earlier accesses of the same bytes."""
    for rank in range(order.schedule.ranks):
        yield from _sweep(order, rank, proof)


@dataclass
class _Touch:
    moment: Moment
    writes: bool
    via: str


def _sweep(order: Order, rank: int, proof: Proof) -> Iterator[Finding]:
    overlaps = _overlaps(order.schedule)
    touches: dict[str, list[_Touch]] = {}
    writers: dict[str, _Touch] = {}
    written = {a.target for x in order.schedule.launches for a in x.program if a.kind == "write"}
    for step in range(order.steps):
        for launch in order.schedule.launches:
            for index, action in enumerate(launch.program):
                if action.kind not in ("read", "write") or action.access == "mailbox":
                    continue
                if action.target not in written:  # weights and step inputs
                    if action.kind == "read" and action.access in ("activation", "mailbox"):
                        yield Finding(
                            "nothing written",
                            f"@{launch.name} reads {action.target}, which no launch writes",
                        )
                    continue
                here = order.at(step, rank, launch.name, index)
                touch = _Touch(here, action.kind == "write", action.via)
                if action.kind == "read":
                    yield from _read(order, proof, touch, writers, touches)
                else:
                    yield from _write(order, proof, touch, overlaps, touches)
                    writers[action.target] = touch


def _read(
    order: Order,
    proof: Proof,
    touch: _Touch,
    writers: dict[str, _Touch],
    touches: dict[str, list[_Touch]],
) -> Iterator[Finding]:
    action = touch.moment.action
    assert action is not None
    touches.setdefault(action.target, []).append(touch)
    writer = writers.get(action.target)
    if writer is None:
        if action.access != "state":
            yield Finding("nothing written", f"{touch.moment}: nothing has written it before")
        return
    stale = writer.moment.step != touch.moment.step and action.access == "activation"
    if stale:
        yield Finding("stale data", f"{touch.moment} would read what {writer.moment} left")
        return
    proof.checks += 1
    if not _finished(order, writer, touch.moment):
        yield Finding("read after write", f"{touch.moment} is not ordered after {writer.moment}")
    if action.via == "tma" and writer.via == "generic" and not _fenced(writer.moment):
        yield Finding(
            "proxy fence",
            f"{touch.moment} reads by bulk copy what {writer.moment} stored without a proxy fence",
        )


def _write(
    order: Order,
    proof: Proof,
    touch: _Touch,
    overlaps: dict[str, list[str]],
    touches: dict[str, list[_Touch]],
) -> Iterator[Finding]:
    action = touch.moment.action
    assert action is not None
    for other in [action.target, *overlaps.get(action.target, [])]:
        for earlier in touches.get(other, []):
            proof.checks += 1
            same_launch = _same_launch(earlier.moment, touch.moment)
            ordered = _finished(order, earlier, touch.moment)
            if ordered and (other == action.target or not same_launch):
                continue
            kind = "write after write" if earlier.writes else "write after read"
            shared = "" if other == action.target else f" (shares bytes with {other})"
            yield Finding(kind, f"{touch.moment}{shared} is not ordered after {earlier.moment}")
        touches[other] = []
    touches[action.target] = [touch]


def _finished(order: Order, earlier: _Touch, later: Moment) -> bool:
    """Whether an access is over at a later moment: its launch has ended, or, within one launch,
    it comes first in the program."""
    if _same_launch(earlier.moment, later):
        return earlier.moment.index < later.index
    end = order.end(earlier.moment.step, earlier.moment.rank, earlier.moment.launch.name)
    return order.before(end, later)


def _same_launch(a: Moment, b: Moment) -> bool:
    return a.launch is b.launch and a.step == b.step and a.rank == b.rank


def _fenced(writer: Moment) -> bool:
    return any(a.kind == "fence" for a in writer.launch.program[writer.index + 1 :])


def _overlaps(schedule: Schedule) -> dict[str, list[str]]:
    """object -> other objects that share bytes with it, by a sweep over each space."""
    found: dict[str, list[str]] = {}
    spaces: dict[str, list[tuple[int, int, str]]] = {}
    for item in schedule.storages:
        spaces.setdefault(item.space, []).append((item.offset, item.offset + item.bytes, item.name))
    for ranges in spaces.values():
        ranges.sort()
        active: list[tuple[int, str]] = []
        for start, stop, name in ranges:
            active = [(end, other) for end, other in active if end > start]
            for _, other in active:
                found.setdefault(name, []).append(other)
                found.setdefault(other, []).append(name)
            active.append((stop, name))
    return found


def _mailbox_uses(order: Order, proof: Proof) -> Iterator[Finding]:
    """Each poll has its publish; each publish comes after its stage was read and emptied."""
    uses: dict[tuple[str, str, int], dict[int, Moment]] = {}
    rules = {rule.name: rule for rule in order.schedule.mailboxes}
    for line in order.moments.values():
        for moment in line:
            action = moment.action
            if action is not None and action.target in rules:
                rule = rules[action.target]
                use = moment.step * rule.uses + action.use
                key = (rule.name, action.kind, moment.rank)
                if use in uses.setdefault(key, {}) and action.kind == "publish":
                    yield Finding("mailbox", f"{moment}: use {use} of {rule.name} is sent twice")
                uses[key].setdefault(use, moment)
    ranks = range(order.schedule.ranks)
    for rule in rules.values():
        for reader in ranks:
            polls = uses.get((rule.name, "poll", reader), {})
            rearms = uses.get((rule.name, "rearm", reader), {})
            for sender in ranks:
                publishes = uses.get((rule.name, "publish", sender), {})
                for use, publish in publishes.items():
                    yield from _one_use(order, proof, rule, use, publish, polls, rearms)
            for use, poll in polls.items():
                if use not in uses.get((rule.name, "publish", reader), {}):
                    yield Finding("lost value", f"{poll}: nobody publishes use {use}")


def _one_use(
    order: Order,
    proof: Proof,
    rule: MailboxRule,
    use: int,
    publish: Moment,
    polls: dict[int, Moment],
    rearms: dict[int, Moment],
) -> Iterator[Finding]:
    """One sender's publish against one reader's earlier touches of the stage."""
    before = use - rule.stages  # the use that filled the stage last
    if use not in polls:
        yield Finding("mailbox", f"{publish}: nobody reads use {use} of {rule.name}")
    if before < 0:
        return
    proof.checks += 1
    if before in polls and not _read_over(order, polls[before], publish):
        yield Finding(
            "mailbox overwrite",
            f"{publish} fills the stage that {polls[before]} may still be reading",
        )
    if rule.rearm == 0:
        return
    cleaner = use - rule.rearm % rule.stages  # whose reader empties the stage for this use
    if rule.rearm % rule.stages == 0:
        cleaner = before
    if cleaner < 0:
        return
    if cleaner not in rearms:
        yield Finding("mailbox", f"{publish}: nobody empties its stage of {rule.name} before")
        return
    rearm = rearms[cleaner]
    if not order.before(rearm, publish):
        yield Finding(
            "mailbox re-arm",
            f"{rearm} may run after {publish} has filled the stage, and wipe it: the reader then "
            "waits for ever",
        )
    if before in polls and polls[before].launch is not rearm.launch:
        end = order.end(polls[before].step, polls[before].rank, polls[before].launch.name)
        if not order.before(end, rearm):
            yield Finding("mailbox re-arm", f"{rearm} may wipe what {polls[before]} still reads")


def _read_over(order: Order, poll: Moment, later: Moment) -> bool:
    """Whether the launch that polls has finished reading: it ended, or passed a barrier behind."""
    if order.before(order.end(poll.step, poll.rank, poll.launch.name), later):
        return True
    line = order.moments[poll.step, poll.rank, poll.launch.name]
    return any(
        m.action is not None
        and m.action.kind == "barrier"
        and m.index > poll.index
        and (order.before(m, later) or _passed_with(order, m, later))
        for m in line
    )


def _passed_with(order: Order, barrier: Moment, later: Moment) -> bool:
    """Whether another rank's arrival-complete barrier of the same name lies before `later`."""
    action = barrier.action
    assert action is not None
    for rank in range(order.schedule.ranks):
        twin = order.moments.get((barrier.step, rank, barrier.launch.name))
        if twin is None:
            continue
        moment = twin[barrier.index + 1]
        if moment is later or order.before(moment, later):
            return True
    return False


def _joins(order: Order, proof: Proof) -> Iterator[Finding]:
    """Every launch of a side stream ends before some main launch does: the fork is joined."""
    main = [x for x in order.schedule.launches if x.stream == "main"]
    if not main:
        return
    last = order.end(0, 0, main[-1].name)
    for launch in order.schedule.launches:
        if launch.stream == "main":
            continue
        proof.checks += 1
        if not order.before(order.end(0, 0, launch.name), last):
            yield Finding(
                "unjoined",
                f"unjoined: {launch.name} on stream {launch.stream} has no path to the "
                "end of the step",
            )
