"""Weights asked for into the L2 by bulk prefetches."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from k3fuse.kernels.device import instructions as ins


def ask(source, size):
    """Bring `size` bytes, a multiple of 16, into the L2."""
    ins.asm("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, size])


def make(ctx, number):
    """Pieces of all ranges in one order, dealt out to the threads of the grid in turn."""
    options = ctx.config.plans[number].options
    piece, lanes = options.piece, ctx.ctas * ctx.threads

    @cute.jit
    def pieces_of(source: cute.Pointer, size: cutlass.Constexpr, before: cutlass.Constexpr):
        """`before`: pieces of the ranges before this one."""
        # Neighbouring pieces go to different CTAs.
        index = ctx.thread * ctx.ctas + ctx.cta
        first = (index + (lanes - before % lanes)) % lanes
        for i in cutlass.range(first, -(-size // piece), lanes, unroll=1):
            at = i * piece
            ask(source + at, cutlass.min(Int32(size) - at, Int32(piece)))

    @cute.jit
    def run():
        before = 0
        for value, size in options.ranges:
            pieces_of(ctx.address(value), size, before)
            before += -(-size // piece)

    return None, run
