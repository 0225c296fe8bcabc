"""Operands of the KDA ops: where their rows, windows, journals and weights are.

Sums and products that could be contracted in two ways are written as the instruction that is meant:
a row has the same bits in a step, a verify and a commit, whatever code stands around it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.context import unpack
from k3fuse.kernels.device.pointwise import silu
from k3fuse.kernels.program import ITEMSIZE

PAST = 3  # inputs that a conv window keeps
Q, K, V, F = range(4)  # what a warp prepares


def fma(a, b, c):
    """a b + c, rounded once."""
    return ins.asm(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def mul(a, b):
    """a b, never part of an fma."""
    return ins.asm(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def dot(a, b):
    """Sum of products in order."""
    total = mul(a[0], b[0])
    for x, y in zip(a[1:], b[1:], strict=True):
        total = fma(x, y, total)
    return total


class Inputs:
    """Where the operands of a kda_step, kda_verify or kda_commit are, and their rows."""

    def __init__(self, ctx, step):
        self.ctx = ctx
        self.commit = step.op == "kda_commit"
        given = step.operands
        if self.commit:
            self.rows_of, given = given[:3], given[3:]
        else:
            self.rows_of, given = given[:5], given[5:]
        self.convs, self.a_log, self.dt_bias = given[:3], given[3], given[4]
        self.conv_state, self.recurrent, self.slots = given[5:8]
        self.accepted = given[8] if self.commit else None
        self.journals = given[8:11] if step.op == "kda_verify" else ()
        self.heads, self.head_dim = ctx.held(self.recurrent).shape[1:3]
        self.channels = self.heads * self.head_dim
        self.rows = (
            ctx.held(self.rows_of[0]).shape[1]
            if self.commit
            else step.attribute("rows_per_request")
        )

    def row(self, kind, request, slot, row):
        """Address of a row of q, k or v (kind a run-time number), or of f (kind F itself)."""
        ctx, width = self.ctx, self.channels * 2
        if self.commit:
            at = Int64(slot) * self.rows + row
            if isinstance(kind, int):
                return ctx.address(self.rows_of[1]) + at * width
            return ctx.address(self.rows_of[0]) + (at * 3 + kind) * width
        at = Int64((request * self.rows + row) * width)
        if isinstance(kind, int):
            return ctx.address(self.rows_of[3]) + at
        return chosen(kind, [ctx.address(v) for v in self.rows_of[:3]]) + at

    def beta_input(self, request, slot, row, head):
        """Address of an element of b."""
        if self.commit:
            at = (Int64(slot) * self.rows + row) * self.heads + head
            return self.ctx.address(self.rows_of[2]) + at * 2
        at = (request * self.rows + row) * self.heads + head
        return self.ctx.address(self.rows_of[4]) + at * 2

    def window(self, kind, slot, channel):
        """Address of the past inputs of a channel."""
        at = (Int64(slot) * 3 + kind) * self.channels + channel
        return self.ctx.address(self.conv_state) + at * (2 * PAST)

    def taps(self, kind, channel, width):
        """The four weights of `width` neighbouring channels, one list a channel."""
        dtype = self.ctx.held(self.convs[0]).dtype
        size = 4 * ITEMSIZE[dtype]
        at = chosen(kind, [self.ctx.address(v) for v in self.convs]) + Int64(channel * size)
        found = []
        for i in range(width):
            words = ins.load_words(at + i * size, size, "global.L1::no_allocate")
            found.append(unpack(words, dtype, 4))
        return found

    def weight(self, value, column, width):
        """Elements of a vector of weights."""
        return read_weight(self.ctx, value, column, width)

    def convolve(self, kind, request, slot, row, channel, width):
        """SiLU of the short convolution of `width` neighbouring channels at a row."""
        taps = self.taps(kind, channel, width)
        past = []
        at = self.window(kind, slot, channel)
        for i in range(PAST):
            words = ins.load_words(at + i * 2 * width, 2 * width)
            past += unpack(words, "bf16", width)
        inputs = []
        for j in range(PAST + 1):
            # Taps before the request's first row are in the window; they load row 0 and drop it.
            t = Int32(0) if self.rows == 1 else cutlass.max(row + (j - PAST), Int32(0))
            if self.rows > 1 or j == PAST:
                at = self.row(kind, request, slot, t) + Int64(channel * 2)
                inputs.append(unpack(ins.load_words(at, 2 * width), "bf16", width))
            else:
                inputs.append(None)
        out = []
        for i in range(width):
            old = past[i * PAST : i * PAST + PAST]
            x = []
            for j in range(PAST + 1):
                value = old[j] if inputs[j] is None else inputs[j][i]
                if inputs[j] is not None:
                    for r in range(PAST - j):
                        value = cutlass.select_(row == r, old[j + r], value)
                x.append(value)
            out.append(silu(dot(x, taps[i])))
        return out


def chosen(kind, addresses):
    """One of three addresses."""
    q, k, v = (Int64(a.toint()) for a in addresses)
    return Int64(cutlass.select_(kind == Q, q, cutlass.select_(kind == K, k, v)))


def read_weight(ctx, value, column, width):
    """Elements of a vector of weights as float32."""
    dtype = ctx.held(value).dtype
    size = ITEMSIZE[dtype]
    at = ctx.address(value) + column * size
    return unpack(ins.load_words(at, width * size, "global.L1::no_allocate"), dtype, width)


def make_fetch(ctx, values):
    """Weights into the L2, a line a thread: they are cold, and asked for late."""

    @cute.jit
    def fetch():
        first = ctx.cta * ctx.threads + ctx.thread
        for value in values:
            for line in cutlass.range(
                first, -(-ctx.held(value).bytes // 128), ctx.ctas * ctx.threads, unroll=1
            ):
                ins.asm(
                    "prefetch.global.L2 [{$r0}];",
                    read_only_args=[ctx.address(value) + line * 128],
                )

    return fetch
