"""What commands print: help for people, one JSON object for programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k3fuse import __version__
from tests.cli.command import call_ok
from tests.cli.conftest import Compiled

COMMANDS = (*("synth", "compile", "verify", "run", "inspect", "opt", "diff", "roofline", "doctor"),)


def test_help() -> None:
    """Alone, k3fuse prints its help; every command has its own."""
    assert call_ok().out == call_ok("--help").out
    for name in COMMANDS:
        assert f" {name} " in call_ok("--help").out
        assert f"{name} [OPTIONS]" in call_ok(name, "--help").out


def test_module() -> None:
    """`python -m k3fuse` is the same program."""
    done = subprocess.run(
        [sys.executable, "-m", "k3fuse", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"k3fuse {__version__}\n"


def test_compile(compiled: Compiled) -> None:
    data = compiled.summary
    assert (data["model"], data["target"], data["tp"]) == ("kimi-k3", "sm_90a", 4)
    assert data["batches"] == [2]
    assert len(data["plan_hash"]) == 64
    keys = {"2", "step_b2_q8", "commit_b2_q8"}
    for name in ("launches", "bytes_per_rank", "predicted_us"):
        assert set(data[name]) == keys
    step = data["launches"]["2"]
    assert {"KDA+dense", "KDA+MoE", "MLA+MoE"} <= set(step)
    for kind in step.values():
        assert {"main", "aux", "prefetch", "stock"} <= set(kind)
        assert kind["main"] < kind["stock"]
    sizes = data["bytes_per_rank"]["2"]
    assert 0 < sizes["planned"] < sizes["stock"]
    assert data["predicted_us"]["2"] > 0
    assert data["memory_bytes"] > sizes["planned"]
    assert all({"pass", "site", "reason"} <= set(refusal) for refusal in data["refusals"])
    assert data["proofs"]["numerics"].startswith("not checked: ")


def test_compile_table() -> None:
    out = call_ok("compile", "kimi-linear-tiny", "--no-weights", "--tp", 2, "--no-kernels").out
    assert "whole step" in out
    assert "no bundle written" in out
    assert "numerics: not checked" in out
    assert "Spread" not in out


def test_equal_compilations_give_equal_bundles(small: Path, k3: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    for _ in range(2):  # the second time over the first
        words = ("compile", "kimi-k3", k3, "--tp", 2, "--no-check", "--no-kernels")
        call_ok(*words, "-o", again)
    names = sorted(p.relative_to(small) for p in small.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    assert all((small / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


def test_roofline_of_a_measured_step() -> None:
    """The report that the K3 figures come from: 1.05 ms, 951 tokens a second, 27 percent."""
    words = ("roofline", "kimi-k3", "--tp", 16, "--gpu", "gb300", "--batch")
    data = call_ok(*words, 1, "--measured-ms", "3.90", "--json").data
    assert round(data["floor_ms"], 2) == 1.05
    assert round(data["tokens_per_s"]) == 951
    assert round(100 * data["share"]) == 27
    data = call_ok(*words, 8, "--json").data
    assert round(data["distinct_experts"], 1) == 120.3
    assert round(data["bytes"] / 1e9) == 303
    assert data["share"] is None
    out = call_ok(*words, 1, "--measured-ms", "3.90").out
    assert "951 tok/s" in out
    assert "27.0%" in out


@pytest.mark.parametrize("command", ["inspect", "doctor", "opt", "synth", "diff"])
def test_one_object(small: Path, tmp_path: Path, command: str) -> None:
    plan = small / "plans" / "step_b1_q1.json"
    words = {
        "inspect": [small],
        "doctor": [],
        "opt": [small / "ir" / "step_b1_q1.ir"],
        "synth": ["kimi-linear-tiny", tmp_path / "checkpoint"],
        "diff": [plan, plan],
    }[command]
    outcome = call_ok(command, *words, "--json")
    assert outcome.data
    assert outcome.err == ""
