"""The next token: the largest logit of a row, of a rank's share of it, and the best of the ranks.

A value is compared as an integer that orders as the float does, with NaN below all and -0.0 equal
to +0.0; a candidate is that integer above the inverted id, so the larger of two 64-bit candidates
is the better logit, or of equal ones the lower id. Which CTA or thread saw it does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program, Step
from k3fuse.kernels.stages import ARGMAX_COLUMNS, Stage
from k3fuse.target import Target

THREADS = 512
PART_COLUMNS = 8 * 1024
"""Columns of one CTA where a row is split: 32 KB, all loads of a thread in flight at once."""

ROWS_OF_CTA = 4
"""Rows of a CTA in the small stages, a warp each."""


@dataclass(frozen=True)
class ArgmaxOptions:
    """width: elements of a load. vectors: loads of a part of a row; parts: of a row."""

    width: int
    vectors: int
    parts: int


def step_of(program: Program, stage: Stage) -> Step:
    """The argmax of the stage; the pushes of its results stand behind it."""
    return program.steps[stage.steps[0]]


def options_of(program: Program, step: Step) -> ArgmaxOptions:
    """How the rows of the logits are read."""
    columns = program.values[step.operands[0]].width
    width = next(w for w in (4, 2, 1) if columns % w == 0)
    total = columns // width
    vectors = total if columns <= ARGMAX_COLUMNS else PART_COLUMNS // width
    return ArgmaxOptions(width, vectors, -(-total // vectors))


def plan_argmax(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Logits f32 [M, V]: a row, or a part of a long one, to a CTA; reads 4 M V bytes once.

    Whole rows give the result; parts leave 8 bytes each in scratch.
    """
    step = step_of(program, stage)
    logits = program.values[step.operands[0]]
    require(logits.dtype == "f32", f"argmax of {logits.dtype}")
    require(len(logits.shape) == 2 and logits.width > 0, f"argmax of {logits.shape}")
    require(logits.bytes < 2**31, "counts bytes of logits in 32 bits")
    require(logits.width * program.tp < 2**31, "counts ids in 32 bits")
    options = options_of(program, step)
    items = logits.rows * options.parts
    return StagePlan(
        items=items,
        threads=THREADS,
        smem=32 * 8,
        scratch=items * 8 if options.parts > 1 else 0,
        options=options,
    )


def plan_merge(program: Program, stage: Stage, target: Target) -> StagePlan:
    """The parts of each row compared by a warp."""
    step = step_of(program, stage)
    rows = program.values[step.operands[0]].rows
    return StagePlan(
        items=-(-rows // ROWS_OF_CTA),
        threads=32 * ROWS_OF_CTA,
        options=options_of(program, step),
    )


def plan_pick(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Candidates f32 and i64 [M, T] of the ranks, mostly polled: a warp a row, a lane a rank."""
    step = step_of(program, stage)
    values, ids = (program.values[v] for v in step.operands)
    require(values.dtype == "f32" and ids.dtype == "i64", "takes f32 values with i64 ids")
    require(values.width <= 32, f"{values.width} candidates of a row: a warp has 32 lanes")
    return StagePlan(items=-(-values.rows // ROWS_OF_CTA), threads=32 * ROWS_OF_CTA)
