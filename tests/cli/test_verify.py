"""`k3fuse verify` believes no text: what was edited, with hashes to match, is found and named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3fuse.passes.pipeline import PIPELINE
from tests.cli.command import call, call_ok
from tests.cli.conftest import Compiled

EPS = re.compile(r"( rms_norm\(.*\{eps=)[^}]*")


def rewrite(bundle: Path, name: str, edit: Callable[[str], str]) -> None:
    """Change a file of a bundle and everything that vouches for it."""
    path, manifest_path = bundle / name, bundle / "manifest.json"
    text = edit(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    manifest = json.loads(manifest_path.read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"][name] = digest
    for bucket in manifest["buckets"]:
        if bucket["plan"] == name:
            bucket["plan_hash"] = digest
    manifest_path.write_text(json.dumps(manifest))


def other_eps(text: str) -> str:
    return EPS.sub(r"\g<1>0.1", text, count=1)


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small, tmp_path / "copy")
    return tmp_path / "copy"


def test_all_buckets(compiled: Compiled) -> None:
    data = call_ok("verify", compiled.bundle, "--json").data
    assert data["ok"] is True
    assert data["problems"] == []
    rows = data["passes"]
    buckets = ["step_b2_q1", "step_b2_q8", "commit_b2_q8"]
    names = [item.name for item in PIPELINE]
    assert [(row["bucket"], row["name"]) for row in rows] == [
        (bucket, name) for bucket in buckets for name in names
    ]
    assert all(row["ok"] and row["max_rel_err"] <= row["tolerance"] for row in rows)


def test_table(small: Path) -> None:
    assert "shard-stock" in call_ok("verify", small).out


def problem(bundle: Path) -> str:
    """What verify says of a bad bundle, which is the same with --json."""
    outcome = call("verify", bundle, "--json")
    assert outcome.code == 1, outcome
    assert outcome.data["ok"] is False
    (text,) = outcome.data["problems"]
    assert " ".join(text.split()) in " ".join(outcome.err.split())
    return text


@pytest.mark.parametrize("name", ["shard-stock", "fuse-comm", "insert-pdl"])
def test_a_dump_that_means_something_else(copy: Path, name: str) -> None:
    dump = next((copy / "dumps" / "step_b1_q1").glob(f"*_{name}.ir"))
    rewrite(copy, str(dump.relative_to(copy)), other_eps)
    assert f"after {name} outputs differ" in problem(copy)


def test_a_trace_that_is_not_of_the_model(copy: Path) -> None:
    rewrite(copy, "dumps/step_b1_q1/000_trace.ir", other_eps)
    assert "dump 000_trace is not what tracing the model gives" in problem(copy)


def test_a_dump_that_is_no_valid_graph(copy: Path) -> None:
    def drop_a_node(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("  %embed_tokens: "))

    dump = next((copy / "dumps" / "step_b1_q1").glob("*_canonicalize.ir"))
    rewrite(copy, str(dump.relative_to(copy)), drop_a_node)
    outcome = call("verify", copy)
    assert outcome.code in (1, 2)
    assert "embed_tokens" in outcome.err
    assert "canonicalize" in outcome.err


def test_a_graph_that_is_not_the_last_dump(copy: Path) -> None:
    rewrite(copy, "ir/step_b1_q1.ir", other_eps)
    assert "the graph that runs is not its last dump" in problem(copy)


def test_a_plan_that_is_not_of_its_graph(copy: Path) -> None:
    def longer(text: str) -> str:
        plan = json.loads(text)
        plan["memory"]["arena"] += 256
        return json.dumps(plan)

    rewrite(copy, "plans/step_b1_q1.json", longer)
    assert "the plan is not that of its graph" in problem(copy)


def test_a_recipe_that_is_not_of_the_graphs(copy: Path) -> None:
    def swapped(text: str) -> str:
        a, b = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
        return text.replace(f'"{a}"', '"x"').replace(f'"{b}"', f'"{a}"').replace('"x"', f'"{b}"')

    rewrite(copy, "recipe.ir", swapped)
    assert "recipe.ir is not the weight recipe" in problem(copy)
