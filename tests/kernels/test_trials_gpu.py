"""The trials of kernels on compiled ones, where there is a GPU and the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3fuse.alone.launching import Case, Kernel
from k3fuse.alone.parity import parity, unlike
from k3fuse.alone.trials import padding_trial, trials
from k3fuse.kernels.build import Request, build, write_folder
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.lowering.launch_program import launch_programs
from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.launcher import KernelFolder
from k3fuse.target import get_target
from tests.kernels.conftest import STEP, VERIFY, compiled_bucket, programs

pytestmark = pytest.mark.gpu

TRIALS = {trial.title: trial for trial in trials()}
ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


class Compiled:
    """Kernels for the GPU of this machine, compiled together when they are asked for."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        capability = torch.cuda.get_device_capability()
        if capability not in ARCHES:
            pytest.skip(f"no kernels for a GPU of compute capability {capability}")
        self.arch = ARCHES[capability]

    def of(self, cases: dict[str, Case]) -> dict[str, Kernel]:
        target = get_target(self.arch)
        configs = {name: configure(case.program, target) for name, case in cases.items()}
        distinct: dict[str, LaunchConfig] = {c.label: c for c in configs.values()}
        requests = [Request(config, self.arch) for config in distinct.values()]
        write_folder(self.folder, build(requests, folder=self.cache).kernels)
        torch.zeros(1, device="cuda")  # makes the context that the launcher uses
        folder = KernelFolder(self.folder)
        return {
            name: Kernel(folder, config.label, folder.facts[config.label], cases[name])
            for name, config in configs.items()
        }


@pytest.fixture
def compiled(dsl: None, tmp_path: Path, cache_path: Path) -> Compiled:
    return Compiled(tmp_path / "kernels", cache_path)


@pytest.mark.parametrize("title", TRIALS)
def test_trial(compiled: Compiled, title: str) -> None:
    trial = TRIALS[title]
    assert list(trial.run(compiled.of(dict(trial.cases)))) == []


@pytest.mark.parametrize("bucket", [STEP, VERIFY], ids=["step", "verify"])
def test_rows_of_padding(compiled: Compiled, bucket: Bucket) -> None:
    trial = padding_trial(programs(bucket))
    assert list(trial.run(compiled.of(dict(trial.cases)))) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others(compiled: Compiled, tp: int) -> None:
    pairs = pairs_of(tp)
    ones = compiled.of({name: Case.of(one) for name, (one, _) in pairs.items()})
    eights = compiled.of({name: Case.of(eight) for name, (_, eight) in pairs.items()})
    assert [n for n in pairs if not parity(ones[n], eights[n])["equal"]] == []


def pairs_of(tp: int) -> dict[str, tuple[Program, Program]]:
    """The distinct launches of a step of one row and of eight that compute something."""
    made = [compiled_bucket(Bucket(rows, 1, "step"), tp) for rows in (1, 8)]
    one, eight = (launch_programs(m.graph, m.plan) for m in made)
    found = {(one[name], eight[name]): name for name in one}
    pairs = {name: pair for pair, name in found.items() if pair[0].label != "l2_prefetch"}
    assert all(unlike(a, b) is None for a, b in pairs.values())
    return pairs
