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
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import bulk
from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.mxfp4 import Scales, half_codes, shared_word
from k3fuse.kernels.device.pointwise import situ
from k3fuse.kernels.experts_few import CODE_SCALE, PRODUCER, REDUCER, UP_COLUMNS, WORKERS
from k3fuse.kernels.stages import PUSHES


def pack_half(low, high):
    """Two float32 rounded to float16 in one word."""
    return ins.asm(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def mma_half(sums, a, b):
    """m16n8k16 of float16: sums + a b, with float32 sums in four registers a lane."""
    return list(
        ins.asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *sums],
        )
    )


def highest(a, b):
    """The larger of two words."""
    return ins.asm(
        "max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def multiply(sums, rows, step, scales, scale_step, groups, x):
    """Add 16 rows times 8 tokens. rows, scales: addresses of this lane's codes and scales in its
    first row; step, scale_step: from there to its second. x: four words a group."""
    zero = [Float32(0.0)] * 4
    words = [(shared_word(rows + q * 16), shared_word(rows + (step + q * 16))) for q in range(groups)]
    low_scales, high_scales = Scales(scales, groups), Scales(scales + scale_step, groups)
    for q in range(groups):
        low, high = half_codes(words[q][0]), half_codes(words[q][1])
        part = zero
        for h in (0, 2):
            a = [low[h], high[h], low[h + 1], high[h + 1]]
            part = mma_half(part, a, x[4 * q + h : 4 * q + h + 2])
        a, b = low_scales.value(q), high_scales.value(q)
        sums = [
            sums[0] + part[0] * a,
            sums[1] + part[1] * a,
            sums[2] + part[2] * b,
            sums[3] + part[3] * b,
        ]
    nan = Float32(float("nan"))
    low_bad, high_bad = low_scales.has_nan() != Uint32(0), high_scales.has_nan() != Uint32(0)
    return [cutlass.select_(low_bad if j < 2 else high_bad, nan, sums[j]) for j in range(4)]


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
        self.o = o = config.plans[up].options
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
        return at + slot * 24

    def done(self, at, slot):
        """All workers are through."""
        return at + (slot * 24 + 8)

    def free(self, at, slot):
        """The reducer is through."""
        return at + (slot * 24 + 16)

    def slot(self, at, slot):
        """First byte of a slot."""
        return at + (self.o.slots_at + slot * self.o.slot_bytes)

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

    def units(self, count):
        """Units of this CTA."""
        ctx = self.ctx
        return (count * self.o.up_tiles - ctx.cta + (ctx.ctas - 1)) // ctx.ctas

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
    def up_slot(at: Int32, c: Int32, slot: Int32):
        """A row a lane: 8 gate rows, 8 up rows; then the scales of either."""
        unit = ctx.cta + c * ctx.ctas
        entry = unit // o.up_tiles
        first = expert_of(at, entry) * o.i + Int64((unit - entry * o.up_tiles) * UP_COLUMNS)
        full, into = common.full(at, slot), common.slot(at, slot)
        if ctx.lane == 0:
            bulk.expect(full, Int32(16 * (row + scale_row)))
        cute.arch.sync_warp()
        if ctx.lane < 16:
            gate, up = (Int64(ctx.address(v).toint()) for v in (w1, w3))
            source = cutlass.select_(ctx.lane < 8, gate, up)
            source = source + (first + Int64(ctx.lane % 8)) * row
            bulk.copy(into + ctx.lane * o.stride, source, Int32(row), full)
        elif ctx.lane < 18:
            gate, up = (Int64(ctx.address(v).toint()) for v in (s1, s3))
            source = cutlass.select_(ctx.lane == 16, gate, up) + first * scale_row
            target = into + (scales_at + (ctx.lane - 16) * (8 * scale_row))
            bulk.copy(target, source, Int32(8 * scale_row), full)

    @cute.jit
    def down_slot(at: Int32, c: Int32, slot: Int32, count: Int32):
        """An expert's rows a lane, its scales another."""
        chunks = common.chunks(count)
        turn = c // chunks
        begin = (c - turn * chunks) * o.entries
        here = cutlass.min(count - begin, Int32(o.entries))
        tile = ctx.cta + turn * ctx.ctas
        full, into = common.full(at, slot), common.slot(at, slot)
        if ctx.lane == 0:
            bulk.expect(full, here * (o.rows * (down_row + down_scales)))
        cute.arch.sync_warp()
        index = ctx.lane % 16
        if index < here:
            first = expert_of(at, begin + index) * o.z + Int64(tile * o.rows)
            codes, scales = (Int64(ctx.address(v).toint()) for v in (w2, s2))
            if ctx.lane < 16:
                target = into + index * (o.rows * down_row)
                bulk.copy(target, codes + first * down_row, Int32(o.rows * down_row), full)
            else:
                target = into + (down_scales_at + index * (o.rows * down_scales))
                size = Int32(o.rows * down_scales)
                bulk.copy(target, scales + first * down_scales, size, full)

    @cute.jit
    def produce(at: Int32, begin: Int32, end: Int32, units: Int32, count: Int32):
        """Load slots `begin` to `end`; the first `units` of all are of `experts_up`."""
        for c in cutlass.range(begin, end, unroll=1):
            turn = c // o.slots
            slot = c - turn * o.slots
            if turn > 0:
                before = (turn - 1) & 1
                if c - o.slots < units:
                    bulk.wait(common.free(at, slot), before)
                else:
                    bulk.wait(common.done(at, slot), before)
            bulk.after_others()
            if c < units:
                up_slot(at, c, slot)
            else:
                down_slot(at, c - units, slot, count)

    return produce


def make_build(common):
    """The list of chosen experts: each once, in order of first choice."""
    ctx, o, step = common.ctx, common.o, common.step
    ids, weights = step.operands[1:3]
    unscale = CODE_SCALE / o.h_scale  # of the results of `experts_down`

    @cute.jit
    def build(at: Int32):
        cute.arch.sync_threads()  # this memory had other users
        if ctx.thread < o.slots:
            bulk.start(common.full(at, ctx.thread), 1)
            bulk.start(common.done(at, ctx.thread), WORKERS)
            bulk.start(common.free(at, ctx.thread), 1)
        cute.arch.mbarrier_init_fence()
        for p in cutlass.range(ctx.thread, o.pairs, ctx.threads, unroll=1):
            words = ins.load_words(ctx.address(ids) + p * 4, 4)
            ins.store_words(at + (o.ids_at + p * 4), words, 4, "shared")
            weight = ins.as_float(ins.load_words(ctx.address(weights) + p * 4, 4)[0])
            ins.store_shared_float(at + (o.weights_at + p * 4), weight * Float32(unscale))
        for i in cutlass.range(ctx.thread, o.pairs * 8, ctx.threads, unroll=1):
            nothing = Int32(-1)
            if const_expr(o.m == 1):
                nothing = cutlass.select_(i % 8 == 0, i // 8, nothing)
            ins.store_words(at + (o.places_at + i * 4), [Uint32(nothing)], 4, "shared")
        cute.arch.sync_threads()
        if const_expr(o.m > 1):
            join(at)

    @cute.jit
    def join(at: Int32):
        """Pairs of one expert into one entry. Thread p takes pair p."""
        p = ctx.thread
        mine = Int32(shared_word(at + (o.ids_at + cutlass.min(p, Int32(o.pairs - 1)) * 4)))
        first = p
        for q in cutlass.range(0, o.pairs, 4, unroll=2):
            others = ins.load_shared16(at + (o.ids_at + q * 4))
            for j in range_constexpr(4):
                same = (Int32(others[j]) == mine) & (q + j < first)
                first = cutlass.select_(same, q + j, first)
        leads = (first == p) & (p < o.pairs)
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
            ins.store_words(at + (o.owners_at + p * 4), [Uint32(entry)], 4, "shared")
        if p == 0:
            ins.store_words(at + (o.counts_at + 64), [Uint32(whole)], 4, "shared")
        cute.arch.sync_threads()
        if p < o.pairs:
            owner = Int32(shared_word(at + (o.owners_at + first * 4)))
            ins.store_words(common.place(at, owner, p // o.k), [Uint32(p)], 4, "shared")
        cute.arch.sync_threads()

    return build


def make_up(ctx, number):
    """Gate, up and activation of every chosen expert, in units of 8 columns."""
    common = Common(ctx, number)
    o, step = common.o, common.step
    build = make_build(common)
    z = step.operands[0]
    lanes_a_row = o.groups  # 16 bytes each of a worker's own part of a row
    scales_at = 16 * o.stride

    def tokens():
        """The worker's columns of token g, bfloat16."""
        g, t = ctx.lane // 4, ctx.lane % 4
        row = cutlass.min(g, Int32(o.m - 1))
        part = cutlass.min(ctx.warp, Int32(o.workers - 1)) * (o.groups * 64)
        source = ctx.address(z) + (row * (o.z * 2) + part + t * 16)
        return [ins.load_global16(source + q * 64) for q in range(o.groups)]

    @cute.jit
    def scaled(at: Int32, words: list):
        """The same as float16, times the power of two that fits the token; its inverse is kept."""
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
        ins.barrier(1, WORKERS * 32)
        for w in range_constexpr(o.workers):
            top = highest(top, shared_word(at + (o.largest_at + w * 32 + g * 4)))
        exponent = highest(top >> Uint32(23), Uint32(1))
        # Of rows with infinities or NaN any scale gives the same.
        exponent = cutlass.select_(exponent > Uint32(253), Uint32(253), exponent)
        if ctx.warp == 0:
            ins.store_words(at + (o.factors_at + g * 4), [exponent << Uint32(23)], 4, "shared")
        factor = ins.as_float((Uint32(254) - exponent) << Uint32(23))
        found = []
        for four in words:
            values = [v * factor for word in four for v in ins.unpack_bf16(word)]
            found += [pack_half(values[j], values[j + 4]) for j in range(4)]
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
                sums = multiply(
                    [Float32(0.0) for _ in range(4)],
                    here + (codes + g * o.stride + t * 4),
                    8 * o.stride,
                    here + (scales_at + g * o.z_groups + ctx.warp * o.groups),
                    8 * o.z_groups,
                    o.groups,
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
    def reduce(at: Int32, units: Int32):
        """Sums of a unit over the workers in order, the activation, and h.

        A lane gets column g of tokens 2t and 2t+1, and exchanges one with column g+4 or g-4.
        """
        g, t = ctx.lane // 4, ctx.lane % 4
        mine = (ctx.lane // lanes_a_row) * o.stride + (ctx.lane % lanes_a_row) * 16
        low = g < 4
        slot, parity = Int32(0), Int32(0)
        for i in cutlass.range(units, unroll=1):
            unit = ctx.cta + i * ctx.ctas
            entry = unit // o.up_tiles
            tile = unit - entry * o.up_tiles
            pairs = common.pairs(at, entry, 2 * t)
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
                    [v * Float32(CODE_SCALE) * factor for v in (total[j], total[j + 2])]
                )
                value = situ(gate, up, o.beta, o.linear_beta)
                values.append(ins.round_bf16([value])[0] * Float32(o.h_scale))
            given = cute.arch.shuffle_sync_bfly(cutlass.select_(low, values[1], values[0]), 16)
            word = pack_half(
                cutlass.select_(low, values[0], given), cutlass.select_(low, given, values[1])
            )
            pair = cutlass.select_(low, pairs[0], pairs[1])
            if pair >= 0:
                place = pair * (o.i * 2) + tile * (UP_COLUMNS * 2) + (g % 4) * 4
                ins.store_words(common.h() + place, [word], 4)
            cute.arch.sync_warp()
            if ctx.lane == 0:
                bulk.arrive(common.free(at, slot))
            slot += 1
            if slot == o.slots:
                slot = Int32(0)
                parity = 1 - parity

    @cute.jit
    def run():
        at = common.base()
        build(at)
        count = common.count(at)
        units = common.units(count)
        if ctx.warp == PRODUCER:
            ahead = cutlass.min(common.tiles() * common.chunks(count), Int32(o.slots))
            common.produce(at, Int32(0), units + ahead, units, count)
        elif ctx.warp == REDUCER:
            reduce(at, units)
        elif ctx.warp < WORKERS:
            work(at, units)

    return None, run


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
        near = fetch(at, entry, count, 0)
        for _ in cutlass.range(chunks, unroll=1):
            x = near
            if const_expr(pieces == 1):
                near = fetch(at, entry + o.entries, count, 0)
            bulk.wait(common.full(at, slot), parity)
            if entry < count:
                here = common.slot(at, slot) + index * (o.rows * row) + line * row + t * 4
                scales = common.slot(at, slot) + (
                    scales_at + index * (o.rows * scale_row) + line * scale_row
                )
                sums = [Float32(0.0) for _ in range(4)]
                for piece in range_constexpr(pieces):
                    if const_expr(piece > 0):
                        x = fetch(at, entry, count, piece)
                    sums = multiply(
                        sums,
                        here + piece * (o.down_groups * 16),
                        8 * row,
                        scales + piece * o.down_groups,
                        8 * scale_row,
                        o.down_groups,
                        x,
                    )
                if const_expr(pieces > 1):
                    near = fetch(at, entry + o.entries, count, 0)
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
        for n in cutlass.range(ctx.thread, columns * spreads, ctx.threads, unroll=1):
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
        units = common.units(count)
        chunks = common.chunks(count)
        loads = common.tiles() * chunks
        first = Int32(0)
        for tile in cutlass.range(ctx.cta, o.down_tiles, ctx.ctas, unroll=1):
            if ctx.warp == PRODUCER:
                begin = cutlass.min(loads, first + o.slots)
                end = cutlass.min(loads, first + chunks + o.slots)
                common.produce(at, units + begin, units + end, units, count)
            elif ctx.warp < WORKERS:
                work(at, units + first, count)
            cute.arch.sync_threads()
            finish(tile, at)
            cute.arch.sync_threads()
            first += chunks

    return None, run
