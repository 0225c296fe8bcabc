"""Block phase of AttnRes: many queries over the same residual snapshots, beside the main stream.

A CTA keeps the snapshots of a row in shared memory and does its share of the queries: scores by
warps over pairs of queries and slices of the row, then the mix by threads over columns. Reads
2 n D bytes a row and 4 D a query, writes 4 D a row and query; bound by arithmetic on few SMs:
2 n D multiply-adds a row and query.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import PUSHES, Stage
from k3fuse.target import Target

CTAS = 8
"""Of up to as many rows, whose launch stands beside the main stream: that may not lose more SMs.
More rows take the whole GPU."""

STEP_COLUMNS = 128
"""Columns of a warp at a time: four a lane."""

MAX_SNAPSHOTS = 8


@dataclass(frozen=True)
class BlocksOptions:
    """share: queries of a CTA; groups: CTAs of a row. steps: of 128 columns a row; slices of it,
    with chunks of `depth` steps, whose loads are in flight together. lanes: sums of a query, the
    snapshots padded to a power of two. board, weights, table: offsets in shared memory behind
    the snapshots: sums of slices, softmax weights, addresses.
    """

    queries: int
    snapshots: int
    columns: int
    share: int
    groups: int
    steps: int
    slices: int
    chunks: int
    depth: int
    lanes: int
    board: int
    weights: int
    table: int

    @property
    def pitch(self) -> int:
        """Bytes from snapshot to snapshot in shared memory."""
        return self.steps * STEP_COLUMNS * 2

    @property
    def pairs(self) -> int:
        """Pairs of queries of a CTA; the squares of the snapshots stand behind them."""
        return -(-self.share // 2)

    @property
    def slots(self) -> int:
        """Rows of sums of a slice: queries, and the squares."""
        return 2 * self.pairs + 1

    @property
    def weight_pitch(self) -> int:
        """Bytes from query to query of the softmax weights: whole 16-byte words."""
        return 4 * max(4, self.lanes)


def plan_blocks(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Queries f32 [D], snapshots bf16 [M, D]; results f32 [M], [M], [M, D] a query, in memory."""
    steps = [program.steps[i] for i in stage.steps]
    snapshots = steps[0].operands[1:]
    count = len(snapshots)
    held = program.values[snapshots[0]]
    rows, columns = held.rows, held.width
    require(held.dtype == "bf16", f"snapshots in {held.dtype}")
    require(count <= MAX_SNAPSHOTS, f"{count} snapshots: {MAX_SNAPSHOTS} are kept")
    require(columns % 8 == 0, f"rows of {columns} are no whole 16-byte words")
    require(held.bytes * 2 < 2**31, "counts bytes of a result in 32 bits")
    for step in steps:
        require(step.operands[1:] == snapshots, "queries over different snapshots")
        require(step.attribute("eps") == steps[0].attribute("eps"), "different eps")
        query = program.values[step.operands[0]]
        require(query.dtype == "f32", f"queries in {query.dtype}")
        for result in step.results:
            readers = [s for s in program.consumers(result) if s.op not in PUSHES]
            require(
                len(readers) == len(program.consumers(result))
                and bool(readers or result in program.written),
                "results of the block phase stay in memory of the rank",
            )
    most = CTAS if rows <= CTAS else target.sm_count
    share = -(-len(steps) // max(1, most // rows))
    groups = -(-len(steps) // share)
    threads = 448 if columns >= 4096 else 256
    options = _layout(len(steps), count, columns, share, groups, threads // 32)
    smem = options.table + len(steps) * 32
    return StagePlan(min(most, rows * groups), threads, smem, options=options)


def _layout(
    queries: int, snapshots: int, columns: int, share: int, groups: int, warps: int
) -> BlocksOptions:
    steps = -(-columns // STEP_COLUMNS)
    depth = 2 if steps % 2 == 0 else 1
    pairs = -(-share // 2)
    slices = _slices(queries, steps, steps // depth, warps)
    lanes = 1 << (snapshots - 1).bit_length()
    board = snapshots * steps * STEP_COLUMNS * 2
    weights = board + _aligned(4 * lanes * (2 * pairs + 1) * slices)
    table = weights + _aligned(share * 4 * max(4, lanes))
    return BlocksOptions(
        queries=queries,
        snapshots=snapshots,
        columns=columns,
        share=share,
        groups=groups,
        steps=steps,
        slices=slices,
        chunks=steps // depth // slices,
        depth=depth,
        lanes=lanes,
        board=board,
        weights=weights,
        table=table,
    )


def _slices(queries: int, steps: int, pieces: int, warps: int) -> int:
    """Slices of a row, the same for any number of rows: they are the order of its sums. Of those
    that divide its pieces, the one that loses least where it loses most."""
    shares = {-(-queries // (CTAS // rows)) for rows in range(1, CTAS + 1)}

    def time(slices: int, share: int) -> int:
        """Of all warps: turns, each of some steps and a sum over lanes worth one more."""
        units = (-(-share // 2) + 1) * slices  # pairs of queries, and the squares
        return -(-units // warps) * (steps // slices + 1)

    choices = [s for s in range(1, min(pieces, 32) + 1) if pieces % s == 0]
    best = {share: min(time(s, share) for s in choices) for share in shares}
    return min(choices, key=lambda s: max(time(s, share) / best[share] for share in shares))


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
