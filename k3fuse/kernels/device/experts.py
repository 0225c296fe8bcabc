"""Device code of the routed experts; see `k3fuse.kernels.experts` for what it does.

A slot of a ring holds 16 rows of weights. MXFP4: group q of row r is 16 bytes at q * 256 +
((r & 8) + swizzled(r, q)) * 16, so that neither the copies, which run along a row, nor
the loads, in which a lane takes 4 bytes of its row, meet in a bank. The 16 scales of a group follow
the weights, row by row. bfloat16: a lane's 16 bytes of group q and of rows g, g+8 are at q * 1024
and q * 1024 + 512, from the lane itself.

Within a group of 32 columns lane t of a quad holds columns 8t to 8t+7 of both operands; codes j and
j+4 of its 8 share a register, as a shift leaves them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import experts_few
from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.mxfp4 import Scales, power_of_two, shared_word
from k3fuse.kernels.device.pointwise import silu, situ
from k3fuse.kernels.experts import DOWN_COLUMNS, ENTRY_TOKENS, UP_COLUMNS, WARPS
from k3fuse.kernels.experts_few import FewOptions

SIGNS = 0x80008000
MAGNITUDES = 0x01C001C0
TO_VALUE = 0x7E807E80  # two bfloat16 of 2^126


def opaque(word):
    """A constant that is a register for inline PTX that takes no immediates."""
    return ins.asm(f"mov.b32 {{$w0}}, {word:#x};", write_only_types=[Uint32])


def opaque_zero():
    """A float32 0.0 in a register."""
    return ins.asm("mov.f32 {$w0}, 0f00000000;", write_only_types=[Float32])


def permute(a, b, selector):
    """Bytes of two words."""
    return ins.asm(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def count_bits(mask):
    """Bits that are set in a 64-bit word."""
    return ins.asm("popc.b64 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[mask])


def lane_before(value, distance):
    """The value of the lane `distance` below (its own below lane `distance`)."""
    return ins.asm(
        f"shfl.sync.up.b32 {{$w0}}, {{$r0}}, {distance}, 0, 0xffffffff;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def set_bits(address, word):
    """Atomic or into shared memory."""
    ins.asm("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def copy_small(shared, source, size):
    """Asynchronous copy of 4 or 8 bytes; fewer are copied at once, which waits for memory."""
    if size >= 4:
        ins.asm(
            f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size};",
            read_only_args=[shared, source],
        )
        return
    kind = {1: "u8", 2: "u16"}[size]
    ins.asm(
        f"{{ .reg .b16 h; ld.global.L1::no_allocate.{kind} h, [{{$r1}}]; "
        f"st.shared.{kind} [{{$r0}}], h; }}",
        read_only_args=[shared, source],
    )


class Decoder:
    """Constants of the decoding, in registers."""

    def __init__(self):
        self.to_value = opaque(TO_VALUE)
        self.zero = opaque_zero()

    def codes(self, word):
        """8 MXFP4 codes as four pairs (j, j+4) of bfloat16.

        Sign, exponent and fraction of a code in bits 15 and 8 to 6 of a bfloat16 are its value
        times 2^-126, also where that is subnormal; the product is exact.
        """
        pairs = []
        for j in range(4):
            sign = word << Uint32(12 - 4 * j) if j < 3 else word
            move = 6 - 4 * j
            magnitude = word << Uint32(move) if move > 0 else word >> Uint32(-move)
            small = (sign & Uint32(SIGNS)) | (magnitude & Uint32(MAGNITUDES))
            pairs.append(
                ins.asm(
                    "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
                    write_only_types=[Uint32],
                    read_only_args=[small, self.to_value],
                )
            )
        return pairs


def swizzled(stream, row, q):
    """Where row `row` (of 8) of group q is, in units of 16 bytes: 8 neighbouring lanes of a copy
    hold few groups of some rows or many of one, and are to reach 8 places."""
    step = 8 // stream.chunk if stream.chunk in (1, 2, 4) else 1
    return (row ^ (q * step)) & 7


def multiply(decoder, stream, sums, slot, lane, x):
    """Add a slot's 16 rows times 8 tokens; x: four words of a token for each group."""
    if not stream.packed:
        for q in range(stream.chunk):
            low = ins.load_shared16(slot + (lane * 16 + q * 1024))
            high = ins.load_shared16(slot + (lane * 16 + q * 1024 + 512))
            for h in (0, 2):
                a = [low[h], high[h], low[h + 1], high[h + 1]]
                sums = ins.mma_bf16(sums, a, x[q][h : h + 2])
        return sums
    scales_at = slot + (stream.weight_bytes + (lane // 4) * stream.chunk)
    low_scales = Scales(scales_at, stream.chunk)
    high_scales = Scales(scales_at + 8 * stream.chunk, stream.chunk)
    for q in range(stream.chunk):
        at = slot + (swizzled(stream, lane // 4, q) * 16 + (lane % 4) * 4 + q * 256)
        low = decoder.codes(shared_word(at))
        high = decoder.codes(shared_word(at + 128))
        part = [decoder.zero] * 4
        for h in (0, 2):
            part = ins.mma_bf16(part, [low[h], high[h], low[h + 1], high[h + 1]], x[q][h : h + 2])
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


def copy_weights(stream, slot, lane, sources, joined):
    """Ask for the weights of a slot. sources: first byte of the slot in rows 0 and 8.

    joined: rows 8 to 15 follow rows 0 to 7 in memory. Lanes without a piece repeat one.
    """
    if not stream.packed:
        for q in range(stream.chunk):
            for half, source in enumerate(sources):
                at = (lane // 4) * stream.row_bytes + (lane % 4) * 16 + q * 64
                ins.copy16(slot + (lane * 16 + q * 1024 + half * 512), source + at)
        return
    rows = 16 if joined else 8
    pieces = rows * stream.chunk
    for half, source in enumerate(sources[:1] if joined else sources):
        for i in range(-(-pieces // 32)):
            piece = lane + 32 * i if pieces >= 32 * (i + 1) else (lane + 32 * i) % pieces
            row = piece // stream.chunk
            q = piece - row * stream.chunk
            place = (row & 8) + swizzled(stream, row, q)
            at = row * stream.row_bytes + q * 16
            ins.copy16(slot + (q * 256 + half * 128 + place * 16), source + at)


def copy_scales(stream, slot, lane, sources, joined):
    """Ask for the scales of a slot; the same arguments."""
    at = slot + stream.weight_bytes
    if joined and stream.chunks == 1:
        piece = (lane % stream.chunk) * 16
        ins.copy16(at + piece, sources[0] + piece)
        return
    size = power_of_two(stream.chunk, 16)
    rows = 16 if joined else 8
    parts = stream.chunk // size
    pieces = rows * parts
    for half, source in enumerate(sources[:1] if joined else sources):
        for i in range(-(-pieces // 32)):
            piece = (lane + 32 * i) % pieces
            row = piece // parts
            within = (piece - row * parts) * size
            target = at + (half * 8 * stream.chunk + row * stream.chunk + within)
            place = source + (row * stream.groups + within)
            if size == 16:
                ins.copy16(target, place)
            else:
                copy_small(target, place, size)


def token_words(o, source, q):
    """Group q of a row as a lane's B operands; `source` is its first 16 bytes."""
    words = ins.load_global16(source + q * 64)
    if not o.up.packed:
        return words
    return [
        permute(words[0], words[2], 0x5410),
        permute(words[0], words[2], 0x7632),
        permute(words[1], words[3], 0x5410),
        permute(words[1], words[3], 0x7632),
    ]


class make_lists:  # noqa: N801 (a factory, like the stages)
    """Traced helpers for the list of entries."""

    def __init__(self, ctx, step, o):
        ids, weights = step.operands[1:3]
        span = -(-o.experts // (32 * WARPS)) * 32  # experts of a warp

        def id_of(pair):
            return Int32(ins.load_words(ctx.address(ids) + pair * 4, 4)[0])

        @cute.jit
        def keep_weights(at: Int32):
            for pair in cutlass.range(ctx.thread, o.pairs, ctx.threads, unroll=1):
                words = ins.load_words(ctx.address(weights) + pair * 4, 4)
                ins.store_words(at + (o.weights_at + pair * 4), words, 4, "shared")

        @cute.jit
        def single(at: Int32):
            """One token: an entry a choice, in the order of choice."""
            if ctx.thread < o.k:
                words = [Uint32(id_of(ctx.thread)), Uint32(ctx.thread) | Uint32(1 << 16)]
                ins.store_words(at + (o.entries_at + ctx.thread * 8), words, 8, "shared")
            keep_weights(at)
            cute.arch.sync_threads()

        @cute.jit
        def mark(at: Int32):
            """The tokens of each expert as bits."""
            masks = at + o.masks_at
            for e in cutlass.range(ctx.thread, o.experts, ctx.threads, unroll=1):
                ins.store_words(masks + e * 8, [Uint32(0), Uint32(0)], 8, "shared")
            cute.arch.sync_threads()
            for pair in cutlass.range(ctx.thread, o.pairs, ctx.threads, unroll=1):
                token = pair // o.k
                word = masks + (id_of(pair) * 8 + (token // 32) * 4)
                set_bits(word, Uint32(1) << Uint32(token % 32))
            cute.arch.sync_threads()

        @cute.jit
        def place(at: Int32):
            """Entries in order of ids. Counts of pairs and entries run in one word's halves."""
            blocks = span // 32
            first = ctx.warp * span + ctx.lane
            own, upto, counts = [], [], []
            for b in range_constexpr(blocks):
                e = first + b * 32
                there = cutlass.min(e, Int32(o.experts - 1))
                mask = ins.load_shared8(at + (o.masks_at + there * 8))
                count = cutlass.select_(e < o.experts, count_bits(mask), Int32(0))
                value = count | (((count + ENTRY_TOKENS - 1) // ENTRY_TOKENS) << 16)
                running = value
                for distance in (1, 2, 4, 8, 16):
                    below = lane_before(running, distance)
                    running += cutlass.select_(ctx.lane >= distance, below, Int32(0))
                counts.append(count)
                own.append(value)
                upto.append(running)
            whole = [cute.arch.shuffle_sync(value, 31) for value in upto]
            mine = Int32(0)
            for value in whole:
                mine += value
            if ctx.lane == 0:
                ins.store_words(at + (o.totals_at + ctx.warp * 4), [Uint32(mine)], 4, "shared")
            return counts, own, upto, whole

        @cute.jit
        def write(at: Int32, counts: list, own: list, upto: list, whole: list):
            before = Int32(0)
            for w in range_constexpr(WARPS):
                total = Int32(shared_word(at + (o.totals_at + w * 4)))
                before += cutlass.select_(w < ctx.warp, total, Int32(0))
            first = ctx.warp * span + ctx.lane
            for b in range_constexpr(len(own)):
                e = first + b * 32
                start = before + upto[b] - own[b]
                pair = start & 0xFFFF
                entry = start >> 16
                if e < o.experts:
                    ins.store_words(at + (o.firsts_at + e * 4), [Uint32(pair)], 4, "shared")
                left = counts[b]
                while left > 0:
                    size = cutlass.min(left, Int32(ENTRY_TOKENS))
                    words = [Uint32(e), Uint32(pair | (size << 16))]
                    ins.store_words(at + (o.entries_at + entry * 8), words, 8, "shared")
                    entry += 1
                    pair += size
                    left -= size
                before += whole[b]
            if (ctx.warp == WARPS - 1) & (ctx.lane == 0):
                ins.store_words(at + o.count_at, [Uint32(before >> 16)], 4, "shared")

        @cute.jit
        def scatter(at: Int32):
            """Pairs of an expert in order of tokens."""
            for pair in cutlass.range(ctx.thread, o.pairs, ctx.threads, unroll=1):
                e = id_of(pair)
                mask = ins.load_shared8(at + (o.masks_at + e * 8))
                below = mask & ((Int64(1) << Int64(pair // o.k)) - Int64(1))
                index = Int32(shared_word(at + (o.firsts_at + e * 4))) + count_bits(below)
                ins.store_words(at + (o.pairs_at + index * 4), [Uint32(pair)], 4, "shared")

        @cute.jit
        def several(at: Int32):
            mark(at)
            keep_weights(at)
            counts = [Int32(0) for _ in range(span // 32)]
            own = [Int32(0) for _ in range(span // 32)]
            upto = [Int32(0) for _ in range(span // 32)]
            whole = [Int32(0) for _ in range(span // 32)]
            if ctx.warp < WARPS:
                counts, own, upto, whole = place(at)
            cute.arch.sync_threads()
            if ctx.warp < WARPS:
                write(at, counts, own, upto, whole)
            cute.arch.sync_threads()
            scatter(at)
            cute.arch.sync_threads()

        self.build = single if o.m == 1 else several


class make_work:  # noqa: N801 (a factory, like the stages)
    """What both stages share: the list, and the asking of `experts_down`."""

    def __init__(self, ctx, number):
        config = ctx.config
        stage = config.stages[number]
        self.ctx = ctx
        self.step = ctx.program.steps[stage.steps[0]]
        self.up = next(
            n
            for n, s in enumerate(config.stages)
            if s.kind == "experts_up" and s.steps[0] == stage.steps[0]
        )
        self.o = o = config.plans[self.up].options
        stream = o.down
        tile_stride = ctx.ctas
        w2, w2_scale = self.step.operands[5], self.step.operands[-1]

        def following(slot):
            return cutlass.select_(slot == stream.depth - 1, Int32(0), slot + 1)

        @cute.jit
        def advance(state: list, count: Int32):
            """The next chunk: of the entry, of the warp's next entry, of the next tile."""
            slot, tile, entry, chunk = state
            chunk += 1
            if chunk == stream.chunks:
                chunk = Int32(0)
                entry += WARPS
                if entry >= count:
                    entry = ctx.warp
                    tile += tile_stride
            return [following(slot), tile, entry, chunk]

        @cute.jit
        def ask_down(state: list, at: Int32, count: Int32):
            """Start the copies of the warp's next chunk of w2; an empty group past the end."""
            slot, tile, entry, chunk = state
            if (tile < o.down_tiles) & (ctx.warp < cutlass.min(count, Int32(WARPS))):
                expert = Int64(Int32(shared_word(at + (o.entries_at + entry * 8))))
                row = expert * o.z + Int64(tile * DOWN_COLUMNS)
                target = at + (o.ring_at + ctx.warp * stream.ring_bytes)
                target = target + slot * stream.slot_bytes
                unit = stream.row_bytes // stream.groups
                begin = ctx.address(w2) + (
                    row * stream.row_bytes + Int64(chunk * (stream.chunk * unit))
                )
                sources = [begin, begin + 8 * stream.row_bytes]
                copy_weights(stream, target, ctx.lane, sources, True)
                if const_expr(stream.packed):
                    begin = ctx.address(w2_scale) + (
                        row * stream.groups + Int64(chunk * stream.chunk)
                    )
                    copy_scales(stream, target, ctx.lane, [begin], True)
            cute.arch.cp_async_commit_group()
            return advance(state, count)

        self.advance, self.ask_down = advance, ask_down

    def first_state(self):
        """Slot, tile, entry, chunk of the first that a warp asks for in `experts_down`."""
        return [Int32(0), Int32(self.ctx.cta), Int32(self.ctx.warp), Int32(0)]

    def count(self, at):
        """Entries of the list."""
        if self.o.m == 1:
            return Int32(self.o.k)
        return Int32(shared_word(at + self.o.count_at))

    def pair(self, at, first, column):
        """Token and choice of a column of an entry."""
        if self.o.m == 1:
            return first
        return Int32(shared_word(at + (self.o.pairs_at + (first + column) * 4)))

    def entry(self, at, index):
        """First pair and count of an entry."""
        rest = shared_word(at + (self.o.entries_at + index * 8 + 4))
        return Int32(rest & Uint32(0xFFFF)), Int32(rest >> Uint32(16))


def make(ctx, number):
    """The stage of this kind."""
    kind = ctx.config.stages[number].kind
    if isinstance(ctx.config.plans[number].options, FewOptions):
        return (experts_few.make_up if kind == "experts_up" else experts_few.make_down)(ctx, number)
    work = make_work(ctx, number)
    return (make_up if kind == "experts_up" else make_down)(ctx, work)


def make_up(ctx, work):
    """Gate, up and activation of every chosen expert, in units of 8 columns."""
    o, step = work.o, work.step
    stream, split, teams = o.up, o.split, o.teams
    per = stream.chunks // split
    stride = ctx.ctas * teams
    lists = make_lists(ctx, step, o)
    z, w1, w3 = (step.operands[j] for j in (0, 3, 4))
    team_sums = split * 512

    def following(slot):
        return cutlass.select_(slot == stream.depth - 1, Int32(0), slot + 1)

    @cute.jit
    def ask(state: list, at: Int32, ring: Int32, units: Int32):
        """Start the copies of the warp's next chunk; an empty group past the end."""
        slot, unit, turn = state
        if unit < units:
            entry = unit // o.up_tiles
            expert = Int64(Int32(shared_word(at + (o.entries_at + entry * 8))))
            row = expert * o.i + Int64((unit - entry * o.up_tiles) * UP_COLUMNS)
            chunk = turn * split + ctx.warp % split
            target = ring + slot * stream.slot_bytes
            size = stream.row_bytes // stream.groups
            begin = row * stream.row_bytes + Int64(chunk * (stream.chunk * size))
            sources = [ctx.address(w1) + begin, ctx.address(w3) + begin]
            copy_weights(stream, target, ctx.lane, sources, False)
            if const_expr(stream.packed):
                begin = row * stream.groups + Int64(chunk * stream.chunk)
                scales = [ctx.address(step.operands[j]) + begin for j in (6, 7)]
                copy_scales(stream, target, ctx.lane, scales, False)
        cute.arch.cp_async_commit_group()
        turn += 1
        if turn == per:
            turn = Int32(0)
            unit += stride
        return [following(slot), unit, turn]

    def activated(gate, up):
        if o.activation == "silu":
            return silu(gate) * up
        return situ(gate, up, o.beta, o.linear_beta)

    @cute.jit
    def store_h(at: Int32, tile: Int32, first: Int32, tokens: Int32, sums: list):
        """Row g of the tile for tokens 2t and 2t+1, rounded as the reference rounds.

        In each 8 columns those that share a register of the next product lie side by side.
        """
        g, t = ctx.lane // 4, ctx.lane % 4
        h = ctx.given["scratch"] + ctx.config.stage_scratch[work.up]
        spot = (g % 4) * 2 + g // 4 if stream.packed else g
        for j in range_constexpr(2):
            column = 2 * t + j
            gate, up = ins.round_bf16([sums[j], sums[j + 2]])
            value = activated(gate, up)
            live = column < tokens
            pair = work.pair(at, first, cutlass.min(column, tokens - 1))
            place = (pair * o.i + tile * UP_COLUMNS + spot) * 2
            words = [ins.pack_bf16(value, Float32(0.0))]
            ins.store_words(h + place, words, 2, predicate=live)

    @cute.jit
    def units_of_team(at: Int32, team: Int32, part: Int32):
        decoder = Decoder()
        units = work.count(at) * o.up_tiles
        ring = at + (o.ring_at + ctx.warp * stream.ring_bytes)
        begin = team * ctx.ctas + ctx.cta
        g, t = ctx.lane // 4, ctx.lane % 4
        state = [Int32(0), Int32(begin), Int32(0)]
        for _ in cutlass.range(stream.depth - 1, unroll=1):
            state = ask(state, at, ring, units)
        slot = Int32(0)
        flip = Int32(0)
        for unit in cutlass.range(begin, units, stride, unroll=1):
            index = unit // o.up_tiles
            tile = unit - index * o.up_tiles
            first, tokens = work.entry(at, index)
            # Columns past the entry's tokens repeat its last one; their sums are dropped.
            pair = work.pair(at, first, cutlass.min(g, tokens - 1))
            token = pair // o.k
            row = ctx.address(z) + (token * o.z + t * 8) * 2
            sums = [Float32(0.0) for _ in range(4)]
            for turn in cutlass.range(per, unroll=1):
                source = row + (turn * split + part) * (stream.chunk * 64)
                x = [token_words(o, source, q) for q in range(stream.chunk)]
                cute.arch.cp_async_wait_group(stream.depth - 2)
                # All lanes' copies are there, and the slot asked into next was read by all.
                cute.arch.sync_warp()
                state = ask(state, at, ring, units)
                here = ring + slot * stream.slot_bytes
                sums = multiply(decoder, stream, sums, here, ctx.lane, x)
                slot = following(slot)
            if const_expr(split > 1):
                # Two buffers: a warp can write unit n + 2 only after all read unit n.
                buffer = at + (o.sums_at + (flip * teams + team) * team_sums)
                mine = buffer + (part * 512 + ctx.lane * 16)
                ins.store_words(mine, [ins.as_word(v) for v in sums], 16, "shared")
                ins.barrier(team + 1, split * 32)
                if part == 0:
                    total = [Float32(0.0) for _ in range(4)]
                    for r in range_constexpr(split):
                        terms = ins.load_shared16(buffer + (r * 512 + ctx.lane * 16))
                        total = [a + ins.as_float(b) for a, b in zip(total, terms, strict=True)]
                    store_h(at, tile, first, tokens, total)
                flip = Int32(1) - flip
            else:
                store_h(at, tile, first, tokens, sums)

    @cute.jit
    def run():
        at = ctx.shared + ctx.config.stage_smem[work.up]
        cute.arch.sync_threads()  # this memory had other users
        lists.build(at)
        if ctx.warp < split * teams:
            units_of_team(at, ctx.warp // split, ctx.warp % split)
        cute.arch.sync_threads()  # the rings are free
        count = work.count(at)
        if ctx.warp < WARPS:
            state = work.first_state()
            for _ in cutlass.range(o.down.depth - 1, unroll=1):
                state = work.ask_down(state, at, count)

    return None, run


def make_down(ctx, work):
    """The second map of every chosen expert and the weighted sums, 16 columns at a time."""
    o, step = work.o, work.step
    stream = o.down
    vector = o.vector
    parts = DOWN_COLUMNS // vector
    (result,) = step.results

    @cute.jit
    def entries_of_tile(state: list, slot: Int32, at: Int32, count: Int32):
        """The warp's entries, each into the places of its pairs."""
        decoder = Decoder()
        ring = at + (o.ring_at + ctx.warp * stream.ring_bytes)
        h = ctx.given["scratch"] + ctx.config.stage_scratch[work.up]
        g, t = ctx.lane // 4, ctx.lane % 4
        for index in cutlass.range(ctx.warp, count, WARPS, unroll=1):
            first, tokens = work.entry(at, index)
            pair = work.pair(at, first, cutlass.min(g, tokens - 1))
            row = h + (pair * o.i + t * 8) * 2
            sums = [Float32(0.0) for _ in range(4)]
            for chunk in cutlass.range(stream.chunks, unroll=1):
                source = row + chunk * (stream.chunk * 64)
                x = [ins.load_global16(source + q * 64) for q in range(stream.chunk)]
                cute.arch.cp_async_wait_group(stream.depth - 2)
                cute.arch.sync_warp()
                state = work.ask_down(state, at, count)
                here = ring + slot * stream.slot_bytes
                sums = multiply(decoder, stream, sums, here, ctx.lane, x)
                slot = cutlass.select_(slot == stream.depth - 1, Int32(0), slot + 1)
            for j in range_constexpr(2):
                if 2 * t + j < tokens:
                    place = work.pair(at, first, 2 * t + j) * (DOWN_COLUMNS * 4) + g * 4
                    ins.store_shared_float(at + (o.sums_at + place), sums[j])
                    ins.store_shared_float(at + (o.sums_at + 32 + place), sums[j + 2])
        return state, slot

    @cute.jit
    def finish(tile: Int32, at: Int32):
        """Each row's choices in order, times their weights."""
        # Stores to peers are predicated, and a predicate must not fold to a constant.
        live = opaque(1) != Uint32(0)
        for i in cutlass.range(ctx.thread, o.m * parts, ctx.threads, unroll=1):
            token = i // parts
            column = (i - token * parts) * vector
            results = at + (o.sums_at + token * (o.k * DOWN_COLUMNS * 4) + column * 4)
            weights = at + (o.weights_at + token * (o.k * 4))
            total = [Float32(0.0) for _ in range(vector)]
            for j in range_constexpr(o.k):
                weight = ins.load_shared_float(weights + j * 4)
                terms = ins.load_words(results + j * (DOWN_COLUMNS * 4), vector * 4, "shared")
                total = [a + weight * ins.as_float(b) for a, b in zip(total, terms, strict=True)]
            ctx.sink(result, token, tile * DOWN_COLUMNS + column, total, live)

    @cute.jit
    def run():
        at = ctx.shared + ctx.config.stage_smem[work.up]
        count = work.count(at)
        state = work.first_state()
        for _ in cutlass.range(stream.depth - 1, unroll=1):
            state = work.advance(state, count)
        slot = Int32(0)
        for tile in cutlass.range(ctx.cta, o.down_tiles, ctx.ctas, unroll=1):
            if ctx.warp < WARPS:
                state, slot = entries_of_tile(state, slot, at, count)
            cute.arch.sync_threads()
            finish(tile, at)
            cute.arch.sync_threads()

    return None, run
