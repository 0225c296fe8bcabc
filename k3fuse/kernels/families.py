"""Which family does a stage: one table in order of preference, with the measurement behind a row.

A family says what it can do, never whether it is wanted; the first row of a kind that can, does.
Times are of whole launches at Kimi K3 sizes, TP 16, on an H200 (benchmarks/results).
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels import (
    argmax,
    attn_res,
    experts,
    experts_few,
    kda,
    linear,
    linear_cluster,
    mla,
    prefetch,
    route,
    rowwise,
)
from k3fuse.kernels.family import NotSupported, Plan, StagePlan
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Kind, Stage
from k3fuse.target import Target


@dataclass(frozen=True)
class Family:
    """One row: for stages of `kind`, try `plan`; `measured` is what put it in its place."""

    kind: Kind
    name: str
    plan: Plan
    measured: str


ONLY = "the only one"
EXPERTS = "M=1 15.5 us, M=8 50.9; the other 25.9 and 81"

FAMILIES = (
    Family("point", "vectors", rowwise.plan_point, ONLY),
    Family("row", "row in registers", rowwise.plan_row, "the only one; 16 slots, norm: 2.7 us"),
    Family(
        "linear",
        "some tokens: K over a cluster",
        linear_cluster.plan_some,
        "M=8: 46 MB 12.7 us, 15 MB 5.5, 13 MB 4.9; the next 13.4, 6.5, 5.7",
    ),
    Family(
        "linear",
        "few tokens: a tile a time",
        linear.plan_few,
        "46 MB at M=1 11.9 us (84 %), M=8 13.4; the last at M=8 needs twice the mma",
    ),
    Family(
        "linear",
        "K over a cluster",
        linear_cluster.plan_cluster,
        "46 MB at M=16 12.9 us, M=64 18.2, the next 17.6 and 41.9; 15 MB 6, 10, 14, 39",
    ),
    Family(
        "linear",
        "blocks of 16 tokens",
        linear.plan_many,
        "beside other stages; 7168 x 768 at M=64 8.1 us",
    ),
    Family("value", "few tokens: a tile a time", linear.plan_few, "M=1 1.5 us, M=8 1.9"),
    Family("value", "blocks of 16 tokens", linear.plan_many, "M=64 5.1 us"),
    Family("append", "vectors", mla.plan_append, ONLY),
    Family("absorb", "columns of latents", mla.plan_absorb, ONLY),
    Family("attend", "split KV, mma", mla.plan_attend, "the only one; 4,096 positions 11.4 us"),
    Family("attend_merge", "splits in order", mla.plan_merge, ONLY),
    Family("argmax", "row or part of a CTA", argmax.plan_argmax, ONLY),
    Family("argmax_merge", "parts in order", argmax.plan_merge, ONLY),
    Family("argmax_pick", "lane a rank", argmax.plan_pick, "the only one; 1.2 us"),
    Family("blocks", "snapshots in shared memory", attn_res.plan_blocks, ONLY),
    Family("prefetch", "8 KB pieces", prefetch.plan_prefetch, ONLY),
    Family("kda_fetch", "lines into the L2", kda.plan_fetch, ONLY),
    Family("kda", "state in registers", kda.plan_kda, "the only one; M=1 5.8 us, M=8 8.5"),
    Family(
        "kda_heads", "cluster a head", kda.plan_heads, "M=1 4.0 us, M=8 6.4; in stages 5.8, 8.5"
    ),
    Family("kda_window", "rewrite", kda.plan_window, ONLY),
    Family("kda_journal", "copy", kda.plan_journal, ONLY),
    Family("commit", "head of a CTA", kda.plan_commit, ONLY),
    Family("head_norm", "warp a head", kda.plan_head_norm, ONLY),
    Family("route", "sortable keys", route.plan_route, ONLY),
    Family("experts_up", "few tokens: all columns", experts_few.plan_up, EXPERTS),
    Family("experts_up", "entries of 8 tokens", experts.plan_up, "M=64 236 us"),
    Family("experts_down", "few tokens: all columns", experts_few.plan_down, EXPERTS),
    Family("experts_down", "entries of 8 tokens", experts.plan_down, "M=64 236 us"),
)


@dataclass(frozen=True)
class Chosen:
    """The family taken for a stage, and why those before it were not."""

    name: str
    refusals: tuple[tuple[str, str], ...]


def choose(program: Program, stage: Stage, target: Target) -> tuple[Chosen, StagePlan]:
    """The first family of the table that does a stage. NotSupported with all reasons if none."""
    refusals: list[tuple[str, str]] = []
    for family in FAMILIES:
        if family.kind != stage.kind:
            continue
        try:
            plan = family.plan(program, stage, target)
        except NotSupported as reason:
            refusals.append((family.name, str(reason)))
        else:
            return Chosen(family.name, tuple(refusals)), plan
    ops = ", ".join(dict.fromkeys(program.steps[i].op for i in stage.steps))
    reasons = "; ".join(reason for _, reason in refusals) or f"no kernel family for {ops}"
    raise NotSupported(reasons)
