"""Device code of the router's choice; see `k3fuse.kernels.route` for what it does."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.argmax import choose, largest, order_of

LOWEST = 0x007FFFFF  # the order of -inf


def better(order, inverted, than_order, than_inverted):
    """Whether a candidate goes before another: a higher choice, or the same and a lower id."""
    same = (order == than_order) & (inverted > than_inverted)
    return (order > than_order) | same


def make(ctx, number):
    """Rows in turn, one a CTA. A candidate is two words: order of its choice, inverted id."""
    program = ctx.program
    step = program.steps[ctx.config.stages[number].steps[0]]
    o = ctx.config.plans[number].options
    logits, bias = step.operands
    ids, weights = step.results
    rows = ctx.held(logits).rows
    slice_scores = 32 * o.lane_scores

    def score_of(logit):
        """The sigmoid, accurate to the last bits: the choice hangs on them."""
        return Float32(1.0) / (Float32(1.0) + cute.math.exp(-logit))

    def load_logits(row, columns):
        """Logits as words, from memory or, once they have arrived, from the own mailbox."""
        if ctx.held(logits).place != "mailbox":
            source = ctx.address(logits)
            return [ins.load_words(source + (row * o.experts + c) * 4, 4)[0] for c in columns]
        source = ctx.stage_of(logits)
        places = [source + (row * o.experts + c) * 4 for c in columns]
        seen = [ins.load_words(place, 4, "volatile.global") for place in places]
        return [
            ctx.arrived(words, place, logits, 4)[0]
            for words, place in zip(seen, places, strict=True)
        ]

    @cute.jit
    def slice_best(row: Int32, at: Int32):
        """A warp's best of its slice, one candidate a round; all scores go to shared memory."""
        first = ctx.warp * slice_scores + ctx.lane
        places = [first + j * 32 for j in range(o.lane_scores)]
        safe = [cutlass.min(place, Int32(o.experts - 1)) for place in places]
        seen = load_logits(row, safe)
        biases = [
            ins.load_words(ctx.address(bias) + p * 4, 4, "global.L1::no_allocate")[0] for p in safe
        ]
        orders = []
        for j in range_constexpr(o.lane_scores):
            score = score_of(ins.as_float(seen[j]))
            order = order_of(ins.as_word(score + ins.as_float(biases[j])))
            order = choose(order < Uint32(LOWEST), Uint32(LOWEST), order)  # NaN is as -inf
            orders.append(choose(places[j] < o.experts, order, Uint32(0)))
            weight = cutlass.select_(score == score, score, Float32(0.0))
            ins.store_words(at + safe[j] * 4, [ins.as_word(weight)], 4, "shared")
        inverted = [~Uint32(place) for place in places]
        mine = at + (o.candidates_at + ctx.warp * (o.top_k * 8))
        for i in cutlass.range(o.top_k, unroll=1):
            top = orders[0]
            for j in range_constexpr(1, o.lane_scores):
                top = choose(orders[j] > top, orders[j], top)
            top = largest(top)
            lowest = Uint32(0)
            for j in range_constexpr(o.lane_scores):
                # Ids grow with j, so the first match is the lane's lowest.
                found = (orders[j] == top) & (lowest == Uint32(0))
                lowest = choose(found, inverted[j], lowest)
            lowest = largest(lowest)
            orders = [
                choose((order == top) & (name == lowest), Uint32(0), order)
                for order, name in zip(orders, inverted, strict=True)
            ]
            if ctx.lane == 0:
                ins.store_words(mine + i * 8, [top, lowest], 8, "shared")

    @cute.jit
    def rank(at: Int32):
        """Each candidate's place among all; the first `top_k` leave their id and score.

        A warp takes a candidate at a time, and each lane compares it with some of all.
        """
        others = []
        for i in range_constexpr(-(-o.candidates // 32)):
            c = cutlass.min(ctx.lane + i * 32, Int32(o.candidates - 1))
            others.append(ins.load_words(at + (o.candidates_at + c * 8), 8, "shared"))
        for c in cutlass.range(ctx.warp, o.candidates, ctx.warps, unroll=1):
            order, inverted = ins.load_words(at + (o.candidates_at + c * 8), 8, "shared")
            place = Int32(0)
            for i in range_constexpr(len(others)):
                before = better(others[i][0], others[i][1], order, inverted)
                before = before & (ctx.lane + i * 32 < o.candidates)
                place += cute.arch.popc(Int32(cute.arch.vote_ballot_sync(before)))
            # Order 0 marks a slice with fewer scores than rounds: never among the first.
            if (place < o.top_k) & (order != Uint32(0)) & (ctx.lane == 0):
                score = ins.load_words(at + Int32(~inverted) * 4, 4, "shared")[0]
                ins.store_words(at + (o.chosen_at + place * 8), [~inverted, score], 8, "shared")

    @cute.jit
    def finish(row: Int32, at: Int32):
        """Ids and weights of the row; every lane adds up the scores in the order of choice."""
        chosen = [
            ins.load_words(at + (o.chosen_at + j * 8 + 4), 4, "shared")[0] for j in range(o.top_k)
        ]
        total = Float32(0.0)
        for word in chosen:
            total = total + ins.as_float(word)
        mine = cutlass.min(ctx.lane, Int32(o.top_k - 1))
        name, score = ins.load_words(at + (o.chosen_at + mine * 8), 8, "shared")
        weight = ins.as_float(score)
        if const_expr(o.renormalize):
            weight = weight / (total + Float32(1e-20))
        weight = weight * Float32(o.scale)
        live = ctx.lane < o.top_k if o.top_k < 32 else None
        if const_expr(ctx.config.in_memory(ids)):
            target = ctx.address(ids) + (row * o.top_k + mine) * 4
            ins.store_words(target, [name], 4, predicate=live)
        ctx.sink(weights, row, mine, [weight], live)

    @cute.jit
    def run():
        at = ctx.shared + ctx.config.stage_smem[number]
        # The last CTAs: the first have more of what else is to be done before the experts.
        for row in cutlass.range(ctx.ctas - 1 - ctx.cta, rows, ctx.ctas, unroll=1):
            if ctx.warp < o.warps:
                slice_best(row, at)
            cute.arch.sync_threads()
            rank(at)
            cute.arch.sync_threads()
            if ctx.warp == 0:
                finish(row, at)
            cute.arch.sync_threads()

    return None, run
