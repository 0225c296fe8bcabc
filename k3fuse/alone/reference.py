"""What a program computes on one rank: the references of its ops, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.ir import Context, op_named
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.kernels.program import Program, Step
from k3fuse.tensor_type import DType, TensorType, shard

IDS = {"route_topk": 0, "argmax": 0, "argmax_local": 1, "argmax_pick": 0}
"""Ops that choose, and which of their results holds the ids."""


@dataclass(frozen=True)
class Evaluated:
    """values: all values of the program; of a push, what this rank sends. natural: the ids that
    the reference chooses where others were forced."""

    values: Mapping[int, Tensor]
    natural: Mapping[int, Tensor]


def evaluate(
    program: Program,
    given: Mapping[int, Tensor],
    *,
    rank: int = 0,
    forced: Mapping[int, Tensor] | None = None,
    wanted: set[int] | None = None,
) -> Evaluated:
    """Run the steps on `given`, the values from outside by index.

    forced: ids that a kernel chose; what follows from a choice then follows from these. wanted:
    run only what these values need.
    """
    values, natural = dict(given), dict[int, Tensor]()
    made = {result for step in program.steps for result in step.results}
    for value, held in enumerate(program.values):
        if value not in made and held.root in values:
            values.setdefault(value, values[held.root])  # a state that another launch advanced
    needed = None if wanted is None else _steps_for(program, wanted)
    for number, step in enumerate(program.steps):
        if needed is not None and number not in needed:
            continue
        if step.op in PUSHES:
            values[step.results[0]] = values[step.operands[0]]
            continue
        results = _run(program, step, values, rank)
        values.update(zip(step.results, results, strict=True))
        if step.op in IDS and forced is not None:
            ids = step.results[IDS[step.op]]
            if ids in forced:
                natural[ids] = values[ids]
                _force(program, step, values, forced[ids], rank)
    return Evaluated(values, natural)


def _run(
    program: Program, step: Step, values: Mapping[int, Tensor], rank: int
) -> tuple[Tensor, ...]:
    op = op_named(step.op)
    assert op.reference is not None, f"{step.op} has no reference on one rank"
    types = [
        TensorType(DType(held.dtype), held.shape)
        for held in (program.values[v] for v in step.operands)
    ]
    if step.op == "embedding" and step.attribute("sharded"):
        types[1] = types[1].at(shard(0))
    shape = program.values[step.results[0]].shape if step.results else ()
    attributes = {k: v for k, v in step.attributes if k in op.attrs}
    context = Context(program.tp, rank, shape, tuple(types))
    return op.reference([values[v] for v in step.operands], attributes, context)


def _force(program: Program, step: Step, values: dict[int, Tensor], ids: Tensor, rank: int) -> None:
    """Replace the ids of a choice, and what the op gives beside them."""
    values[step.results[IDS[step.op]]] = ids
    if step.op == "argmax_local":
        logits = values[step.operands[0]]
        local = (ids - rank * logits.shape[1]).clamp(0, logits.shape[1] - 1)
        values[step.results[0]] = logits.gather(1, local)
    if step.op == "route_topk":
        logits = values[step.operands[0]]
        chosen = ids.long().clamp(0, logits.shape[1] - 1)
        weights = torch.nan_to_num(torch.sigmoid(logits).gather(1, chosen), nan=0.0)
        if step.attribute("renormalize"):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        scale = step.attribute("scale")
        assert isinstance(scale, int | float)
        values[step.results[1]] = weights * scale


def _steps_for(program: Program, wanted: set[int]) -> set[int]:
    found, open_values = set[int](), set(wanted)
    for number in reversed(range(len(program.steps))):
        step = program.steps[number]
        if open_values & set(step.results):
            found.add(number)
            open_values |= set(step.operands)
    return found
