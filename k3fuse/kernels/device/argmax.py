"""Argmax over logits, and over the candidates of the ranks.

A candidate is two words: the order of its value, and its inverted id (or lane); see
`kernels/argmax.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.stages import PUSHES

LOADS = 4  # vectors of a thread in flight


def choose(condition, a, b):
    """One of two words; `select_` alone gives signed ones, which compare otherwise."""
    return Uint32(cutlass.select_(condition, a, b))


def order_of(word):
    """Bits of a float32 -> an integer in the order of the values; NaN is 0, -0.0 is +0.0."""
    word = choose(word == Uint32(0x80000000), Uint32(0), word)
    negative = Uint32(Int32(word) >> Int32(31))  # all ones, or 0
    ordered = word ^ (negative | Uint32(0x80000000))
    nan = (word & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000)
    return choose(nan, Uint32(0), ordered)


def value_of(order):
    """The float32 of an order; of 0 a NaN."""
    word = choose(order >= Uint32(0x80000000), order ^ Uint32(0x80000000), ~order)
    return ins.as_float(word)


def largest(word):
    """The largest of a word over the lanes of a warp, in all lanes."""
    return ins.asm(
        "redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def warp_best(order, inverted):
    """The best candidate of a warp's lanes, in all lanes."""
    top = largest(order)
    return top, largest(choose(order == top, inverted, Uint32(0)))


def store_ids(ctx, value, row, words, live):
    """An int64 of a row, as two words: in memory and at the peers where wanted."""
    if ctx.config.in_memory(value):
        ins.store_words(ctx.address(value) + row * 8, words, 8, predicate=live)
    for step in ctx.program.consumers(value):
        if step.op in PUSHES:
            ctx.push(step, row, Int32(0), words, 1, live)


def finish(ctx, step, row, order, inverted, live):
    """The results of a row from its best candidate."""
    token = ~inverted
    if step.op == "argmax_local":
        best, ids = step.results
        ctx.sink(best, row, Int32(0), [value_of(order)], live)
        columns = ctx.held(step.operands[0]).width
        token = token + Uint32(Int32(ctx.given["rank"]) * columns) if ctx.tp > 1 else token
    else:
        (ids,) = step.results
    store_ids(ctx, ids, row, [token, Uint32(0)], live)


def make(ctx, number):
    """The stage of this kind."""
    kind = ctx.config.stages[number].kind
    return {"argmax": make_argmax, "argmax_merge": make_merge, "argmax_pick": make_pick}[kind](
        ctx, number
    )


def make_argmax(ctx, number):
    """Every CTA takes a row, or a part of one: threads over vectors, then lanes, then warps."""
    config, program = ctx.config, ctx.program
    step = program.steps[config.stages[number].steps[0]]
    options = config.plans[number].options
    logits = ctx.held(step.operands[0])
    width, parts = options.width, options.parts
    total = logits.width // width  # vectors of a row
    items = logits.rows * parts

    @cute.jit
    def best_of(row_at: cute.Pointer, first: Int32, end: Int32):
        """Of the thread's columns. Threads and loads past the end repeat the last vector."""
        last = end - 1
        order = Uint32(0)
        token = Uint32(cutlass.min(first + ctx.thread, last) * width)
        for start in cutlass.range(first + ctx.thread, end, ctx.threads * LOADS, unroll=1):
            places = [cutlass.min(start + i * ctx.threads, last) for i in range(LOADS)]
            seen = [ins.load_words(row_at + v * (width * 4), width * 4) for v in places]
            for place, words in zip(places, seen, strict=True):
                for j in cutlass.range_constexpr(width):
                    found = order_of(words[j])
                    better = found > order
                    order = choose(better, found, order)
                    token = choose(better, Uint32(place * width + j), token)
        return order, ~token

    @cute.jit
    def run():
        board = ctx.shared + config.stage_smem[number]
        for item in cutlass.range(ctx.cta, items, ctx.ctas, unroll=1):
            row = item // parts
            first = (item - row * parts) * options.vectors
            end = cutlass.min(first + options.vectors, Int32(total))
            row_at = ctx.address(step.operands[0]) + row * (logits.width * 4)
            order, inverted = best_of(row_at, first, end)
            order, inverted = warp_best(order, inverted)
            if ctx.lane == 0:
                ins.store_words(board + ctx.warp * 8, [order, inverted], 8, "shared")
            cute.arch.sync_threads()
            if ctx.warp == 0:
                mine = cutlass.min(ctx.lane, Int32(ctx.warps - 1))
                words = ins.load_words(board + mine * 8, 8, "shared")
                top, low = warp_best(words[0], words[1])
                if const_expr(parts > 1):
                    offset = config.stage_scratch[number]
                    place = ctx.given["scratch"] + offset + item * 8
                    ins.store_words(place, [top, low], 8, predicate=ctx.lane == 0)
                else:
                    finish(ctx, step, row, top, low, ctx.lane == 0)
            cute.arch.sync_threads()

    return None, run


