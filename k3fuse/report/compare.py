"""How two graphs, plans or bundles differ: as text lines and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from k3fuse.errors import InputError
from k3fuse.ir import parse_graph, print_graph
from k3fuse.passes.instruments import diff_lines
from k3fuse.report.units import human_bytes
from k3fuse.runtime.bundle import Bundle, read_bundle
from k3fuse.runtime.plan import Launch, Plan, read_plan

Kind = Literal["ir", "plan", "bundle"]

_TOTALS = ("launches", "planned_bytes", "stock_bytes", "predicted_us", "memory")


@dataclass(frozen=True)
class PlanDifference:
    """What differs between two plans. changed: launch -> field -> (before, after).

    totals: name -> (before, after), for those that differ.
    """

    equal: bool
    added: list[str]
    removed: list[str]
    changed: dict[str, dict[str, tuple[object, object]]]
    totals: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Comparison:
    """The outcome. lines: what a person reads, empty when equal. options: name -> (A, B).

    plans: bucket -> difference; a bucket that only one side has is in `only`, under "a" or "b".
    """

    kind: Kind
    equal: bool
    lines: list[str]
    options: dict[str, tuple[object, object]] = field(
        default_factory=dict[str, "tuple[object, object]"]
    )
    plans: dict[str, PlanDifference] = field(default_factory=dict[str, PlanDifference])
    only: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


def compare(a: Path, b: Path) -> Comparison:
    """Compare two files or directories of one kind.

    A directory is a bundle, a file that starts with `{` a plan, any other file IR text. Raises
    InputError for what cannot be read, is not what it looks like, or is of two kinds.
    """
    kinds = _kind(a), _kind(b)
    if kinds[0] != kinds[1]:
        raise InputError(
            f"{a} is {_ARTICLE[kinds[0]]} and {b} is {_ARTICLE[kinds[1]]}: compare two of a kind"
        )
    if kinds[0] == "bundle":
        return _compare_bundles(read_bundle(a), read_bundle(b))
    before, after = _read(a), _read(b)
    if kinds[0] == "ir":
        old, new = print_graph(parse_graph(before, str(a))), print_graph(parse_graph(after, str(b)))
        lines = diff_lines(old, new, str(a), str(b))
        return Comparison("ir", not lines, lines)
    plans = read_plan(before, str(a)), read_plan(after, str(b))
    lines = diff_lines(plans[0].to_json(), plans[1].to_json(), str(a), str(b))
    return Comparison("plan", not lines, lines, plans={"plan": compare_plans(*plans)})


_ARTICLE: Mapping[Kind, str] = {"ir": "IR text", "plan": "a plan", "bundle": "a bundle"}


def compare_plans(a: Plan, b: Plan) -> PlanDifference:
    """Launches by name, then totals; `equal` is about the whole text of the plans."""
    before = {launch.name: launch for launch in a.launches}
    after = {launch.name: launch for launch in b.launches}
    common = [name for name in before if name in after]
    changed = {name: _fields(before[name], after[name]) for name in common}
    totals = {
        name: (x, y) for name, x, y in zip(_TOTALS, _totals(a), _totals(b), strict=True) if x != y
    }
    return PlanDifference(
        equal=a == b,
        added=[name for name in after if name not in before],
        removed=[name for name in before if name not in after],
        changed={name: fields for name, fields in changed.items() if fields},
        totals=totals,
    )


def _fields(a: Launch, b: Launch) -> dict[str, tuple[object, object]]:
    pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Launch))
    return {name: (x, y) for name, x, y in pairs if x != y}


def _totals(plan: Plan) -> tuple[float, ...]:
    return (
        len(plan.launches),
        plan.planned_bytes,
        plan.stock_bytes,
        plan.predicted_us,
        plan.memory.total,
    )


def _compare_bundles(a: Bundle, b: Bundle) -> Comparison:
    options = _option_differences(a, b)
    names = {x.name: x for x in a.buckets}, {x.name: x for x in b.buckets}
    only = {
        "a": [name for name in names[0] if name not in names[1]],
        "b": [name for name in names[1] if name not in names[0]],
    }
    plans = {
        name: compare_plans(a.plan(names[0][name]), b.plan(names[1][name]))
        for name in names[0]
        if name in names[1]
    }
    plans = {name: difference for name, difference in plans.items() if not difference.equal}
    files = _changed_files(a.manifest.files, b.manifest.files)
    lines = [f"option {name}: {x!r} -> {y!r}" for name, (x, y) in options.items()]
    for side, label in (("a", a.directory), ("b", b.directory)):
        lines += [f"bucket {name}: only in {label}" for name in only[side]]
    for name, difference in plans.items():
        lines += _plan_lines(name, difference)
    if not lines:  # the plans are the same, and yet
        lines = [f"file {name}: differs" for name in files]
        if a.manifest.cache_key != b.manifest.cache_key:
            lines.append("cache key: differs, so configuration, target data or pipeline do")
    return Comparison("bundle", not lines, lines, options, plans, only)


def _option_differences(a: Bundle, b: Bundle) -> dict[str, tuple[object, object]]:
    sides: list[dict[str, object]] = []
    for manifest in (a.manifest, b.manifest):
        checkpoint = manifest.checkpoint.fingerprint if manifest.checkpoint else None
        sides.append(
            {
                **manifest.options,
                "k3fuse": manifest.k3fuse,
                "model": manifest.model,
                "target": manifest.target,
                "tp": manifest.tp,
                "dtype": manifest.dtype,
                "checkpoint": checkpoint,
            }
        )
    names = dict.fromkeys([*sides[0], *sides[1]])
    pairs = {name: (sides[0].get(name), sides[1].get(name)) for name in names}
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y}


def _changed_files(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def _plan_lines(bucket: str, difference: PlanDifference) -> list[str]:
    lines = [f"bucket {bucket}:"]
    for name, (x, y) in difference.totals.items():
        lines.append(f"  {name}: {_amount(name, x)} -> {_amount(name, y)}")
    lines += [f"  - {name}" for name in difference.removed]
    lines += [f"  + {name}" for name in difference.added]
    for name, fields in difference.changed.items():
        lines.append(f"  ~ {name}: {', '.join(_field(*item) for item in fields.items())}")
    if len(lines) == 1:
        lines.append("  the launches are the same, buffers or storage differ")
    return lines


def _amount(name: str, value: float) -> str:
    if name == "launches":
        return f"{value:.0f}"
    return f"{value:.1f} us" if name == "predicted_us" else human_bytes(value)


def _field(name: str, pair: tuple[object, object]) -> str:
    """Short values in full; of operands only that they differ."""
    if name == "operands":
        return name
    x, y = map(_short, pair)
    return f"{name} {x} -> {y}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return " ".join(map(str, cast("tuple[object, ...]", value))) or "none"
    return str(value)


def _kind(path: Path) -> Kind:
    if path.is_dir():
        return "bundle"
    return "plan" if _read(path).lstrip().startswith("{") else "ir"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text: give IR text, plan.json or a bundle") from None
