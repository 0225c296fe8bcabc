"""Tiles of the weights of linear maps: where their rows are, products, and what follows on sums."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.pointwise import Pointwise, rounded
from k3fuse.kernels.linear import TILE
from k3fuse.kernels.stages import POINTWISE, PUSHES


def multiply_few(sums, step, x, w):
    """One step of 32 columns for up to 8 tokens: adds to one of two pairs of accumulators.

    The quad x serves both mma: the first multiplies words 0, 1 of its row g, the second words 2, 3
    of its row g+8. The other halves of the sums are never read.
    """
    at = 8 * (step % 2)
    low = ins.mma_bf16(sums[at : at + 4], x, w[0:2])
    high = ins.mma_bf16(sums[at + 4 : at + 8], x, w[2:4])
    return [*sums[:at], *low, *high, *sums[at + 8 :]]


def quad(words):
    """As an A operand: words 0, 1 in row g, words 2, 3 in row g+8."""
    return [words[0], words[2], words[1], words[3]]


def sums_of(sums):
    """Token g times rows 2t and 2t+1."""
    return (
        (sums[0] + sums[6]) + (sums[8] + sums[14]),
        (sums[1] + sums[7]) + (sums[9] + sums[15]),
    )


def multiply_many(sums, x, w):
    """One step for a block of 16 tokens (x: words of rows g and g+8) and one tile."""
    sums = ins.mma_bf16(sums, [x[0][0], x[1][0], x[0][1], x[1][1]], [w[0], w[1]])
    return ins.mma_bf16(sums, [x[0][2], x[1][2], x[0][3], x[1][3]], [w[2], w[3]])


def make_tiles(ctx, number, o, in_part=None):
    """row_address, early_operands and tails of the maps `o` of a stage.

    in_part: of a part of a tile (-1: all) and a row of it, whether it belongs to the part.
    """
    program = ctx.program
    work = Pointwise(ctx, number)
    row_bytes = o.k * 2
    weights = [[program.steps[i].operands[1] for i in b] for b in o.bundles]
    widths = [program.values[program.steps[b[0]].results[0]].width for b in o.bundles]
    following_steps = [
        work.steps_with([program.steps[i].results[0] for i in bundle]) for bundle in o.bundles
    ]

    def row_address(tile, g):
        """First byte of the weight row that lane group g reads of a tile."""
        found = Int64(0)
        for b in range(len(o.bundles)):
            local = tile - o.starts[b]
            if len(weights[b]) == 1:
                row = cutlass.min(local * TILE + g, Int32(widths[b] - 1))
                base = Int64(ctx.address(weights[b][0]).toint())
            else:  # rows of two maps in turn, so that a lane's two columns are one of each
                row = cutlass.min(local * (TILE // 2) + g // 2, Int32(widths[b] - 1))
                gate, up = (Int64(ctx.address(v).toint()) for v in weights[b])
                base = cutlass.select_(g % 2 == 0, gate, up)
            address = base + Int64(row) * row_bytes
            found = address if b == 0 else cutlass.select_(local >= 0, address, found)
        return found

    def other_operands():
        """What follows a single map reads besides its results."""
        if len(o.bundles) > 1 or len(o.bundles[0]) > 1 or widths[0] % 2:
            return []
        made = {program.steps[o.bundles[0][0]].results[0]}
        found = []
        for step in following_steps[0]:
            if step.op not in PUSHES and made & {*step.operands, *step.results}:
                made.update(step.results)
                for value in step.operands:
                    if step.op in POINTWISE and value not in made and value not in found:
                        found.append(value)
        return found

    others = other_operands()

    def early_operands(tile, row, t):
        """Those, asked for before the weights are there."""
        return [work.value(v, row, columns_of(0, tile, t), 2, {}) for v in others]

    def tail(b, row, column, pair, live, spread, early):
        """What follows on one token and two columns of bundle b (one column of two maps)."""
        known = dict(zip(others, early, strict=False))  # none known early: evaluated here
        if len(o.bundles[b]) == 1:
            value = program.steps[o.bundles[b][0]].results[0]
            dtype = program.values[value].dtype
            if widths[b] % 2 == 0:
                known[value] = rounded(list(pair), dtype)
                finish(b, known, row, column, 2, live, spread)
            else:
                for i in range(2):
                    one = {value: rounded([pair[i]], dtype)}
                    # Beyond the last column a load repeats it; the store is off.
                    at = cutlass.min(column + i, Int32(widths[b] - 1))
                    exists_too = column + i < widths[b]
                    finish(b, one, row, at, 1, live & exists_too, also(spread, exists_too))
        else:
            for step, element in zip(o.bundles[b], pair, strict=False):
                value = program.steps[step].results[0]
                known[value] = rounded([element], program.values[value].dtype)
            at = cutlass.min(column, Int32(widths[b] - 1))
            finish(b, known, row, at, 1, live, spread)

    def finish(b, known, row, column, width, live, spread):
        work.finish(known, row, column, width, live, following_steps[b], spread)

    def also(spread, condition):
        return None if spread is None else (spread[0], spread[1] & condition)

    def columns_of(b, tile, t):
        """First column of a lane's pair of sums."""
        local = tile - o.starts[b]
        if len(o.bundles[b]) == 1:
            return cutlass.min(local * TILE + 2 * t, Int32(2 * ((widths[b] - 1) // 2)))
        return local * (TILE // 2) + t

    def exists(b, tile, t):
        """Whether the first column of a lane's pair exists."""
        local = tile - o.starts[b]
        if len(o.bundles[b]) == 1:
            return local * TILE + 2 * t < widths[b]
        return local * (TILE // 2) + t < widths[b]

    def tails_of(n, tile, portion, row, t, g, a, b, live, early):
        here = exists(n, tile, t)
        if in_part is not None:
            here = here & in_part(portion, 2 * t)
        # One token: all lane groups hold the same sums, so each sends to peers of its own.
        spread = (g, here) if o.m == 1 else None
        tail(n, row, columns_of(n, tile, t), (a, b), live & here, spread, early)

    @cute.jit
    def tails(
        tile: Int32,
        portion: Int32,
        row: Int32,
        t: Int32,
        g: Int32,
        a: Float32,
        b: Float32,
        live: Boolean,
        early: list,
    ):
        for n in range_constexpr(len(o.bundles)):
            if const_expr(len(o.bundles) == 1):
                tails_of(n, tile, portion, row, t, g, a, b, live, early)
            else:
                if (tile >= o.starts[n]) & (tile < o.starts[n + 1]):
                    tails_of(n, tile, portion, row, t, g, a, b, live, early)

    return SimpleNamespace(row_address=row_address, early_operands=early_operands, tails=tails)
