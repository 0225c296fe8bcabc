"""Device code of the routed experts of few tokens; see `k3fuse.kernels.experts_few`.

The loads of slot number c wait until the slot's last contents, number c - slots, were used. Of a
unit of `experts_up` that says the reducer, which reads the workers' sums there; of a slot of
`experts_down` the workers do. A worker arrives behind a store of what it computed: an arrival right
behind loads could overtake them.

Within a group of 32 columns lane t of a quad holds columns 8t to 8t+7 of both operands, in pairs
(j, j+4), as shifts leave the codes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import bulk, context
from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.mxfp4 import (
    Scales,
    UnalignedScales,
    keep_nan,
    shared_word,
    tiny_codes,
)
from k3fuse.kernels.device.pointwise import situ
from k3fuse.kernels.experts_few import (
    CODE_SCALE,
    COUNTERS_AT,
    HALVES,
    LET_PASS,
    PRODUCER,
    REDUCER,
    TOKEN_EXPONENT,
    UP_COLUMNS,
    WORKERS,
)
from k3fuse.kernels.stages import PUSHES

TOGETHER = 14  # named barrier of the workers; linear stages take the first and the last


def highest(a, b):
    """The larger of two words."""
    return ins.asm("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def multiply(sums, rows, step, low_scales, high_scales, x):
    """Add 16 rows times 8 tokens. rows: address of this lane's codes in its first row; step: from
    there to its second. x: four words a group."""
    zero = [Float32(0.0)] * 4
    groups = len(x) // 4
    words = [
        (shared_word(rows + q * 16), shared_word(rows + (step + q * 16))) for q in range(groups)
    ]
    for q in range(groups):
        low, high = tiny_codes(words[q][0]), tiny_codes(words[q][1])
        part = zero
        for h in (0, 2):
            a = [low[h], high[h], low[h + 1], high[h + 1]]
            part = ins.mma_bf16(part, a, x[4 * q + h : 4 * q + h + 2])
        a, b = low_scales.value(q), high_scales.value(q)
        sums = [
            sums[0] + part[0] * a,
            sums[1] + part[1] * a,
            sums[2] + part[2] * b,
            sums[3] + part[3] * b,
        ]
    return keep_nan(sums, low_scales.words, high_scales.words)


class Common:
    """What both stages share: the list of chosen experts and the loads of slots.

    An entry of the list is an expert with the pair (token, choice) of each of the 8 tokens, -1 for
    tokens that did not choose it. Slots are numbered over both stages.
    """

    def __init__(self, ctx, number):
        config = ctx.config
        stage = config.stages[number]
        self.ctx, self.step = ctx, ctx.program.steps[stage.steps[0]]
        self.up = up = next(
            n
            for n, s in enumerate(config.stages)
            if s.kind == "experts_up" and s.steps[0] == stage.steps[0]
        )
        self.o = config.plans[up].options
        self.produce = make_produce(self)
        self.base_offset = config.stage_smem[up]

    def base(self):
        """First byte of the stages' shared memory."""
        return self.ctx.shared + self.base_offset

    def h(self):
        """First byte of h: a row for each pair, pairs (j, j+4) of columns together."""
        return self.ctx.given["scratch"] + self.ctx.config.stage_scratch[self.up]

    def full(self, at, slot):
        """Barrier of a slot: its copies are there."""
        return at + (self.o.barriers_at + slot * 24)

    def done(self, at, slot):
        """All workers are through."""
        return at + (self.o.barriers_at + slot * 24 + 8)

    def free(self, at, slot):
        """The reducer is through."""
        return at + (self.o.barriers_at + slot * 24 + 16)

    def met(self, at, half):
        """Barrier of a half of the slots of `experts_down`: h of their experts is there."""
        return at + (self.o.met_at + half * 8)

    def slot(self, at, slot):
        """First byte of a slot."""
        return at + slot * self.o.slot_bytes

    def count(self, at):
        """Entries of the list."""
        if self.o.m == 1:
            return Int32(self.o.k)
        return Int32(shared_word(at + (self.o.counts_at + 64)))

    def place(self, at, entry, token):
        """Address of the pair of an entry and a token."""
        return at + (self.o.places_at + entry * 32 + token * 4)

    def pair(self, at, entry, token):
        return Int32(shared_word(self.place(at, entry, token)))

    def pairs(self, at, entry, token):
        """Of this token and the next."""
        words = ins.load_words(self.place(at, entry, token), 8, "shared")
        return [Int32(word) for word in words]

    def share(self, count):
        """Whole rounds of units over the grid, and of those left the logarithm of the parts (1, 2,
        4) that each is cut into, so that no CTA has much more to read than the others."""
        ctas = self.ctx.ctas
        units = count * self.o.up_tiles
        left = units % ctas
        parts = cutlass.select_(left * 2 <= ctas, Int32(1), Int32(0))
        return units - left, cutlass.select_(left * 4 <= ctas, Int32(2), parts)

    def units(self, count):
        """Units, or parts of units, of this CTA."""
        ctx, (whole, parts) = self.ctx, self.share(count)
        left = count * self.o.up_tiles - whole
        return (whole + (left << parts) - ctx.cta + (ctx.ctas - 1)) // ctx.ctas

    def unit(self, i, count):
        """Number i of this CTA: a unit and its part, -1 for all of it."""
        item = self.ctx.cta + i * self.ctx.ctas
        whole, parts = self.share(count)
        after = item - whole
        part = after & ((Int32(1) << parts) - 1)
        cut = (after >= 0) & (parts > 0)
        unit = cutlass.select_(cut, whole + (after >> parts), item)
        return unit, cutlass.select_(cut, part, Int32(-1))

    def in_part(self, part, row, count):
        """Whether a part has row (or column) `row` of 8. Rows j and j+4, of one word of h, meet."""
        _, parts = self.share(count)
        return (part < 0) | ((row % 4) >> (2 - parts) == part)

    def chunks(self, count):
        """Slots of one tile of `experts_down`."""
        return (count + (self.o.entries - 1)) // self.o.entries

    def tiles(self):
        """Tiles of this CTA."""
        ctx = self.ctx
        return (self.o.down_tiles - ctx.cta + (ctx.ctas - 1)) // ctx.ctas


