"""Compiled kernels run on the CPU, by a machine for PTX, under the harness that checks them on a GPU:
numbers, choices, peers' rings, guards, rows of padding."""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from k3fuse.alone.check import Finding, check
from k3fuse.kernels.examples import example
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.kernels.stages import Kind, outline
from k3fuse.runtime.bundle import Bucket
from k3fuse.target import get_target
from tests.kernels.conftest import TINY, programs
from tests.kernels.emulated import memory_at
from tests.kernels.ptx_machine import Fault, GlobalMemory, Machine, Region

LANES = 1536  # of a grid; more CTAs would take longer and find no more


class OnCpu:
    """A kernel folder of one kernel; each launch takes another order of warps."""

    def __init__(self, kernel: CompiledKernel, program: Program, seed: int) -> None:
        self.kernel, self.program, self.seed = kernel, program, seed
        self.steps = 0

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[[int], None]:
        regions = [r for p in self.kernel.params for r in self._regions(p.name, arguments)]
        values = [arguments[p.name] for p in self.kernel.params]

        def launch(stream: int) -> None:
            self.seed += 1
            machine = Machine(
                self.kernel.ptx,
                values,
                GlobalMemory(regions),
                ctas=self.kernel.grid[0],
                threads=self.kernel.block[0],
                smem=self.kernel.smem,
                cluster=self.kernel.cluster[0] if self.kernel.cluster else 1,
                seed=self.seed,
            )
            self.steps += machine.run()

        return launch

    def _regions(self, name: str, arguments: Mapping[str, Any]) -> list[Region]:
        """What a kernel may touch through a parameter."""
        if name in ("scratch", "control", "errors", "step"):
            size = {"scratch": self.kernel.scratch, "step": 8}.get(name, 256)
            return [Region(name, arguments[name], size)]
        if not name.startswith("v"):
            return []
        held = self.program.values[int(name[1:])]
        if held.ring is None:
            return [Region(name, arguments[name], held.bytes)]
        size = held.ring.stages * held.ring.stage_bytes
        if held.place == "mailbox":
            return [Region(name, arguments[name], size)]
        peers = memory_at(arguments[name], "i64", (self.program.tp,))
        rings = [Region(f"{name} of {p}", int(at), size) for p, at in enumerate(peers)]
        return [Region(name, arguments[name], 8 * self.program.tp), *rings]


@functools.cache
def configured(program: Program) -> LaunchConfig:
    config = configure(program, get_target("sm_90a"))
    most = max(1, LANES // config.threads // config.cluster) * config.cluster
    return replace(config, ctas=min(config.ctas, most))


def compiled(program: Program) -> CompiledKernel:
    config = configured(program)
    build = importlib.import_module("k3fuse.kernels.device.launch").build
    return replace(build(config, "sm_90a"), scratch=config.scratch_bytes)


def run(program: Program, kernel: CompiledKernel, seed: int) -> tuple[Finding, OnCpu]:
    params = [{"name": p.name, "kind": p.kind} for p in kernel.params]
    facts = {"params": params, "scratch": kernel.scratch}
    folder = OnCpu(kernel, configured(program).program, seed)
    found = check(
        folder, "k", facts, configured(program).program, device="cpu", seed=seed, replays=0
    )
    return found, folder
