"""Watching, stopping and bisecting a compilation, and taking it up again from its text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from k3fuse.ir import Graph
from k3fuse.passes.base import PassResult
from k3fuse.passes.fuse_kda_core import FuseKdaCore
from k3fuse.passes.merge_projections import MergeProjections
from k3fuse.passes.pipeline import PIPELINE
from tests.cli.command import call_ok, refused
from tests.cli.conftest import Compiled

NAMES = [item.name for item in PIPELINE]
TINY = ("compile", "kimi-k3-tiny", "--no-weights", "--no-kernels", "--tp", 4)


def test_dump_dir(compiled: Compiled) -> None:
    """One folder a bucket, the trace first, the same texts as in the bundle."""
    folders = sorted(path.name for path in compiled.dumps.iterdir())
    assert folders == ["commit_b2_q8", "step_b2_q1", "step_b2_q8"]
    for folder in folders:
        files = sorted((compiled.dumps / folder).iterdir())
        assert [f.stem.partition("_")[2] for f in files] == ["trace", *NAMES]
        for file in files:
            assert file.read_text() == (compiled.bundle / "dumps" / folder / file.name).read_text()
        assert files[-1].read_text() == (compiled.bundle / "ir" / f"{folder}.ir").read_text()


@pytest.mark.parametrize("name", ["shard-stock", "fuse-experts", "form-launches"])
def test_stop_after_and_opt(compiled: Compiled, tmp_path: Path, k3: Path, name: str) -> None:
    """The text at any point is all that the rest of the pipeline needs."""
    bundle = tmp_path / "bundle"
    text = call_ok(
        *("compile", "kimi-k3", k3, "--tp", 4, "--batch", 2, "--verify-rows", 8, "-o", bundle),
        *("--stop-after", name),
    ).out
    assert not bundle.exists()
    folder = compiled.dumps / "step_b2_q1"
    dump = folder / f"{NAMES.index(name) + 1:03d}_{name}.ir"
    assert text == dump.read_text()
    last = next(folder.glob(f"*_{NAMES[-1]}.ir")).read_text()
    assert call_ok("opt", dump, "--after", name).out == last
    result = tmp_path / "result.ir"
    data = call_ok("opt", dump, "--after", name, "-o", result, "--json").data
    assert result.read_text() == data["text"] == last
    assert [item["name"] for item in data["passes"]] == NAMES[NAMES.index(name) + 1 :]


def test_opt_one_pass(compiled: Compiled) -> None:
    before, after = (
        next((compiled.dumps / "step_b2_q8").glob(f"*_{name}.ir"))
        for name in ("absorb-mla", "shard-stock")
    )
    assert call_ok("opt", before, "-p", "shard-stock").out == after.read_text()
    assert call_ok("opt", before).out == before.read_text()
    assert "+++ shard-stock" in call_ok("opt", before, "-p", "shard-stock", "--print-changed").out
    assert call_ok("opt", before, "--list").out.split()[0] == NAMES[0]


def test_print_after_all() -> None:
    out = call_ok(*TINY, "--print-after-all", "--filter-passes", "dce,fuse-comm").out
    assert re.findall(r"^// after (\S+) ", out, re.MULTILINE) == ["dce", "fuse-comm"]
    assert out.count("graph decode") == 2


@pytest.mark.parametrize(
    "flags",
    [["--print-changed"], ["--print-changed=diff"], ["--print-changed", "diff"]],
)
def test_print_changed_diff(flags: list[str]) -> None:
    out = call_ok(*TINY, *flags, "--filter-passes", "fuse-experts").out
    assert "--- before\n+++ fuse-experts\n" in out
    assert "+++ fuse-comm" not in out


def test_print_changed_quiet() -> None:
    for flags in (["--print-changed=quiet"], ["--print-changed", "quiet"]):
        out = call_ok(*TINY, *flags).out
        assert re.findall(r"^// (\S+): (?:no change|\d+ changes)$", out, re.MULTILINE) == NAMES


def test_time_passes() -> None:
    err = call_ok(*TINY, "--time-passes").err
    assert all(name in err for name in NAMES)


def test_json_stays_alone() -> None:
    """What instruments print goes to stderr when stdout is for one object."""
    outcome = call_ok(*TINY, "--json", "--print-changed=quiet", "--print-after-all")
    assert outcome.data["model"] == "kimi-k3-tiny"
    assert "// dce: " in outcome.err
    stopped = call_ok(*TINY, "--json", "--stop-after", "dce").data
    assert stopped["pass"] == "dce"
    assert stopped["text"].startswith("graph decode")


@pytest.mark.parametrize("limit", [0, 9, 17])
def test_bisect(k3: Path, tmp_path: Path, limit: int) -> None:
    """However many passes are kept, the bundle verifies and says the same tokens."""
    bundle = tmp_path / "bundle"
    call_ok(
        *("compile", "kimi-k3", k3, "--tp", 2, "--bisect-limit", limit, "--no-check"),
        *("--no-kernels", "-o", bundle),
    )
    assert call_ok("verify", bundle, "--json").data["ok"]
    run = ("run", bundle, "--prompt-ids", "7,8", "--max-new-tokens", 3, "--json", "--executor")
    tokens = [call_ok(*run, name).data["tokens"] for name in ("reference", "stock")]
    assert tokens[0] == tokens[1]


def replayed(message: str) -> list[str]:
    """The words of the command that a failure tells to run."""
    return shlex.split(message.partition("reproduce: ")[2])[1:]


def test_a_pass_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(self: FuseKdaCore, graph: Graph) -> PassResult:
        raise ZeroDivisionError("no rows")

    monkeypatch.setattr(FuseKdaCore, "run", boom)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bundle = tmp_path / "bundle"
    message = refused(*TINY, "-o", bundle, code=1)
    assert "pass fuse-kda-core failed: ZeroDivisionError: no rows" in message
    assert not bundle.exists()
    again = refused(*replayed(message), code=1)
    assert "pass fuse-kda-core failed: ZeroDivisionError: no rows" in again


def test_a_pass_that_changes_numbers(
    k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check names the pass, and the reproducer is the graph before it."""
    honest = MergeProjections.run

    def sly(self: MergeProjections, graph: Graph) -> PassResult:
        result = honest(self, graph)
        next(n for n in graph.leaves() if n.op == "rms_norm").attrs["eps"] = 0.1
        return result

    monkeypatch.setattr(MergeProjections, "run", sly)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bundle = tmp_path / "bundle"
    message = refused("compile", "kimi-k3", k3, "--tp", 4, "-o", bundle, code=1)
    assert "pass merge-projections failed: outputs differ by" in message
    assert not bundle.exists()
    monkeypatch.undo()
    text = call_ok(*replayed(message)).out
    assert text == call_ok(*_compile(k3), "--stop-after", "merge-projections").out


def _compile(checkpoint: Path) -> tuple[Any, ...]:
    return ("compile", "kimi-k3", checkpoint, "--tp", 4)