def make_produce(common):
    """The producer's loop over slots."""
    ctx, o, step = common.ctx, common.o, common.step
    w1, w3, w2, s1, s3, s2 = step.operands[3:]
    row, scale_row = o.z // 2, o.z_groups
    down_row, down_scales = o.i // 2, o.i_groups
    scales_at = 16 * o.stride
    down_scales_at = o.entries * o.rows * down_row

    def expert_of(at, entry):
        return Int64(Int32(shared_word(at + (o.experts_at + entry * 4))))

    @cute.jit
    def up_slot(at: Int32, c: Int32, slot: Int32, count: Int32, part: Int32):
        """8 gate rows, or 8 up rows, one a lane, and their scales."""
        unit, portion = common.unit(c, count)
        entry = unit // o.up_tiles
        first = expert_of(at, entry) * o.i + Int64((unit - entry * o.up_tiles) * UP_COLUMNS)
        full, into = common.full(at, slot), common.slot(at, slot)
        if ctx.lane == 0:
            _, parts = common.share(count)
            rows = cutlass.select_(portion < 0, Int32(8), Int32(8) >> parts)
            bulk.expect(full, rows * row + 8 * scale_row)
        cute.arch.sync_warp()
        if (ctx.lane == 8) | ((ctx.lane < 8) & common.in_part(portion, ctx.lane, count)):
            w = [Int64(ctx.address(v).toint()) for v in (w1, w3, s1, s3)]
            is_row, gate = ctx.lane < 8, part == 0
            codes = cutlass.select_(gate, w[0], w[1]) + (first + Int64(ctx.lane)) * row
            scales = cutlass.select_(gate, w[2], w[3]) + first * scale_row
            source = cutlass.select_(is_row, codes, scales)
            target = cutlass.select_(
                is_row, (part * 8 + ctx.lane) * o.stride, scales_at + part * (8 * scale_row)
            )
            size = cutlass.select_(is_row, Int32(row), Int32(8 * scale_row))
            bulk.copy(into + target, source, size, full)

    @cute.jit
    def down_slot(at: Int32, c: Int32, slot: Int32, count: Int32, part: Int32):
        """Rows of an expert a lane, or their scales."""
        chunks = common.chunks(count)
        turn = c // chunks
        begin = (c - turn * chunks) * o.entries
        here = cutlass.min(count - begin, Int32(o.entries))
        tile = ctx.cta + turn * ctx.ctas
        full, into = common.full(at, slot), common.slot(at, slot)
        codes = part == 0
        size = cutlass.select_(codes, Int32(o.rows * down_row), Int32(o.rows * down_scales))
        if ctx.lane == 0:
            bulk.expect(full, here * size)
        cute.arch.sync_warp()
        if ctx.lane < here:
            first = expert_of(at, begin + ctx.lane) * o.z + Int64(tile * o.rows)
            base = [Int64(ctx.address(v).toint()) for v in (w2, s2)]
            source = cutlass.select_(
                codes, base[0] + first * down_row, base[1] + first * down_scales
            )
            target = cutlass.select_(codes, Int32(0), Int32(down_scales_at)) + ctx.lane * size
            bulk.copy(into + target, source, size, full)

    @cute.jit
    def produce(at: Int32, units: Int32, count: Int32):
        """Ask for all slots; the first `units` are of `experts_up`, others let those pass."""
        part = ctx.warp - PRODUCER
        for c in cutlass.range(units + common.tiles() * common.chunks(count), unroll=1):
            turn = c // o.slots
            slot = c - turn * o.slots
            if turn > 0:
                before = (turn - 1) & 1
                if c - o.slots < units:
                    bulk.wait(common.free(at, slot), before)
                else:
                    bulk.wait(common.done(at, slot), before)
            if (c == units) & (units >= LET_PASS):
                last = units - LET_PASS
                bulk.wait(common.full(at, last % o.slots), (last // o.slots) & 1)
            bulk.after_others()
            if c < units:
                up_slot(at, c, slot, count, part)
            else:
                down_slot(at, c - units, slot, count, part)

    return produce


def make_build(common):
    """The list of chosen experts, each once, in order of first choice: what can be prepared above
    the wait, and the rest."""
    ctx, o, step = common.ctx, common.o, common.step
    ids, weights = step.operands[1:3]
    unscale = CODE_SCALE / o.h_scale  # of the results of `experts_down`

    @cute.jit
    def prepare():
        at = common.base()
        if ctx.thread == 0:
            for slot in range_constexpr(o.slots):
                bulk.start(common.full(at, slot), 2)
                bulk.start(common.done(at, slot), WORKERS)
                bulk.start(common.free(at, slot), 1)
            for half in range_constexpr(HALVES):
                bulk.start(common.met(at, half), 1)
            cute.arch.mbarrier_init_fence()
        for i in cutlass.range(ctx.thread, o.pairs * 8, ctx.threads, unroll=1):
            nothing = Int32(-1)
            if const_expr(o.m == 1):
                nothing = cutlass.select_(i % 8 == 0, i // 8, nothing)
            ins.store_words(at + (o.places_at + i * 4), [Uint32(nothing)], 4, "shared")
        if const_expr(o.m > 1):
            for e in cutlass.range(ctx.thread, o.experts, ctx.threads, unroll=1):
                ins.store_words(at + (o.table_at + e * 4), [Uint32(0)], 4, "shared")

    @cute.jit
    def build(at: Int32):
        """Thread p takes pair p."""
        p = ctx.thread
        (ids_from, how), (weights_from, _) = ctx.near(ids), ctx.near(weights)
        cute.arch.sync_threads()  # the route is there, and its memory is free
        mine = Int32(0)
        if p < o.pairs:
            mine = Int32(ins.load_words(ids_from + p * 4, 4, how)[0])
            weight = ins.as_float(ins.load_words(weights_from + p * 4, 4, how)[0])
            ins.store_shared_float(at + (o.weights_at + p * 4), weight * Float32(unscale))
            if const_expr(o.m == 1):
                ins.store_words(at + (o.experts_at + p * 4), [Uint32(mine)], 4, "shared")
        if const_expr(o.m > 1):
            join(at, mine)
        cute.arch.sync_threads()

    @cute.jit
    def join(at: Int32, mine: Int32):
        """Pairs of one expert into one entry. The table holds the tokens of each expert, then its
        entry. The first token's pair makes the entry."""
        p = ctx.thread
        row = at + (o.table_at + mine * 4)
        token = p // o.k
        if p < o.pairs:
            ins.or_shared(row, Int32(1) << token)
        cute.arch.sync_threads()
        before = Int32(shared_word(row)) & ((Int32(1) << token) - 1)
        leads = (before == 0) & (p < o.pairs)
        ballot = Int32(cute.arch.vote_ballot_sync(leads))
        if ctx.lane == 0:
            total = cute.arch.popc(ballot)
            ins.store_words(at + (o.counts_at + ctx.warp * 4), [Uint32(total)], 4, "shared")
        cute.arch.sync_threads()
        entry = cute.arch.popc(ballot & ((Int32(1) << ctx.lane) - 1))
        whole = Int32(0)
        for w in range_constexpr(-(-o.pairs // 32)):
            total = Int32(shared_word(at + (o.counts_at + w * 4)))
            entry += cutlass.select_(w < ctx.warp, total, Int32(0))
            whole += total
        if leads:
            ins.store_words(at + (o.experts_at + entry * 4), [Uint32(mine)], 4, "shared")
            ins.store_words(row, [Uint32(entry)], 4, "shared")
        if p == 0:
            ins.store_words(at + (o.counts_at + 64), [Uint32(whole)], 4, "shared")
        cute.arch.sync_threads()
        if p < o.pairs:
            owner = Int32(shared_word(row))
            ins.store_words(common.place(at, owner, token), [Uint32(p)], 4, "shared")

    return prepare, build


def make_up(ctx, number):
    """Gate, up and activation of every chosen expert, in units of 8 columns."""
    common = Common(ctx, number)
    o, step = common.o, common.step
    prepare, build = make_build(common)
    z = step.operands[0]
    received = ctx.program.producer(z)
    mailbox = None
    if ctx.config.scratch_offset(z) is None and received is not None and received.op == "receive":
        (mailbox,) = received.operands
    lanes_a_row = o.groups  # 16 bytes each of a worker's own part of a row
    scales_at = 16 * o.stride

    def scales_of(row):
        """The worker's scales of a row."""
        first = ctx.warp * o.groups
        if o.z_groups % 4 == 0 and o.groups % 4 != 0:
            return UnalignedScales(row, first, o.groups)
        return Scales(row + first, o.groups)

    def tokens():
        """The worker's columns of token g, bfloat16."""
        g, t = ctx.lane // 4, ctx.lane % 4
        row = cutlass.min(g, Int32(o.m - 1))
        part = cutlass.min(ctx.warp, Int32(o.workers - 1)) * (o.groups * 64)
        place = row * (o.z * 2) + part + t * 16
        if mailbox is None:
            source = ctx.address(z) + place
            return [ins.load_global16(source + q * 64) for q in range(o.groups)]
        places = [ctx.stage_of(mailbox) + place + q * 64 for q in range(o.groups)]
        return ctx.all_arrived(places, mailbox, 16)

    @cute.jit
    def scaled(at: Int32, words: list):
        """The same times the power of two that fits the token; its inverse is kept."""
        g, t = ctx.lane // 4, ctx.lane % 4
        top = Uint32(0)
        for four in words:
            for word in four:
                top = highest(top, word & Uint32(0x7FFF0000))
                top = highest(top, (word << Uint32(16)) & Uint32(0x7FFF0000))
        top = highest(top, cute.arch.shuffle_sync_bfly(top, 1))
        top = highest(top, cute.arch.shuffle_sync_bfly(top, 2))
        if t == 0:
            place = at + (o.largest_at + ctx.warp * 32 + g * 4)
            ins.store_words(place, [top], 4, "shared")
        ins.barrier(TOGETHER, WORKERS * 32)
        for w in range_constexpr(o.workers):
            top = highest(top, shared_word(at + (o.largest_at + w * 32 + g * 4)))
        exponent = highest(top >> Uint32(23), Uint32(TOKEN_EXPONENT))
        # Of rows with infinities or NaN any scale gives the same.
        exponent = cutlass.select_(exponent > Uint32(253), Uint32(253), exponent)
        if ctx.warp == 0:
            ins.store_words(at + (o.factors_at + g * 4), [exponent << Uint32(23)], 4, "shared")
        factor = ins.as_float((Uint32(254 + TOKEN_EXPONENT) - exponent) << Uint32(23))
        found = []
        for four in words:
            values = [v * factor for word in four for v in ins.unpack_bf16(word)]
            found += [ins.pack_bf16(values[j], values[j + 4]) for j in range(4)]
        return found

    @cute.jit
    def work(at: Int32, units: Int32):
        """A worker's columns of every unit; the sums go where its codes were."""
        x = scaled(at, tokens())
        g, t = ctx.lane // 4, ctx.lane % 4
        codes = ctx.warp * (o.groups * 16)
        mine = codes + (ctx.lane // lanes_a_row) * o.stride + (ctx.lane % lanes_a_row) * 16
        slot, parity = Int32(0), Int32(0)
        for _ in cutlass.range(units, unroll=1):
            bulk.wait(common.full(at, slot), parity)
            here = common.slot(at, slot)
            if ctx.warp < o.workers:
                scales = here + (scales_at + g * o.z_groups)
                sums = multiply(
                    [Float32(0.0) for _ in range(4)],
                    here + (codes + g * o.stride + t * 4),
                    8 * o.stride,
                    scales_of(scales),
                    scales_of(scales + 8 * o.z_groups),
                    x,
                )
                cute.arch.sync_warp()
                ins.store_words(here + mine, [ins.as_word(v) for v in sums], 16, "shared")
            cute.arch.sync_warp()
            if ctx.lane == 0:
                bulk.arrive(common.done(at, slot))
            slot += 1
            if slot == o.slots:
                slot = Int32(0)
                parity = 1 - parity

    @cute.jit
    def put(at: Int32, unit: Int32, part: Int32, count: Int32, word: Uint32):
        """Two columns of h of a unit: lanes g below 4 those of token 2t, the others of 2t+1."""
        g, t = ctx.lane // 4, ctx.lane % 4
        entry = unit // o.up_tiles
        tile = unit - entry * o.up_tiles
        pair = common.pair(at, entry, 2 * t + g // 4)
        if (pair >= 0) & common.in_part(part, g, count):
            place = pair * (o.i * 2) + tile * (UP_COLUMNS * 2) + (g % 4) * 4
            ins.store_words(common.h() + place, [word], 4)

    @cute.jit
    def arrive(said: Int32, through: Int32, old: Uint32):
        """This CTA has no unit left of halves `said` to `through`."""
        if (ctx.lane >= said) & (ctx.lane < through):
            old = context.arrive(ctx, COUNTERS_AT + ctx.lane)
        return through, old

    @cute.jit
    def reduce(at: Int32, units: Int32, count: Int32):
        """Sums of a unit over the workers in order, the activation, and h.

        A lane gets column g of tokens 2t and 2t+1, and exchanges one with column g+4 or g-4. The
        first lanes then wait for all h, each of the experts of a half of the slots.
        """
        g, t = ctx.lane // 4, ctx.lane % 4
        mine = (ctx.lane // lanes_a_row) * o.stride + (ctx.lane % lanes_a_row) * 16
        low = g < 4
        slot, parity = Int32(0), Int32(0)
        first_half = (common.chunks(count) // 2) * (o.entries * o.up_tiles)  # units
        said, old = Int32(0), Uint32(0)
        if units == 0:
            said, old = arrive(said, Int32(HALVES), old)
        for i in cutlass.range(units, unroll=1):
            unit, part = common.unit(i, count)
            following, _ = common.unit(i + 1, count)
            bulk.wait(common.done(at, slot), parity)
            here = common.slot(at, slot) + mine
            total = [Float32(0.0) for _ in range(4)]
            for w in range_constexpr(o.workers):
                terms = ins.load_shared16(here + w * (o.groups * 16))
                total = [a + ins.as_float(b) for a, b in zip(total, terms, strict=True)]
            factors = ins.load_words(at + (o.factors_at + t * 8), 8, "shared")
            values = []
            for j in range_constexpr(2):
                factor = ins.as_float(factors[j])
                gate, up = ins.round_bf16(
                    [
                        v * Float32(CODE_SCALE / 2.0**TOKEN_EXPONENT) * factor
                        for v in (total[j], total[j + 2])
                    ]
                )
                value = situ(gate, up, o.beta, o.linear_beta)
                values.append(ins.round_bf16([value])[0] * Float32(o.h_scale))
            given = cute.arch.shuffle_sync_bfly(cutlass.select_(low, values[1], values[0]), 16)
            word = ins.pack_bf16(
                cutlass.select_(low, values[0], given), cutlass.select_(low, given, values[1])
            )
            put(at, unit, part, count, word)
            cute.arch.sync_warp()
            if ctx.lane == 0:
                bulk.arrive(common.free(at, slot))
            through = cutlass.select_(following < first_half, Int32(0), Int32(1))
            through = cutlass.select_(i + 1 < units, through, Int32(HALVES))
            said, old = arrive(said, through, old)
            slot += 1
            if slot == o.slots:
                slot = Int32(0)
                parity = 1 - parity
        pending = ctx.lane < HALVES
        while pending:
            if context.turned_since(ctx, COUNTERS_AT + ctx.lane, old) != Uint32(0):
                bulk.arrive(common.met(at, ctx.lane))
                pending = Boolean(False)

    @cute.jit
    def run():
        at = common.base()
        build(at)
        count = common.count(at)
        units = common.units(count)
        if (ctx.warp == PRODUCER) | (ctx.warp == PRODUCER + 1):
            common.produce(at, units, count)
        elif ctx.warp == REDUCER:
            reduce(at, units, count)
        elif ctx.warp < WORKERS:
            work(at, units)

    return prepare, run


def make_down(ctx, number):
    """The second map of every chosen expert and the weighted sums, `rows` columns at a time."""
    common = Common(ctx, number)
    o, step = common.o, common.step
    (result,) = step.results
    row, scale_row = o.i // 2, o.i_groups
    scales_at = o.entries * o.rows * row
    pieces = o.i_groups // o.down_groups
    vector = o.vector
    parts = o.rows // vector
    spreads = 8 if any(s.op in PUSHES for s in ctx.program.consumers(result)) else 1

    def fetch(at, entry, count, piece):
        """h of token g for an entry, `down_groups` groups; zeros where it chose another."""
        g, t = ctx.lane // 4, ctx.lane % 4
        exists = cutlass.min(entry, count - 1)
        pair = common.pair(at, exists, g)
        live = cutlass.select_((pair >= 0) & (entry < count), Int32(1), Int32(0))
        source = common.h() + (cutlass.max(pair, Int32(0)) * (o.i * 2) + t * 16)
        source = source + piece * (o.down_groups * 64)
        found = [ins.load_global16(source + q * 64, live) for q in range(o.down_groups)]
        return [word for four in found for word in four]

    def h_of(ahead, at, entry, count, piece):
        """What was fetched ahead, if a slot's groups are few enough for that."""
        return ahead if pieces == 1 else fetch(at, entry, count, piece)

    @cute.jit
    def work(at: Int32, first: Int32, count: Int32):
        """16 rows of one expert of every slot of a tile, slots from number `first` on."""
        g, t = ctx.lane // 4, ctx.lane % 4
        index = ctx.warp // o.halves
        line = (ctx.warp % o.halves) * 16 + g
        chunks = common.chunks(count)
        turn = first // o.slots
        slot = first - turn * o.slots
        parity = turn & 1
        entry = index
        if index >= o.entries:
            entry = count
        bulk.wait(common.met(at, 0), Int32(0))
        if chunks == 1:  # which is the second half
            bulk.wait(common.met(at, 1), Int32(0))
        near = fetch(at, entry, count, 0) if pieces == 1 else []
        for i in cutlass.range(chunks, unroll=1):
            x = near
            if i + 1 == chunks // 2:
                bulk.wait(common.met(at, 1), Int32(0))
            if const_expr(pieces == 1):  # of the next slot, on its way meanwhile
                near = fetch(at, entry + o.entries, count, 0)
            bulk.wait(common.full(at, slot), parity)
            if entry < count:
                here = common.slot(at, slot) + index * (o.rows * row) + line * row + t * 4
                scales = common.slot(at, slot) + (
                    scales_at + index * (o.rows * scale_row) + line * scale_row
                )
                sums = [Float32(0.0) for _ in range(4)]
                for piece in range_constexpr(pieces):
                    sums = multiply(
                        sums,
                        here + piece * (o.down_groups * 16),
                        8 * row,
                        Scales(scales + piece * o.down_groups, o.down_groups),
                        Scales(scales + (piece * o.down_groups + 8 * scale_row), o.down_groups),
                        h_of(x, at, entry, count, piece),
                    )
                pairs = common.pairs(at, entry, 2 * t)
                for j in range_constexpr(2):
                    if pairs[j] >= 0:
                        place = at + (o.results_at + pairs[j] * (o.rows * 4) + line * 4)
                        ins.store_shared_float(place, sums[j])
                        ins.store_shared_float(place + 32, sums[j + 2])
            cute.arch.sync_warp()
            if ctx.lane == 0:
                bulk.arrive(common.done(at, slot))
            entry += o.entries
            slot += 1
            if slot == o.slots:
                slot = Int32(0)
                parity = 1 - parity

    @cute.jit
    def finish(tile: Int32, at: Int32):
        """Each row's choices in order, times their weights."""
        # Stores to peers are predicated, and a predicate must not fold to a constant.
        live = ins.opaque(1) != 0
        columns = o.m * parts
        for n in cutlass.range(ctx.thread, columns * spreads, WORKERS * 32, unroll=1):
            which = n // columns
            i = n - which * columns
            token = i // parts
            column = (i - token * parts) * vector
            results = at + (o.results_at + token * (o.k * o.rows * 4) + column * 4)
            weights = at + (o.weights_at + token * (o.k * 4))
            total = [Float32(0.0) for _ in range(vector)]
            for j in range_constexpr(o.k):
                weight = ins.load_shared_float(weights + j * 4)
                terms = ins.load_words(results + j * (o.rows * 4), vector * 4, "shared")
                total = [a + weight * ins.as_float(b) for a, b in zip(total, terms, strict=True)]
            spread = (which, live) if spreads > 1 else None
            ctx.sink(result, token, tile * o.rows + column, total, live, spread)

    @cute.jit
    def run():
        at = common.base()
        count = common.count(at)
        first = common.units(count)
        if ctx.warp < WORKERS:
            for tile in cutlass.range(ctx.cta, o.down_tiles, ctx.ctas, unroll=1):
                work(at, first, count)
                ins.barrier(TOGETHER, WORKERS * 32)
                finish(tile, at)
                ins.barrier(TOGETHER, WORKERS * 32)
                first += common.chunks(count)

    run.waits = True
    return None, run
