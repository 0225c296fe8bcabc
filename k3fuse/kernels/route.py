"""The router's choice: the best `top_k` of E experts a row, with weights.

A CTA reads 4E bytes of logits and as many of the bias for a row, and is bound by latency. The warps
of a row hold its logits in registers. Scores are computed roughly at first; the `top_k`th of the
largest of 32 columns, one a lane, bounds the choice from below. Those few that may reach it are
candidates: their exact scores are compared, each with all others. Scores that are equal go to the
lower id because ids are part of the comparison.

Rows are taken in turn by the CTAs; or, when `private`, every CTA does them all at once for itself,
which for few rows is faster than a barrier of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

WARPS = 16
MAX_EXPERTS = 2048
MAX_CHOSEN = 32  # columns


@dataclass(frozen=True)
class RouteOptions:
    """together: rows at a time, of `warps` warps each; a lane takes `loads` times `vector` experts.

    columns_at ... chosen_at: offsets in shared memory; the candidates stand at 0.
    """

    experts: int
    top_k: int
    together: int
    warps: int
    vector: int
    loads: int
    renormalize: bool
    scale: float
    columns_at: int
    tops_at: int
    counts_at: int
    chosen_at: int


def plan_route(program: Program, stage: Stage, target: Target) -> StagePlan:
    """One row a CTA, or all rows."""
    step = program.steps[stage.steps[0]]
    logits, bias = (program.values[v] for v in step.operands)
    experts, top_k = logits.width, int(step.attribute("top_k") or 0)
    require(logits.dtype == "f32" and bias.dtype == "f32", "the router's scores are float32")
    require(experts <= MAX_EXPERTS, f"{experts} experts: a row holds {MAX_EXPERTS}")
    require(
        1 <= top_k <= min(experts, MAX_CHOSEN),
        f"{top_k} experts a row: one to {MAX_CHOSEN} are chosen",
    )
    together = logits.rows if stage.private else 1
    require(together <= WARPS, f"{together} rows at a time: there are {WARPS} warps")
    vector = 4 if experts % 4 == 0 and experts >= 128 else 1  # a lane is a column: 32 of them
    warps = min(WARPS // together, -(-experts // (32 * vector)))
    places: list[int] = []
    at = 0
    for size in (
        together * experts * 16,
        together * warps * 128,
        WARPS * 128,
        together * 4,
        together * top_k * 8,
    ):
        places.append(at)
        at = -(-(at + size) // 16) * 16
    options = RouteOptions(
        experts=experts,
        top_k=top_k,
        together=together,
        warps=warps,
        vector=vector,
        loads=-(-experts // (32 * vector * warps)),
        renormalize=bool(step.attribute("renormalize", True)),
        scale=float(step.attribute("scale") or 0.0),
        columns_at=places[1],
        tops_at=places[2],
        counts_at=places[3],
        chosen_at=places[4],
    )
    threads = together * warps * 32
    return StagePlan(items=logits.rows, threads=max(threads, 64), smem=at, options=options)
