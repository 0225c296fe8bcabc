"""The proof that a schedule has no race: every access is ordered after those it depends on.

Linear sweeps over the unrolled order; no pair of launches is compared unless they touch the same
bytes. A check that cannot be completed is reported as not proven, never skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from k3fuse.schedule.exchanges import mailbox_uses, shared_barriers
from k3fuse.schedule.finding import Finding as Finding
from k3fuse.schedule.finding import Proof as Proof
from k3fuse.schedule.local_rules import local_rules
from k3fuse.schedule.model import Schedule
from k3fuse.schedule.order import Deadlock, Moment, Order, unroll
from k3fuse.schedule.protocol import check_mailboxes
from k3fuse.schedule.residency import prove_residency

MAX_MOMENTS = 400_000
"""Unrolled moments that a proof takes on; beyond it the answer is "not proven". What is known at
each is a bit set, so memory grows with the square: 0.4 GB for 110,000 moments."""

ASSUMPTIONS = (
    "a replay starts when the one before has completed on its rank",
    "all ranks run this schedule",
    "each kernel does what its program says, in that order",
)
"""What every proof of a schedule rests on."""


def prove(schedule: Schedule, *, limit: int = MAX_MOMENTS) -> Proof:
    """All that a schedule by itself can show: order, mailbox protocols, co-residency.

    Raises InputError when the schedule names a target that is not known.
    """
    proof = prove_order(schedule, limit=limit)
    begin = time.perf_counter()
    _explore_mailboxes(schedule, proof)
    residency = prove_residency(schedule)
    proof.findings += residency.findings
    proof.not_proven += residency.not_proven
    proof.no_resources += residency.no_resources
    proof.assumptions += [*ASSUMPTIONS, *residency.assumptions]
    if residency.checked and not residency.findings:
        proof.proved_facts.append(
            f"{residency.checked} launches fit {schedule.target}, alone and beside what may run "
            "with them"
        )
    proof.seconds += time.perf_counter() - begin
    return proof


def _explore_mailboxes(schedule: Schedule, proof: Proof) -> None:
    """Every interleaving of each mailbox protocol by itself, on two and three ranks."""
    if proof.findings or not schedule.mailboxes:
        return
    results = check_mailboxes(schedule)
    for result in results:
        if result.verdict == "REJECT":
            proof.findings.append(Finding(result.kind, str(result)))
        elif result.verdict != "ACCEPT":
            proof.not_proven.append(str(result))
    if results and proof.proved:
        states = sum(result.states for result in results)
        proof.proved_facts.append(
            f"{len(results)} mailbox protocols explored on 2 and 3 ranks, {states} states: no "
            "deadlock, no lost, stale or overwritten value"
        )


def prove_order(schedule: Schedule, *, limit: int = MAX_MOMENTS) -> Proof:
    """Prove data and mailbox accesses ordered over replays and ranks, or say what is not."""
    begin = time.perf_counter()
    proof = Proof(schedule.name)
    proof.findings += local_rules(schedule, _written(schedule))
    steps = _steps(schedule)
    size = steps * schedule.ranks * sum(len(x.program) + 2 for x in schedule.launches)
    if size > limit:
        proof.not_proven.append(
            f"the schedule unrolls to {size} moments over {steps} replays and {schedule.ranks} "
            f"rank{'s' * (schedule.ranks > 1)}, the limit is {limit}"
        )
        return proof
    if not proof.findings:
        try:
            order = unroll(schedule, steps)
        except Deadlock as deadlock:
            proof.findings.append(Finding("deadlock", f"each waits for the next: {deadlock}"))
        else:
            proof.moments = sum(len(line) for line in order.moments.values())
            for check in (_data_accesses, mailbox_uses, _joins):
                proof.findings += check(order, proof)
            proof.findings += shared_barriers(order)
            if not proof.findings:
                proof.proved_facts += _facts(order, proof)
    proof.seconds = time.perf_counter() - begin
    return proof


def _steps(schedule: Schedule) -> int:
    """Replays that show every reuse: a whole turn of the ring with the fewest uses, at least 2."""
    turns = [-(-rule.stages // max(rule.uses, 1)) for rule in schedule.mailboxes]
    return max([2, *(1 + turn for turn in turns)])


def _facts(order: Order, proof: Proof) -> Iterator[str]:
    schedule = order.schedule
    yield (
        f"{proof.checks} pairs of accesses are ordered, over {order.steps} replays and "
        f"{schedule.ranks} rank{'s' * (schedule.ranks > 1)}; nothing waits for itself"
    )
    if schedule.mailboxes:
        yield f"no stage of {len(schedule.mailboxes)} mailboxes is filled or emptied too soon"
    streams = {launch.stream for launch in schedule.launches} - {"main"}
    if streams:
        yield f"side streams are joined: {', '.join(sorted(streams))}"


def _written(schedule: Schedule) -> set[str]:
    """Objects whose bytes some launch of the step writes, under their own name or another."""
    names = {a.target for x in schedule.launches for a in x.program if a.kind == "write"}
    overlaps = _overlaps(schedule)
    return names.union(*(overlaps.get(name, []) for name in names))


def _data_accesses(order: Order, proof: Proof) -> Iterator[Finding]:
    """Reads after their writers, overwrites after all earlier accesses of the same bytes."""
    for rank in range(order.schedule.ranks):
        yield from _sweep(order, rank, proof)


@dataclass
class _Touch:
    """One access; `clobber` is a later write of another object to the same bytes."""

    moment: Moment
    writes: bool
    via: str
    clobber: Moment | None = None


@dataclass
class _Memory:
    """What has happened to the bytes of one rank so far: who touched an object since it was last
    written, who wrote it, and which other object's write has taken the bytes of one never written.
    """

    overlaps: dict[str, list[str]]
    touches: dict[str, list[_Touch]] = field(default_factory=dict[str, "list[_Touch]"])
    writers: dict[str, _Touch] = field(default_factory=dict[str, _Touch])
    taken: dict[str, Moment] = field(default_factory=dict[str, Moment])


def _sweep(order: Order, rank: int, proof: Proof) -> Iterator[Finding]:
    memory = _Memory(_overlaps(order.schedule))
    written = _written(order.schedule)
    for step in range(order.steps):
        for launch in order.schedule.launches:
            for index, action in enumerate(launch.program):
                if action.kind not in ("read", "write") or action.access == "mailbox":
                    continue
                if action.target not in written:  # weights and step inputs
                    if action.access == "activation":
                        yield Finding(
                            "nothing written",
                            f"@{launch.name} reads {action.target}, which no launch writes",
                        )
                    continue
                here = order.at(step, rank, launch.name, index)
                touch = _Touch(here, action.kind == "write", action.via)
                if action.kind == "read":
                    yield from _read(order, proof, touch, memory)
                else:
                    yield from _write(order, proof, touch, memory)
        for name in order.schedule.outputs:
            writer = memory.writers.get(name)
            if writer is not None and writer.clobber is not None:
                yield Finding("overwritten", f"output {name}: {writer.clobber} has taken its bytes")


def _read(order: Order, proof: Proof, touch: _Touch, memory: _Memory) -> Iterator[Finding]:
    action = touch.moment.action
    assert action is not None
    memory.touches.setdefault(action.target, []).append(touch)
    writer = memory.writers.get(action.target)
    if writer is None:
        if action.target in memory.taken:
            yield _taken(touch.moment, memory.taken[action.target])
        elif action.access == "activation":
            yield Finding("nothing written", f"{touch.moment}: nothing has written it before")
        return
    stale = writer.moment.step != touch.moment.step and action.access == "activation"
    if stale:
        yield Finding("stale data", f"{touch.moment} would read what {writer.moment} left")
        return
    proof.checks += 1
    if writer.clobber is not None:
        yield _taken(touch.moment, writer.clobber)
    if not _finished(order, writer, touch.moment):
        reader = touch.moment.launch
        pdl = any(edge.kind == "pdl" for edge in reader.after) and not reader.waits
        hint = f" (@{reader.name} never waits)" if pdl else ""
        yield Finding(
            "read after write", f"{touch.moment} is not ordered after {writer.moment}{hint}"
        )
    if action.via == "tma" and writer.via == "generic" and not _visible(order, writer, touch):
        yield Finding(
            "proxy fence",
            f"{touch.moment} reads by bulk copy what {writer.moment} stored without a proxy fence",
        )


def _taken(read: Moment, clobber: Moment) -> Finding:
    return Finding("overwritten", f"{read}: {clobber} has taken its bytes in between")


def _write(order: Order, proof: Proof, touch: _Touch, memory: _Memory) -> Iterator[Finding]:
    action = touch.moment.action
    assert action is not None
    overlaps = memory.overlaps.get(action.target, [])
    for other in [action.target, *overlaps]:
        for earlier in memory.touches.get(other, []):
            proof.checks += 1
            same_launch = _same_launch(earlier.moment, touch.moment)
            ordered = _finished(order, earlier, touch.moment)
            if ordered and (other == action.target or not same_launch):
                continue
            kind = "write after write" if earlier.writes else "write after read"
            shared = "" if other == action.target else f" (shares bytes with {other})"
            yield Finding(kind, f"{touch.moment}{shared} is not ordered after {earlier.moment}")
        memory.touches[other] = []
    memory.touches[action.target] = [touch]
    memory.writers[action.target] = touch
    for other in overlaps:
        if other in memory.writers:
            memory.writers[other].clobber = touch.moment
        else:
            memory.taken[other] = touch.moment


def _finished(order: Order, earlier: _Touch, later: Moment) -> bool:
    """Whether an access is over at a later moment: its launch has ended, or, within one launch,
    it comes first in the program."""
    if _same_launch(earlier.moment, later):
        return earlier.moment.index < later.index
    end = order.end(earlier.moment.step, earlier.moment.rank, earlier.moment.launch.name)
    return order.before(end, later)


def _same_launch(a: Moment, b: Moment) -> bool:
    return a.launch is b.launch and a.step == b.step and a.rank == b.rank


def _visible(order: Order, writer: _Touch, reader: _Touch) -> bool:
    """Whether generic stores are visible to bulk copies: by a fence behind them, or because a full
    launch boundary lies between."""
    stored, read = writer.moment, reader.moment
    if any(a.kind == "fence" for a in stored.launch.program[stored.index + 1 :]):
        return True
    if stored.step != read.step:
        return True
    end = order.end(stored.step, stored.rank, stored.launch.name)
    before = [
        order.end(read.step, read.rank, e.source) for e in read.launch.after if e.kind != "pdl"
    ]
    return any(source is end or order.before(end, source) for source in before)


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


def _joins(order: Order, proof: Proof) -> Iterator[Finding]:
    """Every launch of a side stream ends before the last main launch does: the fork is joined."""
    main = [x for x in order.schedule.launches if x.stream == "main"]
    for launch in order.schedule.launches:
        if launch.stream == "main":
            continue
        proof.checks += 1
        end = order.end(0, 0, launch.name)
        if not main or not order.before(end, order.end(0, 0, main[-1].name)):
            yield Finding(
                "unjoined",
                f"{launch.name} on stream {launch.stream} has no path to the end of the step",
            )
