"""Linear stages of 3 to 64 tokens, K split over the CTAs of a cluster and there over warps.

A warp keeps the tokens of its slice of K in registers, so that a cluster reads the tokens once and
not every CTA all of them. A warp of its own streams the slices of the cluster's tiles of 8 weight
rows through a ring, whole slices a slot. Others add up the sums of the warps, and send them to the
CTA of the cluster that finishes the tile; each finishes every so many-th.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.linear import (
    AHEAD_BYTES,
    FEW_TOKENS,
    MAX_TOKENS,
    OTHER_BYTES,
    STEP,
    TILE,
    Maps,
    banked,
    maps_of,
    plan_few,
)
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

WARPS = 8
SLICE = 16
"""Steps times blocks of 16 tokens of a warp: eight registers each."""

SUMMERS = 2
"""Warps that add up."""

SLOT_STEPS = 60
"""Of a CTA at most: 30 KB of a tile are a slot of the ring."""

CLUSTERS = (1, 2, 4, 8)
"""A cluster lies in one GPC: of the 132 SMs of an H200, 30 clusters of 4 or 15 of 8 run at once."""

RING_BYTES = 100 * 1024
LEAST_SLOTS = 4
"""Of 150 KB 46 MB at M=64 take 19.5 us, not 18.2; of three slots, where two CTAs share an SM, at
M=16 14.3 us, not 12.9."""


@dataclass(frozen=True)
class ClusterOptions(Maps):
    """mt: blocks of 16 tokens. cluster: CTAs that share K; split: warps of each; chunk: steps of a
    warp. depth: slots of the ring; ahead: of them asked for and not come, at most. owned: tiles
    that a CTA finishes, at most.
    """

    mt: int
    cluster: int
    split: int
    chunk: int
    depth: int
    ahead: int
    owned: int

    @property
    def steps(self) -> int:
        """Of a CTA."""
        return -(-self.all_steps // self.cluster)

    @property
    def ragged(self) -> bool:
        """Whether some lane of some step lies beyond K or beyond the CTA's part."""
        return self.k % (STEP * self.cluster) != 0 or self.split * self.chunk != self.steps

    @property
    def row_bytes(self) -> int:
        """From one weight row of a slot to the next."""
        return banked(self.split * self.chunk * STEP * 2)

    @property
    def slot_bytes(self) -> int:
        return TILE * self.row_bytes

    @property
    def warp_bytes(self) -> int:
        """Sums of a tile of one warp, f32 [16 mt, 8]; two boards hold those of all."""
        return 16 * self.mt * TILE * 4

    @property
    def part_bytes(self) -> int:
        """Sums of a tile of one CTA, f32 [m, 8]."""
        return self.m * TILE * 4

    @property
    def boards_at(self) -> int:
        return self.depth * self.slot_bytes

    @property
    def inbox_at(self) -> int:
        return self.boards_at + 2 * self.split * self.warp_bytes

    @property
    def barriers_at(self) -> int:
        return self.inbox_at + (self.owned * self.cluster * self.part_bytes)

    @property
    def smem(self) -> int:
        """Ring, boards, what the cluster sends, and 8-byte barriers: two a slot and a board, one a
        tile that is finished here."""
        return self.barriers_at + 8 * (2 * self.depth + 4 + self.owned)


def plan_some(program: Program, stage: Stage, target: Target) -> StagePlan:
    """3 to 8 tokens, where the sums of one token alone are added up in the same order."""
    maps = maps_of(program, stage, FEW_TOKENS)
    require(maps.m > 2, f"{maps.m} rows: few enough for every CTA to hold them")
    plan, alone = plan_cluster(program, stage, target), plan_few(program, stage, target)
    some, one = plan.options, alone.options
    same = (some.split, some.chunk, some.cluster) == (one.split, one.chunk, one.chunks)
    require(same and one.terms > 1, "the sums of one token alone have another order")
    return plan


def plan_cluster(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Up to 64 tokens, that are all a launch has to do."""
    maps = maps_of(program, stage, MAX_TOKENS)
    require(maps.heads == 0, "each head reads columns of its own")
    alone = len(stage.steps) == len(program.steps) and program.producer(maps.x) is None
    require(alone, "other stages beside it: K is split over clusters of a launch without barriers")
    steps, mt = maps.all_steps, -(-maps.m // 16)
    most = SLICE // mt
    limit = min(WARPS * most, SLOT_STEPS)
    found = [c for c in CLUSTERS if -(-steps // c) <= limit and _even(steps, c)]
    require(bool(found), f"K={maps.k}: tokens of a cluster hold no such rows")
    cluster = found[0]
    here = -(-steps // cluster)
    warps = range(-(-here // most), min(WARPS, here) + 1)
    split = min(warps, key=lambda w: (w * -(-here // w), -w))
    chunk = -(-here // split)
    sms = target.sm_count if cluster <= 2 else target.sm_count * 10 // 11
    clusters = min(maps.tiles, sms // cluster)
    count = -(-maps.tiles // clusters)
    slot = TILE * banked(split * chunk * STEP * 2)
    options = ClusterOptions(
        **vars(maps),
        mt=mt,
        cluster=cluster,
        split=split,
        chunk=chunk,
        depth=2,
        ahead=max(1, AHEAD_BYTES // slot),
        owned=-(-count // cluster),
    )
    room = target.smem_per_block - OTHER_BYTES - options.smem
    require(room >= 0, f"{options.smem} bytes of shared memory")
    wanted = min(max(2, count), max(LEAST_SLOTS, RING_BYTES // slot))
    depth = min(wanted, 2 + room // (slot + 16))
    options = replace(options, depth=depth, ahead=min(options.ahead, depth))
    return StagePlan(
        items=clusters * cluster,
        threads=32 * (split + SUMMERS + 1),
        smem=options.smem,
        options=options,
        askers=32,
        cluster=cluster,
    )


def _even(steps: int, cluster: int) -> bool:
    """Whether every CTA has steps."""
    return steps > (cluster - 1) * -(-steps // cluster)
