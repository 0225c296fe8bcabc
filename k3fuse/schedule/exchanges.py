"""Mailbox rings and barriers in the unrolled order: no stage is filled or emptied too soon.

A store is over, and visible to all, when its launch has ended or has passed a barrier behind it;
within a launch nothing orders a re-arm before a later publish for the ranks that look on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from k3fuse.schedule.finding import Finding, Proof
from k3fuse.schedule.model import MailboxRule
from k3fuse.schedule.order import Moment, Order

_Uses = dict[int, list[Moment]]


@dataclass
class _Ring:
    """What one rank does with one ring over all steps: use -> moments."""

    publish: _Uses = field(default_factory=dict[int, "list[Moment]"])
    poll: _Uses = field(default_factory=dict[int, "list[Moment]"])
    rearm: _Uses = field(default_factory=dict[int, "list[Moment]"])


def mailbox_uses(order: Order, proof: Proof) -> Iterator[Finding]:
    """Each poll has its publish; each publish comes after its stage was read and emptied."""
    for rule in order.schedule.mailboxes:
        rings = [_ring(order, rule, rank) for rank in range(order.schedule.ranks)]
        for ring in rings:
            for use, moments in ring.publish.items():
                for again in moments[1:]:
                    yield Finding("mailbox", f"{again}: use {use} of {rule.name} is sent twice")
            for use, moments in ring.poll.items():
                if use not in ring.publish:  # all ranks run the same
                    yield Finding("lost value", f"{moments[0]}: nobody publishes use {use}")
                else:
                    yield from _stale_polls(order, rule, use, ring)
        for reader in rings:
            for sender in rings:
                for use, moments in sender.publish.items():
                    yield from _one_use(order, proof, rule, use, moments[0], reader)


def _ring(order: Order, rule: MailboxRule, rank: int) -> _Ring:
    ring = _Ring()
    kinds = {"publish": ring.publish, "poll": ring.poll, "rearm": ring.rearm}
    for step in range(order.steps):
        for launch in order.schedule.launches:
            for moment in order.moments[step, rank, launch.name]:
                action = moment.action
                if action is not None and action.target == rule.name and action.kind in kinds:
                    use = step * rule.uses + action.use
                    kinds[action.kind].setdefault(use, []).append(moment)
    return ring


def _one_use(
    order: Order, proof: Proof, rule: MailboxRule, use: int, publish: Moment, reader: _Ring
) -> Iterator[Finding]:
    """One sender's publish against one reader's earlier touches of the stage."""
    if use not in reader.poll:
        yield Finding("mailbox", f"{publish}: nobody reads use {use} of {rule.name}")
    before = use - rule.stages  # the use that filled the stage last
    cleaner = _cleaner(rule, use)
    if before >= 0:
        for poll in reader.poll.get(before, []):
            proof.checks += 1
            if not _over(order, poll, publish):
                yield Finding(
                    "mailbox overwrite",
                    f"{publish} fills the stage that {poll} may still be reading",
                )
        if rule.rearm and cleaner not in reader.rearm:
            yield Finding("mailbox", f"{publish}: nobody empties its stage of {rule.name} before")
    if not rule.rearm:
        return
    for rearm in reader.rearm.get(cleaner, []):
        proof.checks += 1
        if not _over(order, rearm, publish):
            yield Finding(
                "mailbox re-arm",
                f"{rearm} may run after {publish} has filled the stage, and wipe it: the reader "
                "then waits for ever",
            )
        if before >= 0 and publish.rank == rearm.rank:
            for poll in reader.poll.get(before, []):
                yield from _read_first(order, poll, rearm)


def _cleaner(rule: MailboxRule, use: int) -> int:
    """The use whose reader empties the stage of `use` last before it is filled."""
    return use - (rule.rearm % rule.stages or rule.stages)


def _read_first(order: Order, poll: Moment, rearm: Moment) -> Iterator[Finding]:
    """A stage is emptied after it was read, by all CTAs of the launches that poll it."""
    if poll.launch is not rearm.launch or poll.step != rearm.step:
        if not order.before(order.end(poll.step, poll.rank, poll.launch.name), rearm):
            yield Finding("mailbox re-arm", f"{rearm} may wipe what {poll} still reads")
    elif rearm.index < poll.index:
        yield Finding("mailbox re-arm", f"{rearm} wipes what {poll} has yet to read")
    # A launch with a barrier behind the poll re-arms once all its CTAs have read.
    elif all(a.kind != "barrier" for a in rearm.launch.program[poll.index + 1 :]):
        yield Finding(
            "mailbox re-arm",
            f"{rearm} may wipe the stage while other CTAs of the launch still read it",
        )


def _stale_polls(order: Order, rule: MailboxRule, use: int, ring: _Ring) -> Iterator[Finding]:
    """A poll must not begin while its stage still holds the words of an earlier use."""
    if not rule.rearm or use < rule.stages:
        return
    for poll in ring.poll[use]:
        begin = order.at(poll.step, poll.rank, poll.launch.name, poll.index - 1)
        for rearm in ring.rearm.get(_cleaner(rule, use), []):
            if begin is not rearm and not order.before(rearm, begin):
                yield Finding(
                    "stale value", f"{poll} may begin before {rearm} has emptied its stage"
                )


def shared_barriers(order: Order) -> Iterator[Finding]:
    """Launches that use one barrier follow each other: its arrivals cannot be told apart."""
    named: dict[str, list[Moment]] = {}
    for launch in order.schedule.launches:
        for moment in order.moments[0, 0, launch.name]:
            action = moment.action
            if action is not None and action.kind == "barrier":
                named.setdefault(action.target, []).append(moment)
    for name, moments in named.items():
        for first, second in pairwise(moments):
            if not order.before(first, second):
                yield Finding(
                    "shared control word",
                    f"@{first.launch.name} and @{second.launch.name} may be at barrier {name} at "
                    "the same time",
                )


def _over(order: Order, moment: Moment, later: Moment) -> bool:
    """Whether a poll or re-arm is over for all: its launch ended, or passed a barrier behind it."""
    if order.before(order.end(moment.step, moment.rank, moment.launch.name), later):
        return True
    if (moment.launch is later.launch and moment.step == later.step) and (
        moment.rank == later.rank and moment.index < later.index
    ):
        return True
    line = order.moments[moment.step, moment.rank, moment.launch.name]
    return any(
        m.action is not None
        and m.action.kind == "barrier"
        and m.index > moment.index
        and _passed(order, m, later)
        for m in line
    )


def _passed(order: Order, barrier: Moment, later: Moment) -> bool:
    """Whether some rank has left this barrier, so that all have come to it, before `later`."""
    for rank in range(order.schedule.ranks):
        twin = order.at(barrier.step, rank, barrier.launch.name, barrier.index)
        if twin is later or order.before(twin, later):
            return True
    return False