def make_merge(ctx, number):
    """A warp a row: lanes over its parts."""
    config, program = ctx.config, ctx.program
    stage = config.stages[number]
    step = program.steps[stage.steps[0]]
    source = next(
        n
        for n, s in enumerate(config.stages)
        if s.kind == "argmax" and s.steps[0] == stage.steps[0]
    )
    parts = config.plans[number].options.parts
    rows = ctx.held(step.operands[0]).rows

    @cute.jit
    def run():
        first = ctx.cta + ctx.warp * ctx.ctas
        for row in cutlass.range(first, rows, ctx.ctas * ctx.warps, unroll=1):
            place = ctx.given["scratch"] + config.stage_scratch[source] + row * (parts * 8)
            order, inverted = Uint32(0), Uint32(0)
            for start in cutlass.range(0, parts, 32, unroll=1):
                part = cutlass.min(start + ctx.lane, Int32(parts - 1))
                words = ins.load_words(place + part * 8, 8)
                top, low = warp_best(words[0], words[1])
                better = (top > order) | ((top == order) & (low > inverted))
                order = choose(better, top, order)
                inverted = choose(better, low, inverted)
            finish(ctx, step, row, order, inverted, ctx.lane == 0)

    return None, run


def make_pick(ctx, number):
    """A warp a row: each lane takes a rank's candidate; equal values go to the lower rank."""
    config, program = ctx.config, ctx.program
    step = program.steps[config.stages[number].steps[0]]
    values, ids = step.operands
    (result,) = step.results
    held = ctx.held(values)

    def place_of(value, at):
        mailbox = ctx.held(value).place == "mailbox"
        return (ctx.stage_of(value) if mailbox else ctx.address(value)) + at

    @cute.jit
    def run():
        first = ctx.cta + ctx.warp * ctx.ctas
        for row in cutlass.range(first, held.rows, ctx.ctas * ctx.warps, unroll=1):
            rank = cutlass.min(ctx.lane, Int32(held.width - 1))
            at = row * held.width + rank
            places = [place_of(values, at * 4), place_of(ids, at * 8)]
            seen = []
            for value, place, size in zip(step.operands, places, (4, 8), strict=True):
                polled = ctx.held(value).place == "mailbox"
                how = "volatile.global" if polled else "global.cg"
                seen.append(ins.load_words(place, size, how))
            for i, value in enumerate(step.operands):
                if const_expr(ctx.held(value).place == "mailbox"):
                    seen[i] = ctx.arrived(seen[i], places[i], value, (4, 8)[i])
            order = order_of(seen[0][0])
            inverted = choose(ctx.lane < held.width, ~Uint32(ctx.lane), Uint32(0))
            winner = warp_best(order, inverted)[1]
            store_ids(ctx, result, row, seen[1], winner == inverted)

    return None, run
