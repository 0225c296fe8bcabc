"""Do all ranks hold the same schedule? Ranks that spin on different grids wait for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

from k3fuse.errors import InputError
from k3fuse.runtime.plan import Plan
from k3fuse.schedule.finding import Finding
from k3fuse.schedule.model import Schedule

_KEYS = ("name", "value")  # the field that names an entry of a list
_LONGEST = 60  # characters of a value in a message


def compare_ranks(ranks: Sequence[Schedule] | Sequence[Plan]) -> list[Finding]:
    """Every difference between rank 0 and each other rank: "launch X grid 32 vs 16".

    Empty means that they agree. Raises InputError when schedules and plans are mixed.
    """
    if len({type(item) for item in ranks}) > 1:
        raise InputError("compare_ranks: all ranks must give a schedule, or all a plan")
    return [
        Finding("plan differs", f"{text} (ranks 0 and {rank})")
        for rank, item in enumerate(ranks)
        if rank > 0
        for text in _record("", ranks[0], item)
    ]


def _record(label: str, first: Any, second: Any) -> Iterator[str]:
    """Differences of two records of one type, field by field."""
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if a == b:
            continue
        named = _named(a), _named(b)
        if named[0] is not None and named[1] is not None:
            prefix = f"{label} " if label else ""
            yield from _lists(f"{prefix}{_singular(field.name)}", named[0], named[1])
        else:
            yield f"{label} {field.name} {_short(a)} vs {_short(b)}".strip()


def _lists(kind: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    for name in [*first, *(n for n in second if n not in first)]:
        if name not in second or name not in first:
            yield f"{kind} {name} on one rank only"
    both = [name for name in first if name in second]
    for name in both:
        yield from _record(f"{kind} {name}", first[name], second[name])
    if both != [name for name in second if name in first]:
        yield f"{kind} order"


def _named(value: object) -> dict[str, Any] | None:
    """A list of records by name; None if it is not one."""
    if not isinstance(value, tuple):
        return None
    found: dict[str, Any] = {}
    for item in cast("tuple[object, ...]", value):
        key = next((k for k in _KEYS if hasattr(item, k)), None)
        if key is None or not dataclasses.is_dataclass(item):
            return None
        found[str(getattr(item, key))] = item
    return found if len(found) == len(cast("tuple[object, ...]", value)) else None


def _singular(field: str) -> str:
    return {"launches": "launch", "mailboxes": "mailbox", "arena": "buffer"}.get(
        field, field.removesuffix("s")
    )


def _short(value: object) -> str:
    if isinstance(value, tuple):
        value = "(" + ", ".join(map(str, cast("tuple[object, ...]", value))) + ")"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
