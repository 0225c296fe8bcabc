"""Around the delta rule: states asked into the L2 before it, conv windows and journals after it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.kda_inputs import PAST, F, Inputs
from k3fuse.kernels.kda import PIECE
from k3fuse.kernels.program import ITEMSIZE

LINE = 128  # bytes of the L2


def make(ctx, number):
    """By kind of stage."""
    kinds = {
        "kda_fetch": make_fetch_states,
        "kda_window": make_windows,
        "kda_journal": make_journal,
    }
    return kinds[ctx.config.stages[number].kind](ctx, number)


def make_fetch_states(ctx, number):
    """S and the windows of live requests into the L2: pieces spread over the CTAs first."""
    o = ctx.config.plans[number].options
    inputs = Inputs(ctx, ctx.program.steps[ctx.config.stages[number].steps[0]])

    @cute.jit
    def fetch(value: cutlass.Constexpr, pieces: cutlass.Constexpr):
        held = ctx.held(value)
        size = held.width * ITEMSIZE[held.dtype]  # of a slot
        slots = cute.recast_ptr(ctx.address(inputs.slots), dtype=Int32)
        first = ctx.thread * ctx.ctas + ctx.cta
        for unit in cutlass.range(first, o.requests * pieces, ctx.ctas * ctx.threads, unroll=1):
            request = unit // pieces
            slot = Int32(cute.arch.load(slots + request, Int32, cop="cg"))
            if slot >= 0:
                at = (unit - request * pieces) * PIECE
                base = ctx.address(value) + Int64(slot) * size
                for line in cutlass.range(at, cutlass.min(at + PIECE, Int32(size)), LINE, unroll=1):
                    ins.asm("prefetch.global.L2 [{$r0}];", read_only_args=[base + line])

    @cute.jit
    def run():
        fetch(inputs.conv_state, o.window_pieces)
        if const_expr(o.state_pieces > 0):
            fetch(inputs.recurrent, o.state_pieces)

    return None, run


def replace_window(inputs, kind, request, slot, rows, channel):
    """The last three inputs of four neighbouring channels after `rows` (at least 1) more rows."""
    at = inputs.window(kind, slot, channel)
    past = [word for i in range(PAST) for word in ins.load_words(at + i * 8, 8)]
    newest = []
    for h in range(PAST):
        row = cutlass.max(rows + (h - PAST), Int32(0))
        place = inputs.row(kind, request, slot, row) + Int64(channel * 2)
        newest.append(ins.load_words(place, 8))
    halves = []
    for c in range(4):
        old = [half_of(past, c * PAST + h) for h in range(PAST)]
        new = [half_of(words, c) for words in newest]
        oldest = cutlass.select_(rows == 2, old[2], old[1])
        halves.append(Uint32(cutlass.select_(rows >= 3, new[0], oldest)))
        halves.append(Uint32(cutlass.select_(rows >= 2, new[1], old[2])))
        halves.append(new[2])
    words = [halves[i] | (halves[i + 1] << Uint32(16)) for i in range(0, 4 * PAST, 2)]
    for i in range(PAST):
        ins.store_words(at + i * 8, words[2 * i : 2 * i + 2], 8)


def half_of(words, index):
    """A bfloat16 of packed words, as bits."""
    word = words[index // 2]
    return word >> Uint32(16) if index % 2 else word & Uint32(0xFFFF)


def make_windows(ctx, number):
    """The conv windows after a kda_step: the last three inputs of each channel of live requests.

    The last CTAs come first: the head norm of the same level takes the first ones.
    """
    o = ctx.config.plans[number].options
    step = ctx.program.steps[ctx.config.stages[number].steps[0]]
    inputs = Inputs(ctx, step)
    groups = o.heads * o.head_dim // 4

    @cute.jit
    def run():
        slots = cute.recast_ptr(ctx.address(inputs.slots), dtype=Int32)
        first = (ctx.ctas - 1 - ctx.cta) * ctx.threads + ctx.thread
        for unit in cutlass.range(first, o.requests * 3 * groups, ctx.ctas * ctx.threads, unroll=1):
            row = unit // groups
            request = row // 3
            slot = Int32(cute.arch.load(slots + request, Int32, cop="cg"))
            if slot >= 0:
                channel = (unit - row * groups) * 4
                replace_window(inputs, row - request * 3, request, slot, Int32(o.rows), channel)

    return None, run


def make_journal(ctx, number):
    """The rows of a kda_verify into the journals of live requests, from row 0; last CTAs first."""
    o = ctx.config.plans[number].options
    step = ctx.program.steps[ctx.config.stages[number].steps[0]]
    inputs = Inputs(ctx, step)
    qkv, f, b = inputs.journals
    kept = ctx.held(qkv).shape[1]  # rows of a journal
    channels = inputs.channels
    vectors = channels // 8

    def journal_row(slot, row):
        return Int64(slot) * kept + row

    @cute.jit
    def copy_vector(slot: Int32, request: Int32, row: Int32, kind: Int32, column: Int32):
        """Eight channels of q, k, v or f."""
        there = journal_row(slot, row)
        if kind == F:
            source = inputs.row(F, request, slot, row) + Int64(column * 2)
            words = ins.load_words(source, 16)
            ins.store_words(ctx.address(f) + (there * channels + column) * 2, words, 16)
        else:
            source = inputs.row(kind, request, slot, row) + Int64(column * 2)
            words = ins.load_words(source, 16)
            target = ctx.address(qkv) + ((there * 3 + kind) * channels + column) * 2
            ins.store_words(target, words, 16)

    @cute.jit
    def run():
        slots = cute.recast_ptr(ctx.address(inputs.slots), dtype=Int32)
        first = (ctx.ctas - 1 - ctx.cta) * ctx.threads + ctx.thread
        stride = ctx.ctas * ctx.threads
        for unit in cutlass.range(first, o.requests * o.rows * 4 * vectors, stride, unroll=1):
            line = unit // vectors
            row_of = line // 4
            request = row_of // o.rows
            slot = Int32(cute.arch.load(slots + request, Int32, cop="cg"))
            if slot >= 0:
                row = row_of - request * o.rows
                copy_vector(slot, request, row, line - row_of * 4, (unit - line * vectors) * 8)
        for unit in cutlass.range(first, o.requests * o.rows * o.heads, stride, unroll=1):
            row_of = unit // o.heads
            request = row_of // o.rows
            slot = Int32(cute.arch.load(slots + request, Int32, cop="cg"))
            if slot >= 0:
                row, head = row_of - request * o.rows, unit - row_of * o.heads
                words = ins.load_words(inputs.beta_input(request, slot, row, head), 2)
                target = ctx.address(b) + (journal_row(slot, row) * o.heads + head) * 2
                ins.store_words(target, words, 2)

    return None, run
