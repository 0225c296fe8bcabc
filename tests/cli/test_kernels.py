"""Kernels in a bundle: selected, compiled, audited, proved, shown. No GPU is used."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from k3fuse.cli import compile as compiling
from k3fuse.errors import InputError
from k3fuse.kernels.family import NotSupported
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.lowering import select as selecting
from k3fuse.target import Target
from tests.cli.command import call_ok, refused

LINEAR = ("compile", "kimi-linear-tiny", "--no-weights", "--tp", 2, "--target", "h200")

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl to compile"
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the user keeps; and what one test compiles, the next one finds."""
    monkeypatch.setenv("K3FUSE_CACHE", str(cache))


@needs_dsl
@pytest.mark.slow
def test_a_bundle_with_kernels(linear: Path, tmp_path: Path, own_cache: None) -> None:
    bundle = tmp_path / "bundle"
    words = ("compile", "kimi-linear", linear, "--tp", 2, "--target", "h200", "--no-check")
    data = call_ok(*words, "-o", bundle, "--json").data
    kernels = data["kernels"]
    assert kernels["without"] == []
    assert kernels["compiled"] + kernels["cached"] == kernels["distinct"] > 0
    assert data["proofs"]["co_residency"].startswith("proved")
    assert data["proofs"]["ptx"].startswith(f"audited {kernels['distinct']} kernels")
    cubins = {path.name for path in (bundle / "kernels").glob("*.cubin")}
    assert len(cubins) == kernels["distinct"]
    assert not list(bundle.rglob("*.ptx"))

    again = call_ok(*words, "-o", tmp_path / "again", "--json").data["kernels"]
    assert (again["compiled"], again["cached"]) == (0, kernels["distinct"])
    for path in bundle.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(bundle)).read_bytes()

    proof = call_ok("prove", bundle, "--json").data
    assert proof["verdict"] == "ACCEPT"
    assert [s["no_kernel_resources"] for s in proof["schedules"]] == [[]]
    assert call_ok("verify", bundle, "--json").data["ok"]

    shown = call_ok("inspect", bundle, "--layer", 1, "--json").data["launches"]
    assert all(row["kernel"]["grid"] > 0 and row["kernel"]["stages"] for row in shown)
    text = call_ok("inspect", bundle, "--layer", 1).out
    assert "kernel " in text
    assert "stage 0: " in text
    (summary,) = call_ok("inspect", bundle, "--json").data["buckets"]
    assert (summary["kernels"], summary["without_kernel"]) == (kernels["distinct"], 0)
    page = tmp_path / "page.html"
    call_ok("inspect", bundle, "--html", page)
    assert shown[0]["kernel"]["name"] in page.read_text()

    manifest = bundle / "kernels" / "manifest.json"
    broken = json.loads(manifest.read_text())
    broken["kernels"][0]["grid"][0] += 1
    manifest.write_text(json.dumps(broken))
    assert "SHA-256" in refused("verify", bundle)


@needs_dsl
@pytest.mark.slow
def test_launches_without_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> None:
    """Fail by name under --strict; otherwise the bundle holds the others."""

    def fussy(program: Program, target: Target, *, debug: bool) -> LaunchConfig:
        if program.label.startswith("l2_prefetch") or "linear" not in program.label:
            return configure(program, target, debug=debug)
        raise NotSupported("a matrix too many")

    monkeypatch.setattr(selecting, "configure", fussy)
    bundle = tmp_path / "bundle"
    message = refused(*LINEAR, "-o", bundle, code=1)
    assert "launches have no kernel: @layers.0" in message
    assert "of step_b1_q1: a matrix too many" in message
    assert not bundle.exists()
    data = call_ok(*LINEAR, "--no-strict", "-o", bundle, "--json").data
    without = data["kernels"]["without"]
    assert ["step_b1_q1", "lm_head", "a matrix too many"] in without
    assert data["proofs"]["co_residency"].startswith("not proven")
    assert "no kernel: a matrix too many" in call_ok("inspect", bundle, "--layer", 1).out
    table = call_ok(*LINEAR, "--no-strict").out
    assert "  no kernel for @lm_head of step_b1_q1: a matrix too many" in table


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says that there are no kernels; asked for, they are an error."""

    def missing() -> str:
        raise InputError("compiling kernels needs nvidia-cutlass-dsl: install the extra")

    monkeypatch.setattr(compiling, "dsl_version", missing)
    outcome = call_ok(*LINEAR, "--json")
    assert "no kernels: compiling kernels needs nvidia-cutlass-dsl" in outcome.err
    assert outcome.data["kernels"] is None
    assert outcome.data["proofs"]["ptx"].startswith("not audited")
    assert "needs nvidia-cutlass-dsl" in refused(*LINEAR, "--kernels")
    assert call_ok(*LINEAR, "--no-kernels", "--json").err == ""
