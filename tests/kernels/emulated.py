"""A kernel folder without a GPU: launches read and write memory of the process as kernels would."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from k3fuse.alone.inputs import outside
from k3fuse.alone.memory import pushes_of, sent_to, sentinel_fill, slot_of
from k3fuse.alone.reference import evaluate
from k3fuse.kernels.launch import LaunchConfig
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage, normalize
from k3fuse.tensor_type import DType

Change = Callable[[dict[int, Tensor]], None]


def facts_of(program: Program) -> dict[str, Any]:
    """Launch facts of a kernel of the program, whichever families exist."""
    config = LaunchConfig(
        program=normalize(program),
        stages=(Stage("point", (), level=1),),
        plans=(),
        families=(),
        threads=32,
        askers=0,
        ctas=1,
        cluster=1,
        smem=0,
        scratch=(),
        scratch_bytes=64,
        private=(),
        stage_smem=(),
        stage_scratch=(),
        peers=(),
        debug=False,
    )
    params = [{"name": p.name, "kind": p.kind} for p in config.parameters]
    return {"params": params, "scratch": 64}


def memory_at(address: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Memory of the process as a tensor."""
    kind = DType(dtype).to_torch()
    size = math.prod(shape) * kind.itemsize
    held = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(held, dtype=kind).view(shape)


class Emulated:
    """Launches compute the reference; `change` may alter values before they are written."""

    def __init__(self, program: Program, change: Change | None = None) -> None:
        self.program = normalize(program)
        self.change = change

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            self._launch(arguments)

        return launch

    def _launch(self, given: Mapping[str, Any]) -> None:
        program, rank = self.program, given.get("rank", 0)
        inputs: dict[int, Tensor] = {}
        for value in outside(program):
            held = program.values[value]
            at = given[f"v{value}"]
            if held.place == "mailbox":
                at += self._stage(value, given)
            inputs[value] = memory_at(at, held.dtype, held.shape).clone()
        values = dict(evaluate(program, inputs, rank=rank).values)
        if self.change is not None:
            self.change(values)
        for value in program.written:
            held = program.values[value]
            memory_at(given[f"v{value}"], held.dtype, held.shape).copy_(values[value])
        for step in program.steps:
            for result in step.results:
                held = program.values[result]
                if held.place == "state":
                    at = given[f"v{held.root}"]
                    memory_at(at, held.dtype, held.shape).copy_(values[result])
        for step in pushes_of(program):
            (result,) = step.results
            held = program.values[result]
            peers = memory_at(given[f"v{result}"], "i64", (program.tp,))
            for peer in range(program.tp):
                at = int(peers[peer]) + self._stage(result, given)
                slot = slot_of(memory_at(at, held.dtype, held.shape), step, rank, program)
                sent = sent_to(step, values[step.operands[0]], peer, program.tp).to(slot.dtype)
                slot.copy_(sent + 0.0 if sent.is_floating_point() else sent)
        for value in outside(program):
            held = program.values[value]
            if held.ring is not None and held.ring.first_reader:
                at = given[f"v{value}"] + self._stage(value, given, held.ring.rearm)
                sentinel_fill(memory_at(at, "u8", (held.ring.stage_bytes,)), held.dtype)

    def _stage(self, value: int, given: Mapping[str, Any], ahead: int = 0) -> int:
        ring = self.program.values[value].ring
        assert ring is not None
        step = int(memory_at(given["step"], "i64", (1,)))
        use = step * ring.uses + given[f"use{value}"] + ahead
        return use % ring.stages * ring.stage_bytes
