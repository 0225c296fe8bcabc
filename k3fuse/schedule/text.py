"""Schedules as text, one thing a line, to be written by hand and read back exactly.

    schedule demo {ranks=2, target="h200"}
      storage x in arena at 0 size 256
      mailbox ring {stages=3, rearm=2, uses=1}
      launch reduce on main after pdl:produce event:fetch {grid=132, spins=true}
        read weight w
        wait
        poll ring use 0
        read activation x via tma
        write activation y
        rearm ring use 0
      output y

A program is the lines below its launch. `#` starts a comment; indentation is for the reader. A file
may hold several schedules, one for each stage of a pipeline.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, cast, get_args

from k3fuse.errors import ParseError
from k3fuse.schedule.edges import Edge, parse_edge
from k3fuse.schedule.model import (
    Access,
    Action,
    ActionKind,
    MailboxRule,
    Schedule,
    ScheduledLaunch,
    Storage,
)

DEFAULT_RANKS = 2
"""All ranks run the same schedule, so two show every race between ranks."""

_ATTRS = re.compile(r"^(.*?)\s*(\{.*\})?$")
_COMMENT = re.compile(r"(^|\s)#.*$")
_MAILBOX_ACTIONS = ("publish", "poll", "rearm")
_LAUNCH_FIELDS = (
    *("grid", "cluster", "threads", "smem", "ctas_per_sm", "smem_parts"),
    *("spins", "host_metadata"),
)
_MAILBOX_FIELDS = tuple(f.name for f in dataclasses.fields(MailboxRule) if f.name != "name")
_AT_LEAST = {"stages": 1, "uses": 1, "cluster": 1, "threads": 1, "ctas_per_sm": 1, "ranks": 1}


def print_schedule(schedule: Schedule) -> str:
    """The whole schedule; what has its default value is left out."""
    head: dict[str, object] = {"ranks": schedule.ranks}
    if schedule.target:
        head["target"] = schedule.target
    lines = [f"schedule {schedule.name}{_attrs(head)}"]
    lines += [
        f"  storage {s.name} in {s.space} at {s.offset} size {s.bytes}" for s in schedule.storages
    ]
    lines += [f"  mailbox {r.name}{_fields(r, _MAILBOX_FIELDS)}" for r in schedule.mailboxes]
    for launch in schedule.launches:
        after = f" after {' '.join(map(str, launch.after))}" if launch.after else ""
        resources = _fields(launch, _LAUNCH_FIELDS)
        lines.append(f"  launch {launch.name} on {launch.stream}{after}{resources}")
        lines += [f"    {_action(action)}" for action in launch.program]
    lines += [f"  output {name}" for name in schedule.outputs]
    return "\n".join(lines) + "\n"


def _fields(item: MailboxRule | ScheduledLaunch, names: tuple[str, ...]) -> str:
    defaults = {f.name: f.default for f in dataclasses.fields(item)}
    values = {name: getattr(item, name) for name in names if getattr(item, name) != defaults[name]}
    if "smem_parts" in values:
        values["smem_parts"] = dict(values["smem_parts"])
    return _attrs(values)


def _attrs(values: Mapping[str, object]) -> str:
    inside = ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    return f" {{{inside}}}" if inside else ""


def _action(action: Action) -> str:
    words: list[str] = [action.kind]
    if action.kind in ("read", "write"):
        words.append(action.access)
    if action.target:
        words.append(action.target)
    if action.use or action.kind in _MAILBOX_ACTIONS:
        words += ["use", str(action.use)]
    if action.kind == "check":
        words += ["against", action.via]
    elif action.via != "generic":
        words += ["via", action.via]
    return " ".join(words)


def parse_schedule(text: str, where: str = "text") -> Schedule:
    """Read one schedule; ParseError names `where` and the line."""
    found = parse_schedules(text, where)
    if len(found) != 1:
        raise ParseError(f"{where}: {len(found)} schedules where one is expected")
    return found[0]


def parse_schedules(text: str, where: str = "text") -> list[Schedule]:
    """Read all schedules of a file; ParseError names `where` and the line."""
    parser = _Parser(where)
    for number, raw in enumerate(text.split("\n"), start=1):
        parser.number = number
        line = _COMMENT.sub("", raw).strip()
        if line:
            parser.line(line)
    if not parser.schedules:
        raise ParseError(f"{where}: no 'schedule NAME' line")
    return [draft.finish() for draft in parser.schedules]


@dataclasses.dataclass
class _Draft:
    """A schedule while its lines are read."""

    name: str
    ranks: int
    target: str
    launches: list[ScheduledLaunch] = dataclasses.field(default_factory=list[ScheduledLaunch])
    storages: list[Storage] = dataclasses.field(default_factory=list[Storage])
    mailboxes: list[MailboxRule] = dataclasses.field(default_factory=list[MailboxRule])
    outputs: list[str] = dataclasses.field(default_factory=list[str])
    program: list[Action] = dataclasses.field(default_factory=list[Action])
    names: set[tuple[str, str]] = dataclasses.field(default_factory=set[tuple[str, str]])

    def close_launch(self) -> None:
        """Give the launch whose lines have been read its program."""
        if self.program:
            program = tuple(self.program)
            self.launches[-1] = dataclasses.replace(self.launches[-1], program=program)
            self.program = []

    def finish(self) -> Schedule:
        self.close_launch()
        return Schedule(
            self.name,
            self.target,
            self.ranks,
            tuple(self.launches),
            tuple(self.storages),
            tuple(self.mailboxes),
            tuple(self.outputs),
        )


class _Parser:
    def __init__(self, where: str) -> None:
        self.where = where
        self.number = 0
        self.schedules: list[_Draft] = []

    def fail(self, message: str) -> NoReturn:
        raise ParseError(f"{self.where}, line {self.number}: {message}")

    def line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "schedule":
            self._schedule(rest)
            return
        if not self.schedules:
            self.fail(f"expected 'schedule NAME {{ranks=2}}', found '{line[:60]}'")
        draft = self.schedules[-1]
        if word in get_args(ActionKind):
            if not draft.launches:
                self.fail(f"'{line[:60]}' stands before any launch")
            draft.program.append(self._action(word, rest.split()))
            return
        draft.close_launch()
        if word == "storage":
            self._storage(draft, rest)
        elif word == "mailbox":
            self._mailbox(draft, rest)
        elif word == "launch":
            self._launch(draft, rest)
        elif word == "output" and rest and " " not in rest:
            draft.outputs.append(rest)
        else:
            self.fail(
                f"'{line[:60]}' is none of schedule, storage, mailbox, launch, output and the "
                f"actions {', '.join(get_args(ActionKind))}"
            )

    def _schedule(self, rest: str) -> None:
        name, values = self._split(rest, {"ranks": int, "target": str})
        if not name or " " in name:
            self.fail("expected 'schedule NAME {ranks=2, target=\"h200\"}'")
        ranks = cast(int, values.get("ranks", DEFAULT_RANKS))
        self.schedules.append(_Draft(name, ranks, cast(str, values.get("target", ""))))

    def _storage(self, draft: _Draft, rest: str) -> None:
        match = re.fullmatch(r"(\S+) in (\S+) at (\d+) size (\d+)", rest)
        if match is None:
            self.fail("expected 'storage NAME in SPACE at OFFSET size BYTES'")
        self._new(draft, "storage", match[1])
        draft.storages.append(Storage(match[1], match[2], int(match[3]), int(match[4])))

    def _mailbox(self, draft: _Draft, rest: str) -> None:
        kinds = _types(_ANY_RULE, _MAILBOX_FIELDS)
        name, values = self._split(rest, kinds)
        missing = [field for field in ("stages", "rearm", "uses") if field not in values]
        if not name or " " in name or missing:
            self.fail("expected 'mailbox NAME {stages=3, rearm=2, uses=1}'")
        self._new(draft, "mailbox", name)
        draft.mailboxes.append(MailboxRule(name=name, **cast(Any, values)))

    def _launch(self, draft: _Draft, rest: str) -> None:
        kinds = _types(_ANY_LAUNCH, _LAUNCH_FIELDS) | {"smem_parts": dict}
        head, values = self._split(rest, kinds)
        match = re.fullmatch(r"(\S+) on (\S+)(?: after (\S.*))?", head)
        if match is None:
            self.fail("expected 'launch NAME on STREAM after pdl:NAME event:NAME {grid=132}'")
        self._new(draft, "launch", match[1])
        if "smem_parts" in values:
            values["smem_parts"] = self._parts(cast("dict[str, object]", values["smem_parts"]))
        after = tuple(self._edge(word) for word in (match[3] or "").split())
        draft.launches.append(ScheduledLaunch(match[1], match[2], after, (), **cast(Any, values)))

    def _edge(self, word: str) -> Edge:
        try:
            return parse_edge(word)
        except ParseError as error:
            self.fail(str(error))

    def _parts(self, parts: dict[str, object]) -> tuple[tuple[str, int], ...]:
        for name, size in parts.items():
            if type(size) is not int or size < 0:
                self.fail(f"smem_parts: {name} is no number of bytes")
        return tuple(cast("dict[str, int]", parts).items())

    def _new(self, draft: _Draft, kind: str, name: str) -> None:
        if (kind, name) in draft.names:
            self.fail(f"{kind} {name} is there twice")
        draft.names.add((kind, name))

    def _action(self, kind: str, words: list[str]) -> Action:
        access = "mailbox" if kind in _MAILBOX_ACTIONS else "activation"
        if kind in ("read", "write") and len(words) > 1 and words[0] in get_args(Access):
            access = words.pop(0)
        keywords = ("use", "against" if kind == "check" else "via")
        target = words.pop(0) if len(words) % 2 else ""
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        known = set(pairs) <= set(keywords) and len(pairs) == len(words) // 2
        needs_target = kind in ("read", "write", "check", *_MAILBOX_ACTIONS)
        if not known or (needs_target and not target):
            self.fail(f"not an action: expected '{_EXPECTED.get(kind, f'{kind} [NAME]')}'")
        use = pairs.get("use", "0")
        if not use.isdecimal():
            self.fail(f"use {use}: expected a number from 0")
        via = pairs.get(keywords[1], "generic")
        return Action(cast(ActionKind, kind), target, cast(Access, access), int(use), via)

    def _split(self, rest: str, kinds: Mapping[str, type]) -> tuple[str, dict[str, object]]:
        """What stands before the attributes, and the attributes with their types checked."""
        match = _ATTRS.match(rest)
        assert match is not None
        values: dict[str, object] = {}
        inside, decoder = (match[2] or "{}")[1:-1].strip(), json.JSONDecoder()
        while inside:
            key, equals, inside = inside.partition("=")
            key = key.strip()
            try:
                value, end = decoder.raw_decode(inside)
            except json.JSONDecodeError:
                self.fail(
                    f"'{key}' has no JSON value" if equals else f"'{key}': expected NAME=VALUE"
                )
            if key not in kinds:
                self.fail(f"unknown '{key}': known here are {', '.join(kinds)}")
            self._check(key, cast(object, value), kinds[key])
            if key in values:
                self.fail(f"'{key}' is there twice")
            values[key] = value
            inside = inside[end:].lstrip(", ")
        return match[1], values

    def _check(self, key: str, value: object, kind: type) -> None:
        if type(value) is not kind:
            wanted = {int: "a number", bool: "true or false", str: "a string", dict: "an object"}
            self.fail(f"{key}={json.dumps(value)}: expected {wanted.get(kind, kind.__name__)}")
        if isinstance(value, int) and value < _AT_LEAST.get(key, 0):
            self.fail(f"{key}={value}: expected at least {_AT_LEAST.get(key, 0)}")


def _types(item: object, names: tuple[str, ...]) -> dict[str, type]:
    return {name: type(cast(object, getattr(item, name))) for name in names}


_ANY_RULE = MailboxRule("", 1, 0, 1)
_ANY_LAUNCH = ScheduledLaunch("", "", (), ())
_EXPECTED = {
    "read": "read ACCESS NAME [via tma]",
    "write": "write ACCESS NAME [via multimem]",
    "check": "check NAME against epoch",
    **{kind: f"{kind} MAILBOX use 0 [via multimem]" for kind in _MAILBOX_ACTIONS},
}
