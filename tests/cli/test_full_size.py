"""Kimi K3 as released, on 16 ranks of GB300: its plan is made on any laptop."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import pytest


@pytest.mark.slow
def test_kimi_k3_on_16_ranks() -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "k3fuse", "compile", "kimi-k3", "--no-weights", "--json"),
            *("--tp", "16", "--batch", "1,8", "--target", "sm_103a", "--no-kernels"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - begin
    data = json.loads(done.stdout)
    assert done.stderr == ""
    step = data["launches"]["1"]
    assert step["KDA+MoE"]["main"] <= 7
    assert step["KDA+MoE"]["main"] + step["KDA+MoE"]["aux"] <= 9
    assert step["MLA+MoE"]["main"] <= 10
    assert data["bytes_per_rank"]["1"]["planned"] <= 8.8e9
    assert seconds < 60
    kilobytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest child
    assert kilobytes < 4 << 20
