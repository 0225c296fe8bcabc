"""Device code of the router's choice; see `k3fuse.kernels.route` for what it does."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.argmax import choose, largest, order_of, value_of
from k3fuse.kernels.device.pointwise import sigmoid

LOWEST = 0x007FFFFF  # the order of -inf
MARGIN = 2.0**-18  # by which a choice may be wrong at first, absolute and relative


def better(order, inverted, than_order, than_inverted):
    """Whether a candidate goes before another: a higher choice, or the same and a lower id."""
    same = (order == than_order) & (inverted > than_inverted)
    return (order > than_order) | same


def make(ctx, number):
    """Rows in turn, or all at once."""
    config, program = ctx.config, ctx.program
    stage = config.stages[number]
    step = program.steps[stage.steps[0]]
    o = config.plans[number].options
    logits, bias = step.operands
    ids, weights = step.results
    rows = ctx.held(logits).rows

    def score_of(logit):
        """The sigmoid, accurate to the last bits: the choice hangs on them."""
        return Float32(1.0) / (Float32(1.0) + cute.math.exp(-logit))

    def order_of_choice(choice):
        """The order of a choice; NaN is as -inf."""
        order = order_of(ins.as_word(choice))
        return choose(order < Uint32(LOWEST), Uint32(LOWEST), order)

    def load_logits(row, columns):
        """`vector` logits each as words, from memory or, once they are there, the own mailbox."""
        size = o.vector * 4
        if ctx.held(logits).place != "mailbox":
            source = ctx.address(logits)
            return [ins.load_words(source + (row * o.experts + c) * 4, size) for c in columns]
        source = ctx.stage_of(logits)
        places = [source + (row * o.experts + c) * 4 for c in columns]
        return ctx.all_arrived(places, logits, size)

    def columns(at, line):
        """First byte of what the warps of a row say of its columns."""
        return at + (o.columns_at + ctx.lane * 4) + line * (o.warps * 128)

    def candidate(at, line, index):
        """Four words: its id, logit and bias, then the inverted id, order of its choice, score."""
        return at + (line * o.experts + index) * 16

    def chosen(at, line, place):
        return at + (o.chosen_at + line * (o.top_k * 8) + place * 8)

    def first_of(part, j):
        """First expert of this lane's vector j."""
        return ((part * o.loads + j) * 32 + ctx.lane) * o.vector

    @cute.jit
    def look(row: Int32, line: Int32, part: Int32, at: Int32):
        """This lane's logits, and the orders of about what is chosen by."""
        places = [first_of(part, j) for j in range(o.loads)]
        safe = [cutlass.min(place, Int32(o.experts - o.vector)) for place in places]
        biases = [
            ins.load_words(ctx.address(bias) + p * 4, o.vector * 4, "global.L1::no_allocate")
            for p in safe
        ]
        seen = load_logits(row, safe)
        words, orders = [], []  # logit and bias of each
        for j in range_constexpr(o.loads):
            for i in range_constexpr(o.vector):
                choice = sigmoid(ins.as_float(seen[j][i])) + ins.as_float(biases[j][i])
                words.append([seen[j][i], biases[j][i]])
                orders.append(choose(places[j] < o.experts, order_of_choice(choice), Uint32(0)))
        top = orders[0]
        for order in orders[1:]:
            top = choose(order > top, order, top)
        ins.store_words(columns(at, line) + part * 128, [top], 4, "shared")
        if (part == 0) & (ctx.lane == 0):
            ins.store_words(at + (o.counts_at + line * 4), [Uint32(0)], 4, "shared")
        return words, orders

    @cute.jit
    def bound(line: Int32, at: Int32):
        """What a chosen expert reaches: the `top_k`th of the columns' largest, less twice what it
        may be wrong by. At least 1, as order 0 marks no expert."""
        top = Uint32(0)
        for w in range_constexpr(o.warps):
            word = ins.load_words(columns(at, line) + w * 128, 4, "shared")[0]
            top = choose(word > top, word, top)
        tops = at + (o.tops_at + ctx.warp * 128)
        ins.store_words(tops + ctx.lane * 4, [top], 4, "shared")
        cute.arch.sync_warp()
        place = Int32(0)
        for i in range_constexpr(8):
            others = ins.load_shared16(tops + i * 16)
            for j in range_constexpr(4):
                same = (others[j] == top) & (4 * i + j < ctx.lane)
                place += cutlass.select_((others[j] > top) | same, Int32(1), Int32(0))
        found = largest(choose(place == o.top_k - 1, top, Uint32(0)))
        value = value_of(found)
        size = ins.as_float(ins.as_word(value) & Uint32(0x7FFFFFFF))
        least = order_of(ins.as_word(value - (size * Float32(MARGIN) + Float32(MARGIN))))
        return choose(least == Uint32(0), Uint32(1), least)

    @cute.jit
    def propose(words: list, orders: list, part: Int32, line: Int32, at: Int32):
        """Experts that reach the bound go to the candidates of the row, in any order."""
        least = bound(line, at)
        kept = [order >= least for order in orders]
        ballots = [Int32(cute.arch.vote_ballot_sync(keep)) for keep in kept]
        total = Int32(0)
        for ballot in ballots:
            total += cute.arch.popc(ballot)
        begin = Int32(0)
        if (ctx.lane == 0) & (total > 0):
            begin = ins.add_shared(at + (o.counts_at + line * 4), total)
        begin = cute.arch.shuffle_sync(begin, 0)
        below = (Int32(1) << ctx.lane) - 1
        for n in range_constexpr(len(orders)):
            if kept[n]:
                name = Uint32(first_of(part, n // o.vector) + n % o.vector)
                place = begin + cute.arch.popc(ballots[n] & below)
                four = [name, *words[n], Uint32(0)]
                ins.store_words(candidate(at, line, place), four, 16, "shared")
            begin += cute.arch.popc(ballots[n])

    @cute.jit
    def rank(line: Int32, at: Int32):
        """Each candidate's place among all; the first `top_k` leave their id and score. A warp does
        a row, a lane a candidate."""
        count = Int32(ins.load_words(at + (o.counts_at + line * 4), 4, "shared")[0])
        for c in cutlass.range(ctx.lane, count, 32, unroll=1):
            name, logit, plus, _ = ins.load_words(candidate(at, line, c), 16, "shared")
            score = score_of(ins.as_float(logit))
            order = order_of_choice(score + ins.as_float(plus))
            weight = cutlass.select_(score == score, score, Float32(0.0))
            four = [~name, order, ins.as_word(weight), Uint32(0)]
            ins.store_words(candidate(at, line, c), four, 16, "shared")
        cute.arch.sync_warp()
        for c in cutlass.range(ctx.lane, count, 32, unroll=1):
            inverted, order, score, _ = ins.load_words(candidate(at, line, c), 16, "shared")
            place = Int32(0)
            for other in cutlass.range(count, unroll=4):
                words = ins.load_words(candidate(at, line, other), 8, "shared")
                before = better(words[1], words[0], order, inverted)
                place += cutlass.select_(before, Int32(1), Int32(0))
            if place < o.top_k:
                ins.store_words(chosen(at, line, place), [~inverted, score], 8, "shared")
        cute.arch.sync_warp()

    @cute.jit
    def finish(row: Int32, line: Int32, at: Int32):
        """Ids and weights of the row; every lane adds up the scores in the order of choice."""
        words = [ins.load_words(chosen(at, line, j) + 4, 4, "shared")[0] for j in range(o.top_k)]
        total = Float32(0.0)
        for word in words:
            total = total + ins.as_float(word)
        mine = cutlass.min(ctx.lane, Int32(o.top_k - 1))
        name, score = ins.load_words(chosen(at, line, mine), 8, "shared")
        weight = ins.as_float(score)
        if const_expr(o.renormalize):
            weight = weight / (total + Float32(1e-20))
        weight = weight * Float32(o.scale)
        live = ctx.lane < o.top_k if o.top_k < 32 else None
        spot = (row * o.top_k + mine) * 4
        if const_expr(stage.private):
            for value, word in ((ids, name), (weights, ins.as_word(weight))):
                kept = ctx.shared + config.private_offset(value)
                ins.store_words(kept + spot, [word], 4, "shared", live)
        else:
            if const_expr(config.in_memory(ids)):
                ins.store_words(ctx.address(ids) + spot, [name], 4, predicate=live)
            ctx.sink(weights, row, mine, [weight], live)

    @cute.jit
    def choose_of(first: Int32):
        """`together` rows from `first` on; warps too many repeat the last row and leave nothing."""
        at = ctx.shared + config.stage_smem[number]
        line = cutlass.min(ctx.warp // o.warps, Int32(o.together - 1))
        part = ctx.warp % o.warps
        works = ctx.warp < o.together * o.warps
        words, orders = look(first + line, line, part, at)
        cute.arch.sync_threads()
        if works:
            propose(words, orders, part, line, at)
        cute.arch.sync_threads()
        if works & (part == 0):
            rank(line, at)
            finish(first + line, line, at)

    @cute.jit
    def run():
        if const_expr(stage.private):
            choose_of(Int32(0))
        else:
            # The last CTAs: the first have more of what else is to be done before the experts.
            for row in cutlass.range(ctx.ctas - 1 - ctx.cta, rows, ctx.ctas, unroll=1):
                choose_of(row)
                cute.arch.sync_threads()

    return None, run
