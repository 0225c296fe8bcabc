"""What `doctor` prints: here, where there may be no GPU, and for a machine with two."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3fuse.cli import doctor
from tests.cli.command import call_ok, refused
from tests.runtime.test_fit import gpu, machine


def test_this_machine_and_a_bundle(small: Path) -> None:
    data = call_ok("doctor", small, "--json").data
    assert {"python", "torch", "driver", "GPUs"} <= set(data["facts"])
    assert data["bundle"]["tp"] == 2
    memory = data["bundle"]["memory"]
    assert memory["total"] == sum(memory.values()) - memory["total"] > 0
    processes, *_, reference = data["bundle"]["ways"]
    assert "the bundle has no kernels: compile again without --no-kernels" in processes["missing"]
    assert reference == {"name": "reference executor on the CPU", "ok": True, "missing": []}
    assert "bundle" not in call_ok("doctor", "--json").data


def test_a_machine_with_gpus(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = machine(gpu(0), gpu(1, free=3))
    monkeypatch.setattr(doctor, "probe", lambda: two)
    data = call_ok("doctor", small, "--json").data
    assert [item["target"] for item in data["gpus"]] == ["h200", "h200"]
    assert data["gpus"][1]["free"] == 3 * 10**9
    assert data["peers"] == [[True, True], [True, True]]
    assert all(item["ok"] for item in data["abilities"])
    out = call_ok("doctor", small).out
    for words in ("NVIDIA H200", "580.159.03, takes CUDA 13.0", "140.00 GB", "memory of a rank"):
        assert words in out
    assert "compile again without --no-kernels" in out


def test_a_directory_that_is_no_bundle(tmp_path: Path) -> None:
    assert "is no bundle" in refused("doctor", tmp_path)
