"""The router's choice: the best `top_k` of E experts a row, with weights.

A row is one CTA's: it reads 4E bytes of logits and as many of the bias, and is bound by latency. A
warp holds a slice of the row, up to four scores a lane, and takes its own best `top_k` one after
the other; those candidates of all warps then count how many of them are better. Scores that are
equal go to the lower id because ids are part of the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

MAX_WARPS = 8
SCORES_A_LANE = 4
MAX_EXPERTS = 2048
MAX_CHOSEN = 32


@dataclass(frozen=True)
class RouteOptions:
    """warps: those that hold a slice of the row, `lane_scores` scores a lane.

    candidates_at, chosen_at: offsets in shared memory; the scores stand at 0.
    """

    experts: int
    top_k: int
    warps: int
    lane_scores: int
    renormalize: bool
    scale: float
    candidates_at: int
    chosen_at: int

    @property
    def candidates(self) -> int:
        return self.warps * self.top_k


def plan_route(program: Program, stage: Stage, target: Target) -> StagePlan:
    """One row a CTA."""
    step = program.steps[stage.steps[0]]
    logits, bias = (program.values[v] for v in step.operands)
    experts, top_k = logits.width, int(step.attribute("top_k") or 0)
    require(logits.dtype == "f32" and bias.dtype == "f32", "the router's scores are float32")
    require(experts <= MAX_EXPERTS, f"{experts} experts: a row holds {MAX_EXPERTS}")
    require(
        1 <= top_k <= min(experts, MAX_CHOSEN),
        f"{top_k} experts a row: one to {MAX_CHOSEN} are chosen",
    )
    warps = min(MAX_WARPS, -(-experts // (32 * SCORES_A_LANE)))
    candidates_at = -(-experts * 4 // 16) * 16
    chosen_at = candidates_at + warps * top_k * 8
    options = RouteOptions(
        experts=experts,
        top_k=top_k,
        warps=warps,
        lane_scores=-(-experts // (32 * warps)),
        renormalize=bool(step.attribute("renormalize", True)),
        scale=float(step.attribute("scale") or 0.0),
        candidates_at=candidates_at,
        chosen_at=chosen_at,
    )
    return StagePlan(items=logits.rows, threads=256, smem=chosen_at + top_k * 8, options=options)
