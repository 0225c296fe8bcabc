"""Device code of linear stages; see `k3fuse.kernels.linear` for what they do."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device import linear_cluster
from k3fuse.kernels.device.tiles import (
    make_tiles,
    multiply_few,
    multiply_many,
    quad,
    sums_of,
)
from k3fuse.kernels.linear import STEP, STEP_BYTES, TILE, parts_of
from k3fuse.kernels.linear_cluster import ClusterOptions

STAGING = 15  # named barrier; the groups of warps take those from 1 on


class Held:
    """What the parts before the stage hand to it."""

    fetched = ()


def make(ctx, number):
    """Tiles in turn over the groups of all CTAs."""
    config, program = ctx.config, ctx.program
    if isinstance(config.plans[number].options, ClusterOptions):
        return linear_cluster.make(ctx, number)
    o = config.plans[number].options
    base_offset = config.stage_smem[number]
    private = config.private_offset(o.x)
    chunks = o.chunks
    slot_steps = o.split * o.chunk
    units = -(-o.tiles // o.nt)
    stride = ctx.ctas * o.groups
    triggers = program.trigger != "entry" and number == len(config.stages) - 1
    row_bytes = o.k * 2
    x_width = program.values[o.x].width
    staged = base_offset + o.ring_bytes + o.boards * o.sums_bytes
    tokens_how = "shared" if private is not None or o.tokens_in == "shared" else "global"
    held = Held()

    # Whole tiles for all CTAs, then what is left in parts of `height` rows.
    whole = o.tiles // ctx.ctas * ctx.ctas
    parts = parts_of(o.tiles, ctx.ctas)
    height = TILE // parts
    items = whole + (o.tiles - whole) * parts

    def in_part(part, row):
        """Whether a row of a tile belongs to its part."""
        return (part < 0) | (row // height == part)

    tiles = make_tiles(ctx, number, o, in_part if o.mt == 0 and parts > 1 else None)
    row_address, early_operands, tails = tiles.row_address, tiles.early_operands, tiles.tails

    def following(slot):
        return cutlass.select_(slot == o.depth - 1, Int32(0), slot + 1)

    def inside(step, t):
        """Whether a lane's 8 columns of a step lie within K."""
        return step * STEP + t * 8 < o.k

    def tile_of(unit, j):
        """Tile j of a unit; the last unit repeats the last tile."""
        return cutlass.min(unit * o.nt + j, Int32(o.tiles - 1))

    @cute.jit
    def ask(state: list, ring: Int32, step0: Int32, g: Int32, t: Int32, asked_of: Int32):
        """Start this lane's copies of the next chunk; returns the state after it.

        A group is committed even without copies left, so that the wait can count groups.
        """
        asked, slot, chunk, unit = state[:4]
        rows = state[4:]
        if asked < asked_of:
            column = (step0 + chunk * o.chunk) * STEP + t * 8
            for j in range_constexpr(o.nt):
                for q in range_constexpr(o.chunk):
                    source = rows[j] + Int64((column + q * STEP) * 2)
                    place = ring + (slot * o.slot_bytes + (j * o.chunk + q) * STEP_BYTES)
                    if const_expr(o.ragged):
                        live = inside(step0 + chunk * o.chunk + q, t)
                        # Lanes beyond K copy nothing and write zeros.
                        safe = cutlass.select_(live, source, rows[j])
                        ins.copy16(place, safe, cutlass.select_(live, Int32(16), Int32(0)))
                    else:
                        ins.copy16(place, source)
        cute.arch.cp_async_commit_group()
        chunk += 1
        if chunk == chunks:
            chunk = Int32(0)
            unit += stride
            if asked + 1 < asked_of:
                rows = [row_address(tile_of(unit, j), g) for j in range(o.nt)]
        return [asked + 1, following(slot), chunk, unit, *rows]

    def here():
        """This thread's place: group, part of K, lane coordinates, ring, units to do."""
        g, t = ctx.lane // 4, ctx.lane % 4
        part = ctx.warp % o.split
        group = ctx.warp // o.split
        first = ctx.cta * o.groups + group
        count = cutlass.select_(
            ctx.warp < o.warps, (units - first + stride - 1) // stride, Int32(0)
        )
        count = cutlass.max(count, Int32(0))
        ring = ctx.shared + base_offset + ctx.warp * (o.depth * o.slot_bytes) + ctx.lane * 16
        return g, t, part, group, first, count, ring

    @cute.jit
    def start():
        g, t, part, _, first, count, ring = here()
        rows = [row_address(tile_of(first, j), g) for j in range(o.nt)]
        # Chunk n goes to slot n % depth. State: chunks asked for; slot, chunk of its unit, unit
        # and weight rows of the next.
        state = [Int32(0), Int32(0), Int32(0), first, *rows]
        for _ in cutlass.range(o.depth - 1, unroll=1):
            state = ask(state, ring, part * o.steps, g, t, count * chunks)
        return state

    # -- up to 8 tokens: a warp of its own asks, whole rows of a slot at once -----------------
    def full_of(slot):
        return ctx.shared + (staged + o.staged_bytes) + slot * 8

    def empty_of(slot):
        return full_of(slot) + o.depth * 8

    def asking():
        """Whether this warp asks for weights: one of its own at the end, or the one behind those
        that multiply."""
        return ctx.warp == (ctx.workers // 32 if config.askers else o.warps)

    def count_of_cta():
        return cutlass.max((items - ctx.cta + ctx.ctas - 1) // ctx.ctas, Int32(0))

    def tile_at(item):
        """Tile of an item, and which part of it (-1: all)."""
        if parts == 1:
            return cutlass.min(item, Int32(o.tiles - 1)), Int32(-1)
        after = cutlass.min(item, Int32(items - 1)) - whole
        tile = cutlass.select_(after < 0, item, whole + after // parts)
        return tile, cutlass.select_(after < 0, Int32(-1), after % parts)

    @cute.jit
    def ask_until(state: list, last: Int32, last_item: Int32):
        """Ask for chunks, in order, up to number `last`. State: chunk, which of its item, item,
        its part, weight row of this lane."""
        number, piece, item, part, row = state
        for _ in cutlass.range(number, last, unroll=1):
            if number >= o.ahead:
                other = number - o.ahead
                ins.wait_mbarrier(full_of(other % o.depth), (other // o.depth) & 1)
            if number >= o.depth:
                ins.wait_mbarrier(empty_of(number % o.depth), (number // o.depth - 1) & 1)
            if const_expr(triggers):
                if number == last_item * chunks:
                    cute.arch.griddepcontrol_launch_dependents()
            slot = number % o.depth
            size = Int32(slot_steps * STEP * 2)
            if const_expr(o.k % (slot_steps * STEP) != 0):
                size = cutlass.min(size, row_bytes - piece * (slot_steps * STEP * 2))
            mine = ctx.lane < TILE
            rows = Int32(TILE)
            if const_expr(parts > 1):
                mine = mine & in_part(part, ctx.lane)
                rows = cutlass.select_(part < 0, Int32(TILE), Int32(height))
            if ctx.lane == 0:
                ins.expect_bytes(full_of(slot), size * rows)
            if mine:
                place = ctx.shared + base_offset + slot * o.slot_bytes + ctx.lane * o.row_bytes
                ins.copy_bulk(
                    place, row + Int64(piece * (slot_steps * STEP * 2)), size, full_of(slot)
                )
            number += 1
            piece += 1
            if piece == chunks:
                piece = Int32(0)
                item += ctx.ctas
                tile, part = tile_at(item)
                row = row_address(tile, ctx.lane % TILE)
        return [number, piece, item, part, row]

    # Behind the wait such a launch needs all warps at once: none may be still asking.
    shared_start = any(s.kind == "experts_up" for s in config.stages)

    @cute.jit
    def start_few():
        if ctx.thread < o.depth:
            ins.init_mbarrier(full_of(ctx.thread), 1)
            ins.init_mbarrier(empty_of(ctx.thread), o.split)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        count = count_of_cta()
        first = cutlass.min(count * chunks, Int32(o.depth))
        if const_expr(shared_start):
            for number in cutlass.range(ctx.warp, first, ctx.warps, unroll=1):
                ask_until(state_at(number), number + 1, count - 1)
            return state_at(first)
        state = state_at(Int32(0))
        if asking():
            last = count * chunks if config.askers else first  # others have more to do meanwhile
            state = ask_until(state, last, count - 1)
        return state

    def state_at(number):
        """What asks for a chunk and those after it."""
        item = ctx.cta + number // chunks * ctx.ctas
        tile, part = tile_at(item)
        return [number, number % chunks, item, part, row_address(tile, ctx.lane % TILE)]

    def before():
        held.state = start() if o.mt else start_few()

    def token_base(row, tile):
        """First byte of a token's columns for a tile: a shared address or a pointer."""
        column = 0 if o.heads == 0 else (tile * TILE // o.heads) * o.k
        if private is not None:
            return ctx.shared + private + (row * x_width + column) * 2
        if o.tokens_in == "shared":
            return ctx.shared + staged + row * o.token_bytes
        return ctx.address(o.x) + (row * x_width + column) * 2

    def token_words(base, step, t):
        """16 bytes of a token at a step, zeros beyond K."""
        at = (step * STEP + t * 8) * 2
        if not o.ragged:
            return ins.load_words(base + at, 16, tokens_how)
        live = inside(step, t)
        words = ins.load_words(base + cutlass.select_(live, at, Int32(0)), 16, tokens_how)
        return [cutlass.select_(live, word, Uint32(0)) for word in words]

    def load_tokens(places):
        return [ins.load_words(ctx.address(o.x) + at, 16) for at, _ in places]

    def store_tokens(places, words):
        for (_, to), four in zip(places, words, strict=True):
            ins.store_words(ctx.shared + staged + to, four, 16, "shared")

    def token_places(part):
        """Where this thread's 16-byte pieces of the tokens are, and go in shared memory: of its
        warp's slice, or of everything."""
        if o.groups == 1 and o.mt == 0:
            count, first, stride = o.m * o.steps * 4, ctx.lane, 32
            place = place_in_slice(part)
        else:
            count, first, stride = o.m * (o.k // 8), ctx.thread, o.warps * 32
            place = place_in_row
        return [place(cutlass.min(first + at, Int32(count - 1))) for at in range(0, count, stride)]

    def place_in_slice(part):
        pieces = o.chunk * 4

        def place(number):
            row = number // (chunks * pieces)
            rest = number - row * (chunks * pieces)
            j = rest // pieces
            column = (j * slot_steps + part * o.chunk) * STEP + (rest - j * pieces) * 8
            source = cutlass.min(column, Int32(o.k - 8))
            return (row * o.k + source) * 2, row * o.token_bytes + column * 2

        return place

    def place_in_row(number):
        row = number // (o.k // 8)
        return number * 16, row * o.token_bytes + (number - row * (o.k // 8)) * 16

    @cute.jit
    def stage_tokens(part: Int32, words: list):
        """The tokens into shared memory. words: those on their way already, or none."""
        places = token_places(part)
        if const_expr(len(words) > 0):
            store_tokens(places, words)
        else:
            batch = 4 if o.mt else 8  # loads on their way
            for at in range_constexpr(0, len(places), batch):
                store_tokens(places[at : at + batch], load_tokens(places[at : at + batch]))
        if const_expr(o.groups == 1 and o.mt == 0):
            cute.arch.sync_warp()
        else:
            ins.barrier(STAGING, o.warps * 32)

    def wait_for(number):
        ins.wait_mbarrier(full_of(number % o.depth), (number // o.depth) & 1)

    def release(number):
        """Only after the sums of the chunk were used or stored: else its loads may be under way."""
        ins.arrive_mbarrier(empty_of(number % o.depth), ctx.lane == 0)

    def weights_at(number, part, g, t):
        slot = number % o.depth
        return (
            ctx.shared
            + base_offset
            + slot * o.slot_bytes
            + g * o.row_bytes
            + (part * (o.chunk * STEP) + t * 8) * 2
        )

    def step_of(j, part, q):
        return j * slot_steps + part * o.chunk + q

    def zeros():
        return [Float32(0.0) for _ in range(16)]

    def multiply_chunk(sums, words, at, j, part, t):
        for q in range(o.chunk):
            w = ins.load_shared16(at + q * (STEP * 2))
            if o.ragged:
                live = inside(step_of(j, part, q), t)
                w = [cutlass.select_(live, word, Uint32(0)) for word in w]
            sums = multiply_few(sums, q, words[q], w)
        return sums

    def keep(mine, j, sums, g):
        """Sums on the board, as the warp's term j."""
        exists = None if o.m == TILE else g < o.m
        ins.store_shared_pair(mine + j * (o.split * o.m * TILE * 4), *sums_of(sums), exists)

    def add_up(place, line):
        """All sums of a tile: those of the warps in order, term by term."""
        a, b = Float32(0.0), Float32(0.0)
        for j in range(o.terms):
            part_a, part_b = Float32(0.0), Float32(0.0)
            for r in range(o.split):
                u, v = ins.load_shared_pair(place + (j * o.split + r) * (o.m * line))
                part_a, part_b = part_a + u, part_b + v
            a, b = a + part_a, b + part_b
        return a, b

    def slice_of(base, part, t):
        """The quads of a warp's slice of K."""
        return [
            quad(token_words(base, step_of(j, part, q), t))
            for j in range(chunks)
            for q in range(o.chunk)
        ]

    @cute.jit
    def consume(fetched: list):
        g, t = ctx.lane // 4, ctx.lane % 4
        part = ctx.warp % o.split
        group = ctx.warp // o.split
        row = cutlass.min(g, Int32(o.m - 1))  # lanes beyond M repeat the last token
        line = TILE * 4  # bytes of a token's sums of a tile
        if const_expr(o.tokens_in == "shared" and private is None):
            stage_tokens(part, fetched)
        kept = fetched
        if const_expr(keeps and len(kept) == 0):
            kept = slice_of(token_base(row, Int32(0)), part, t)
        for i in cutlass.range(group, count_of_cta(), o.groups, unroll=1):
            tile, portion = tile_at(ctx.cta + i * ctx.ctas)
            first = i * chunks
            early = early_operands(tile, row, t)
            base = token_base(row, tile)
            # Two buffers: a warp can write its second next tile only after all read this one.
            turn = i // o.groups
            board = ctx.shared + (base_offset + o.ring_bytes) + (turn % 2) * o.sums_bytes
            board += group * (o.terms * o.split * o.m * line)
            sums = zeros()
            mine = board + part * (o.m * line) + g * line + t * 8
            if const_expr(o.tokens_in == "registers" and private is None):
                near = kept
                if const_expr(o.heads != 0):
                    near = slice_of(base, part, t)
                for j in range_constexpr(chunks):
                    wait_for(first + j)
                    if const_expr(j > 0):
                        release(first + (j - 1))
                    at = weights_at(first + j, part, g, t)
                    words = near[j * o.chunk : (j + 1) * o.chunk]
                    sums = multiply_chunk(sums, words, at, j, part, t)
                    if const_expr(o.terms > 1):
                        keep(mine, j, sums, g)
                        sums = zeros()
            else:
                for j in cutlass.range(chunks, unroll=1):
                    words = [
                        quad(token_words(base, step_of(j, part, q), t)) for q in range(o.chunk)
                    ]
                    wait_for(first + j)
                    if j > 0:
                        release(first + (j - 1))
                    at = weights_at(first + j, part, g, t)
                    sums = multiply_chunk(sums, words, at, j, part, t)
                    if const_expr(o.terms > 1):
                        keep(mine, j, sums, g)
                        sums = zeros()
            if const_expr(o.terms == 1 and o.split > 1):
                keep(mine, 0, sums, g)
            release(first + (chunks - 1))
            if const_expr(o.split * o.terms == 1):
                a, b = sums_of(sums)
                tails(tile, portion, row, t, g, a, b, g < o.m, early)
            else:
                ins.barrier(group + 1, o.split * 32)
                if part == turn % o.split:
                    total_a, total_b = add_up(board + row * line + t * 8, line)
                    tails(tile, portion, row, t, g, total_a, total_b, g < o.m, early)

    @cute.jit
    def run_few(state: list, fetched: list):
        if const_expr(config.askers == 0):
            if asking():
                ask_until(state, count_of_cta() * chunks, count_of_cta() - 1)
        if ctx.warp < o.warps:
            consume(fetched)

    @cute.jit
    def run_many(state: list):
        g, t, part, group, first, count, ring = here()
        step0 = part * o.steps
        asked_of = count * chunks
        rows = [
            cutlass.min(g + 8 * h + 16 * m, Int32(o.m - 1)) for m in range(o.mt) for h in range(2)
        ]
        line = o.nt * TILE * 4
        mine = o.tokens * line
        if const_expr(o.tokens_in == "shared" and private is None):
            if ctx.warp < o.warps:
                stage_tokens(part, [])
        slot = Int32(0)
        board = ctx.shared + (base_offset + o.ring_bytes)
        for i in cutlass.range(count, unroll=1):
            unit = first + i * stride
            if const_expr(triggers):
                if i == count - 1:
                    cute.arch.griddepcontrol_launch_dependents()
            sums = [Float32(0.0) for _ in range(4 * o.mt * o.nt)]
            bases = [token_base(row, unit * o.nt) for row in rows]
            for j in cutlass.range(chunks, unroll=1):
                state = ask(state, ring, step0, g, t, asked_of)
                at = step0 + j * o.chunk
                near = [[token_words(base, at + q, t) for base in bases] for q in range(o.chunk)]
                cute.arch.cp_async_wait_group(o.depth - 1)
                for q in range_constexpr(o.chunk):
                    for n in range_constexpr(o.nt):
                        w = ins.load_shared16(
                            ring + (slot * o.slot_bytes + (n * o.chunk + q) * STEP_BYTES)
                        )
                        for m in range_constexpr(o.mt):
                            k = 4 * (m * o.nt + n)
                            new = multiply_many(sums[k : k + 4], near[q][2 * m : 2 * m + 2], w)
                            sums = [*sums[:k], *new, *sums[k + 4 :]]
                slot = following(slot)
            place = board + ctx.warp * mine + g * line + t * 8
            for m in range_constexpr(o.mt):
                for n in range_constexpr(o.nt):
                    k = 4 * (m * o.nt + n)
                    at = place + (16 * m * line + n * TILE * 4)
                    ins.store_shared_pair(at, sums[k], sums[k + 1])
                    ins.store_shared_pair(at + 8 * line, sums[k + 2], sums[k + 3])
            ins.barrier(group + 1, o.split * 32)
            pairs = o.m * o.nt * 4
            for e in cutlass.range(part * 32 + ctx.lane, pairs, o.split * 32, unroll=1):
                token = e // (o.nt * 4)
                pair = e - token * (o.nt * 4)
                n = pair // 4
                total_a = Float32(0.0)
                total_b = Float32(0.0)
                source = board + group * (o.split * mine) + token * line + pair * 8
                for r in range_constexpr(o.split):
                    u, v = ins.load_shared_pair(source + r * mine)
                    total_a = total_a + u
                    total_b = total_b + v
                tile = unit * o.nt + n
                tails(tile, Int32(-1), token, pair - 4 * n, g, total_a, total_b, tile < o.tiles, [])
            ins.barrier(group + 1, o.split * 32)
        drain()

    def drain():
        cute.arch.cp_async_wait_group(0)

    keeps = o.tokens_in == "registers" and private is None and o.heads == 0

    def fetch():
        """Ask for the tokens before anything else behind the wait, if registers can hold them."""
        part = ctx.warp % o.split
        if keeps:
            row = cutlass.min(ctx.lane // 4, Int32(o.m - 1))
            held.fetched = slice_of(token_base(row, Int32(0)), part, ctx.lane % 4)
        else:
            places = token_places(part)
            if len(places) <= 8:
                held.fetched = load_tokens(places)

    def run():
        if o.mt:
            run_many(held.state)
        else:
            run_few(held.state, list(held.fetched))

    outside = config.stages[number].level == 0 and private is None
    outside = outside and all(s.kind != "experts_up" for s in config.stages[:number])
    if config.rings and o.mt == 0 and outside and (keeps or o.tokens_in == "shared"):
        run.fetch = fetch
    return before, run
