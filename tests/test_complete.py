"""Nothing is left out: every pass, op and command has its place, its words and its test."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from typer.main import get_command

from k3fuse import passes
from k3fuse.cli import app
from k3fuse.ir import all_ops, op_named
from k3fuse.passes.base import Pass
from k3fuse.passes.pipeline import PIPELINE
from k3fuse.runtime import bundle, plan

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"

COMMANDS: dict[str, object] = dict(getattr(get_command(app), "commands"))  # noqa: B009
MODULES = sorted(item.name for item in pkgutil.iter_modules(passes.__path__))
# Files under passes/ that hold no pass: the frame that passes are written in, and who runs them.
FRAME = {"base", "instruments", "manager", "numeric_check", "pipeline"}


def passes_in(module: str) -> list[type[Pass]]:
    loaded = importlib.import_module(f"k3fuse.passes.{module}")
    classes = [c for _, c in inspect.getmembers(loaded, inspect.isclass)]
    return [c for c in classes if issubclass(c, Pass) and c.__module__ == loaded.__name__]


def test_every_pass_file_holds_a_pass() -> None:
    without = {module for module in MODULES if not [c for c in passes_in(module) if c is not Pass]}
    assert without == FRAME


@pytest.mark.parametrize("module", [m for m in MODULES if m not in FRAME])
def test_every_pass_is_in_the_pipeline_once(module: str) -> None:
    for found in passes_in(module):
        assert sum(type(item) is found for item in PIPELINE) == 1, found.__name__


@pytest.mark.parametrize("item", PIPELINE, ids=lambda item: item.name)
def test_every_pass_has_one_stem_words_and_golden_text(item: Pass) -> None:
    found = type(item)
    assert re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", found.__name__).lower() == item.name
    doc = found.__doc__ or ""
    for part in ("Before", "After", "Order:"):
        assert part in doc, f"{item.name}: no {part} in its docstring"
    for side in ("before", "after"):
        assert (TESTS / f"golden/passes/{item.name}.{side}.ir").exists()


@pytest.mark.parametrize("op", sorted(all_ops()))
def test_every_op_has_words_and_is_in_a_test(op: str) -> None:
    assert op_named(op).doc
    if op in {"kda_verify", "kda_commit"}:  # their type rules run in the whole-model tests
        texts = "".join(path.read_text() for path in (TESTS / "passes").glob("*.py"))
        assert "trace_commit" in texts
        return
    assert f'("{op}",' in (TESTS / "ir/test_op_rules.py").read_text()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_documented(command: str) -> None:
    text = (ROOT / "docs/cli.md").read_text()
    assert re.search(rf"^## {command}$", text, re.MULTILINE), f"docs/cli.md: no '## {command}'"
    called = re.search(rf"^(\$ )?k3fuse {command} ", text, re.MULTILINE)
    assert called or command == "doctor"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_flag_is_documented(command: str) -> None:
    text = (ROOT / "docs/cli.md").read_text()
    section = re.split(r"^## ", text.split(f"## {command}\n", 1)[1], flags=re.MULTILINE)[0]
    flags = {
        option
        for parameter in getattr(COMMANDS[command], "params")  # noqa: B009
        for option in parameter.opts
        if option.startswith("--") and option not in {"--help", "--json"}
    }
    missing = sorted(flag for flag in flags if f"`{flag}" not in section)
    assert not missing, f"docs/cli.md, {command}: {missing}"


RECORDS: list[type] = [
    plan.Plan,
    plan.Launch,
    plan.Operand,
    plan.Buffer,
    plan.Mailbox,
    plan.State,
    plan.Weight,
    plan.Memory,
    bundle.Manifest,
    bundle.BucketEntry,
    bundle.PassRecord,
    bundle.RefusalRecord,
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_bundle_is_documented(record: type) -> None:
    text = (ROOT / "docs/bundle.md").read_text()
    missing = [f.name for f in dataclasses.fields(record) if f"`{f.name}`" not in text]
    assert not missing, f"docs/bundle.md: {record.__name__}: {missing}"
