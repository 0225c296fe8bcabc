"""Rules that a launch, a mailbox or an object breaks by itself, whatever runs around it."""

from __future__ import annotations

from collections.abc import Iterator

from k3fuse.schedule.finding import Finding
from k3fuse.schedule.model import Action, MailboxRule, Schedule, ScheduledLaunch

MULTICAST = "multicast"
"""The space of mailboxes and storages that only multimem stores may write."""


def local_rules(schedule: Schedule, written: set[str]) -> Iterator[Finding]:
    """All findings; `written` names the objects whose bytes some launch of the step writes."""
    names: set[str] = set()
    spaces = {rule.name: rule.space for rule in schedule.mailboxes}
    spaces |= {storage.name: storage.space for storage in schedule.storages}
    rules = {rule.name: rule for rule in schedule.mailboxes}
    for launch in schedule.launches:
        yield from _edges(launch, names, {x.name for x in schedule.launches})
        names.add(launch.name)
        yield from _host_value(launch)
        yield from _early_reads(launch, written)
        for action in launch.program:
            yield from _flag(launch, action)
            yield from _store_class(launch, action, spaces)
            yield from _use(launch, action, rules)
    yield from _mailboxes(schedule.mailboxes)


def _edges(launch: ScheduledLaunch, before: set[str], names: set[str]) -> Iterator[Finding]:
    if launch.name in before:
        yield Finding("name", f"two launches are called @{launch.name}")
    for edge in launch.after:
        if edge.source not in names:
            yield Finding("unknown launch", f"@{launch.name} follows @{edge.source}, not there")
        elif edge.source not in before:
            yield Finding(
                "launch order",
                f"@{launch.name} follows @{edge.source}, which is launched after it: list launches "
                "in the order in which they are issued",
            )


def _host_value(launch: ScheduledLaunch) -> Iterator[Finding]:
    if launch.host_metadata:
        yield Finding(
            "host value", f"@{launch.name} reads a host value at launch: a replay would not see it"
        )


def _early_reads(launch: ScheduledLaunch, written: set[str]) -> Iterator[Finding]:
    waited = not launch.waits
    for action in launch.program:
        waited = waited or action.kind == "wait"
        static = action.access in ("weight", "host") and action.target not in written
        if action.kind == "read" and not waited and not static:
            why = " (written in this graph, so not static)" if action.access == "weight" else ""
            yield Finding(
                "read before wait", f"@{launch.name} reads {action.target} above its wait{why}"
            )


def _flag(launch: ScheduledLaunch, action: Action) -> Iterator[Finding]:
    if action.kind == "check" and action.via not in ("epoch", "counter"):
        yield Finding(
            "stale flag",
            f"@{launch.name} compares flag {action.target} with {action.via}, which repeats at "
            "replay: compare it with an epoch or counter held in memory",
        )


def _store_class(
    launch: ScheduledLaunch, action: Action, spaces: dict[str, str]
) -> Iterator[Finding]:
    if action.kind not in ("write", "publish"):
        return
    space = spaces.get(action.target, "")
    if (space == MULTICAST) != (action.via == "multimem"):
        what = "mailbox" if action.kind == "publish" else "object"
        fix = "only multimem stores reach every rank" if space == MULTICAST else "not multicast"
        yield Finding(
            "store class",
            f"@{launch.name} stores to {space} {what} {action.target} by {action.via}: {fix}",
        )


def _use(
    launch: ScheduledLaunch, action: Action, rules: dict[str, MailboxRule]
) -> Iterator[Finding]:
    if action.kind not in ("publish", "poll", "rearm"):
        return
    rule = rules.get(action.target)
    if rule is None:
        yield Finding("unknown mailbox", f"@{launch.name} uses {action.target}, not there")
    elif action.use >= rule.uses:
        yield Finding(
            "mailbox",
            f"@{launch.name}: {action.kind} of use {action.use} of {rule.name}, which has "
            f"{rule.uses} a step",
        )


def _mailboxes(rules: tuple[MailboxRule, ...]) -> Iterator[Finding]:
    control: dict[str, str] = {}
    for rule in rules:
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
