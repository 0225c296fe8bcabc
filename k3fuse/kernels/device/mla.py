"""Latent attention on the paged cache: append, absorbed query, split-KV decoding and its merge."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.context import pack
from k3fuse.kernels.device.pointwise import LOG2_E, Pointwise
from k3fuse.kernels.mla import (
    COLUMNS,
    MERGE_COLUMNS,
    QUERIES,
    SCORE_PITCH,
    TILE,
    WARPS,
    WEIGHT_PITCH,
    anchor,
    attention_of,
    padded,
    staged_tokens,
)

INFINITY = float("inf")
LINE = 128


def load_number(address, index):
    """An int32 of an array of inputs."""
    return Int32(ins.load_words(address + index * 4, 4)[0])


def load_matrices(address, transposed=False):
    """Four 8 x 8 blocks of 16-bit elements as operands of a tensor-core product; each lane gives
    the address of one row, lanes 0-7 of the first block and so on."""
    kind = ".trans" if transposed else ""
    return list(
        ins.asm(
            f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {ins.WORDS}, [{{$r0}}];",
            write_only_types=ins.FOUR,
            read_only_args=[address],
        )
    )


def make(ctx, number):
    """The stage of that number."""
    kinds = {
        "append": make_append,
        "absorb": make_absorb,
        "attend": make_attend,
        "attend_merge": make_merge,
    }
    return kinds[ctx.config.stages[number].kind](ctx, number)


def make_append(ctx, number):
    """Every thread takes vectors of the new rows in turn and stores them into their pages."""
    program, stage = ctx.program, ctx.config.stages[number]
    step = anchor(program, stage, "mla_append")
    cache, latent, rope, table, lengths, slots = step.operands
    held = program.values[cache]
    pages, page_size, columns = held.shape
    rank = columns - program.values[rope].width
    rows, most = program.values[latent].rows, program.values[table].width
    per_request = step.attribute("rows_per_request")
    width = ctx.config.plans[number].options.width
    vectors = columns // width
    work = Pointwise(ctx, number)

    def put(value, row, column, place, alive):
        words = pack(work.value(value, row, column, width, {}), "bf16")
        ins.store_words(place, words, width * 2, predicate=alive)

    @cute.jit
    def run():
        first = ctx.cta * ctx.threads + ctx.thread
        for i in cutlass.range(first, rows * vectors, ctx.ctas * ctx.threads, unroll=1):
            row = i // vectors
            column = (i - row * vectors) * width
            request = row // per_request
            position = load_number(ctx.address(lengths), request) + row - request * per_request
            entry = position // page_size
            alive = load_number(ctx.address(slots), request) >= 0
            alive = alive & (position >= 0) & (entry < most)
            entry = cutlass.select_(alive, entry, Int32(0))
            page = load_number(ctx.address(table), request * most + entry)
            alive = alive & (page >= 0) & (page < pages)
            at = Int64(page) * page_size + Int64(position % page_size)
            place = ctx.address(cache) + (at * columns + Int64(column)) * 2
            if column < rank:
                put(latent, row, column, place, alive)
            else:
                put(rope, row, column - rank, place, alive)

    return None, run


def make_absorb(ctx, number):
    """Lanes along the latent columns, warps along nope; sums of the warps meet in shared memory."""
    program, config = ctx.program, ctx.config
    options = config.plans[number].options
    step = anchor(program, config.stages[number], "mla_absorb_query")
    q, weight = step.operands
    (result,) = step.results
    heads, nope, rank = program.values[weight].shape
    rope = step.attribute("rope_dim")
    rows = program.values[q].rows
    tokens, unroll = options.tokens, options.unroll
    pitch = staged_tokens(tokens)
    own = nope // WARPS
    blocks, chunks = -(-rank // COLUMNS), -(-rows // tokens)
    queries_at = config.stage_smem[number]
    sums_at = queries_at + -(-nope * pitch * 4 // 128) * 128
    even = rows % tokens == 0
    pieces = rope // 8

    def row_of(first, token):
        """A row to read: past the end the last one again."""
        return first + token if even else cutlass.min(first + token, Int32(rows - 1))

    def is_row(first, token):
        return None if even else first + token < rows

    def load_weights(head, start, column):
        """`unroll` rows of two columns, one word each."""
        at = ((head * nope + start) * rank + column) * 2
        return [
            ins.load_words(ctx.address(weight) + at + i * rank * 2, 4, "global.L1::no_allocate")[0]
            for i in range(unroll)
        ]

    def multiply(words, start, sums):
        """Add the products of `unroll` weight rows with every token."""
        sums = list(sums)
        for i, word in enumerate(words):
            place = ctx.shared + queries_at + (start + i) * (pitch * 4)
            staged = ins.load_words(place, pitch * 4, "shared")
            low, high = ins.unpack_bf16(word)
            for t in range(tokens):
                x = ins.as_float(staged[t])
                sums[2 * t] = sums[2 * t] + x * low
                sums[2 * t + 1] = sums[2 * t + 1] + x * high
        return sums

    def stage_query(head, first, vector):
        """Eight elements of a token to shared memory, tokens side by side."""
        piece = vector // tokens
        token = vector - piece * tokens
        values = ctx.load(q, row_of(first, token), head * (nope + rope) + piece * 8, 8)
        place = ctx.shared + queries_at + (piece * 8 * pitch + token) * 4
        for e, value in enumerate(values):
            ins.store_shared_float(place + e * pitch * 4, value)

    def copy_rope(head, first, vector):
        """Eight elements of q_pe, as they are."""
        token = vector // pieces
        column = (vector - token * pieces) * 8
        values = ctx.load(q, row_of(first, token), head * (nope + rope) + nope + column, 8)
        place = head * (rank + rope) + rank + column
        ctx.sink(result, first + token, place, values, is_row(first, token))

    def gather(head, first, block, vector):
        """Two columns of a token: the warps' sums, in their order."""
        token = vector // 32
        pair = vector - token * 32
        column = block * COLUMNS + pair * 2
        low, high = Float32(0.0), Float32(0.0)
        for w in range(WARPS):
            place = ctx.shared + sums_at + ((w * tokens + token) * COLUMNS + pair * 2) * 4
            a, b = ins.load_shared_pair(place)
            low, high = low + a, high + b
        live = is_row(first, token)
        if rank % COLUMNS:
            live = column < rank if live is None else live & (column < rank)
        ctx.sink(result, first + token, head * (rank + rope) + column, [low, high], live)

    @cute.jit
    def before():
        """Ask for the weights while the launches before this one still run."""
        lines = program.values[weight].bytes // LINE
        start = ctx.cta * ctx.threads + ctx.thread
        for i in cutlass.range(start, lines, ctx.ctas * ctx.threads, unroll=1):
            place = ctx.address(weight) + i * LINE
            ins.asm("prefetch.global.L2 [{$r0}];", read_only_args=[place])

    @cute.jit
    def run():
        warp = cutlass.min(ctx.warp, Int32(WARPS - 1))
        for item in cutlass.range(ctx.cta, heads * blocks * chunks, ctx.ctas, unroll=1):
            part = item // chunks
            first = (item - part * chunks) * tokens
            head = part // blocks
            block = part - head * blocks
            column = cutlass.min(block * COLUMNS + ctx.lane * 2, Int32(rank - 2))
            words = load_weights(head, warp * own, column)
            for vector in cutlass.range(ctx.thread, tokens * (nope // 8), ctx.threads, unroll=1):
                stage_query(head, first, vector)
            cute.arch.sync_threads()
            if ctx.warp < WARPS:
                sums = multiply(words, warp * own, [Float32(0.0)] * (2 * tokens))
                for u in cutlass.range(1, own // unroll, unroll=1):
                    start = warp * own + u * unroll
                    sums = multiply(load_weights(head, start, column), start, sums)
                for t in range_constexpr(tokens):
                    place = ((warp * tokens + t) * COLUMNS + ctx.lane * 2) * 4
                    ins.store_shared_pair(
                        ctx.shared + sums_at + place, sums[2 * t], sums[2 * t + 1]
                    )
            if block == 0:
                for vector in cutlass.range(ctx.thread, tokens * pieces, ctx.threads, unroll=1):
                    copy_rope(head, first, vector)
            cute.arch.sync_threads()
            for vector in cutlass.range(ctx.thread, tokens * 32, ctx.threads, unroll=1):
                gather(head, first, block, vector)

    return (before if options.ahead else None), run


class Splits:
    """How the context of a request is cut; the same in both stages."""

    def __init__(self, ctx, step, sizes, splits):
        self.ctx, self.sizes, self.splits = ctx, sizes, splits
        self.table, self.lengths, self.slots = step.operands[2:]

    def reach(self, request):
        """Positions that the request's last row sees; 0 for padding."""
        length = load_number(self.ctx.address(self.lengths), request)
        slot = load_number(self.ctx.address(self.slots), request)
        n = cutlass.min(length + self.sizes.per_request, Int32(self.sizes.context))
        return cutlass.select_((slot >= 0) & (n > 0), n, Int32(0))

    def chunk(self, n):
        """Positions of a split: whole tiles."""
        span = self.splits * TILE
        return cutlass.max((n + (span - 1)) // span, Int32(1)) * TILE

    def used(self, n):
        """Splits that hold positions."""
        chunk = self.chunk(n)
        return (n + chunk - 1) // chunk


def make_attend(ctx, number):
    """Flash decoding: an item is one split of a request for 16 (row, head) pairs.

    Scores by tensor core (a warp: 8 positions, every second block of 32 columns), softmax by two
    queries a warp, and again by tensor core the sum of latents (a warp: an eighth of the columns).
    Softmax weights go in as two bfloat16 terms, 16 bits in all.
    """
    program, config = ctx.program, ctx.config
    options = config.plans[number].options
    step = anchor(program, config.stages[number], "mla_attend_latent")
    sizes = attention_of(program, step)
    q, cache, table = step.operands[:3]
    cut = Splits(ctx, step, sizes, options.splits)
    heads, rank, per_request = sizes.heads, sizes.rank, sizes.per_request
    columns, pitch, stages, tiles = sizes.width, options.pitch, options.stages, options.tiles
    groups, splits = options.groups, options.splits
    queries = per_request * heads
    pieces, most = columns // 8, sizes.context // sizes.page_size
    blocks = padded(columns) // 64
    spare = padded(columns) // 8 - pieces
    scale = step.attribute("softmax_scale") * LOG2_E
    mixed = per_request > 1 and heads % QUERIES != 0
    ballots = -(-sizes.requests // 32)
    queries_at = config.stage_smem[number]
    tiles_at = queries_at + QUERIES * pitch
    scores_at = tiles_at + stages * TILE * pitch
    weights_at = scores_at + 2 * QUERIES * SCORE_PITCH
    factors_at = weights_at + 2 * QUERIES * WEIGHT_PITCH
    scratch = config.stage_scratch[number]
    positions = TILE // WARPS  # of a warp, to load
    one_page = sizes.page_size % TILE == 0

    def load_queries(request, first):
        """16 queries to shared memory, zeros past the last."""
        for r in range(-(-QUERIES * pieces // (WARPS * 32))):
            copy_query(request, first, ctx.thread + r * WARPS * 32)

    @cute.jit
    def copy_query(request: Int32, first: Int32, i: Int32):
        if i < QUERIES * pieces:
            query = i // pieces
            piece = i - query * pieces
            index = cutlass.min(first + query, Int32(queries - 1))
            source = ctx.address(q) + ((request * queries + index) * columns + piece * 8) * 2
            size = cutlass.select_(first + query < queries, Int32(16), Int32(0))
            place = ctx.shared + queries_at + query * pitch + piece * 16
            ins.copy16(place, source, size)

    def rows_to_load():
        """Of a tile, by this warp."""
        return [ctx.warp + WARPS * j for j in range(positions)]

    def pages_of(request, start):
        """The pages of the tile's rows, one if none crosses a page; a page that is not assigned
        reads as page 0."""
        pages = []
        for row in [0] if one_page else rows_to_load():
            position = start + row
            entry = cutlass.min(position, Int32(sizes.context - 1)) // sizes.page_size
            page = load_number(ctx.address(table), request * most + entry)
            pages.append(cutlass.min(cutlass.max(page, Int32(0)), Int32(sizes.pages - 1)))
        return pages

    @cute.jit
    def load_tile(pages: list, start: Int32, stop: Int32, buffer: Int32):
        """Positions from `start` on, a row a warp; zeros from `stop` on."""
        if ctx.warp < WARPS:
            rows = rows_to_load()
            for j in range_constexpr(positions):
                page = pages[0] if const_expr(one_page) else pages[j]
                inside = (start + rows[j]) % sizes.page_size
                row = Int64(page) * sizes.page_size + Int64(inside)
                source = ctx.address(cache) + row * (columns * 2)
                size = cutlass.select_(start + rows[j] < stop, Int32(16), Int32(0))
                place = ctx.shared + buffer + rows[j] * pitch
                for r in range_constexpr(-(-pieces // 32)):
                    piece = ctx.lane + r * 32
                    if const_expr(r * 32 + 32 <= pieces):
                        ins.copy16(place + piece * 16, source + piece * 16, size)
                    else:
                        if piece < pieces:
                            ins.copy16(place + piece * 16, source + piece * 16, size)

    def score(buffer):
        """Products of 16 queries with the warp's 8 positions over half of the columns."""
        half, part = ctx.warp // 4, ctx.warp % 4
        key = ctx.shared + buffer + (part * 8 + ctx.lane % 8) * pitch
        key = key + ctx.lane // 8 * 16 + half * 64
        query = ctx.shared + queries_at + ctx.lane % 16 * pitch + ctx.lane // 16 * 16 + half * 64
        even, odd = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        for b in range(blocks):
            k = load_matrices(key + b * 128)
            even = ins.mma_bf16(even, load_matrices(query + b * 128), k[:2])
            odd = ins.mma_bf16(odd, load_matrices(query + b * 128 + 32), k[2:])
        sums = [a + b for a, b in zip(even, odd, strict=True)]
        place = ctx.shared + scores_at + (half * QUERIES + ctx.lane // 4) * SCORE_PITCH
        place = place + (part * 8 + ctx.lane % 4 * 2) * 4
        ins.store_shared_pair(place, sums[0], sums[1])
        ins.store_shared_pair(place + 8 * SCORE_PITCH, sums[2], sums[3])

    def soften(position, first, base, largest, total):
        """Softmax weights of the warp's two queries at the lanes' positions, and what they do to
        the running maxima and sums."""
        largest, total = list(largest), list(total)
        for j in range(2):
            query = ctx.warp * 2 + j
            seen = (position <= base + (first + query) // heads) & (first + query < queries)
            place = ctx.shared + scores_at + query * SCORE_PITCH + ctx.lane * 4
            both = ins.load_shared_float(place)
            both = both + ins.load_shared_float(place + QUERIES * SCORE_PITCH)
            s = cutlass.select_(seen, both * Float32(scale), Float32(-INFINITY))
            top = cute.arch.fmax(largest[j], cute.arch.warp_reduction_max(s))
            shift = cutlass.select_(top == Float32(-INFINITY), Float32(0.0), top)
            weight = cute.arch.exp2(s - shift)
            factor = cute.arch.exp2(largest[j] - shift)
            largest[j] = top
            total[j] = total[j] * factor + cute.arch.warp_reduction_sum(weight)
            (rounded,) = ins.round_bf16([weight])
            place = ctx.shared + weights_at + query * WEIGHT_PITCH + ctx.lane * 2
            for part, value in enumerate((rounded, weight - rounded)):
                at = place + part * QUERIES * WEIGHT_PITCH
                ins.store_words(at, pack([value], "bf16"), 2, "shared")
            ins.store_shared_float(ctx.shared + factors_at + query * 4, factor)
        return largest, total

    def first_column():
        """Of the warp in the second product; a warp without columns repeats the last's."""
        return cutlass.min(ctx.warp * (tiles * 8), Int32(rank - tiles * 8))

    def rescale(sums):
        """Sums of the tiles before, to the new maxima."""
        place = ctx.shared + factors_at + ctx.lane // 4 * 4
        factors = [ins.load_shared_float(place), ins.load_shared_float(place + 32)]
        return [x * factors[i // 2 % 2] for i, x in enumerate(sums)]

    def mix(buffer, sums):
        """Add the weighted latents of a tile, 16 positions after the other."""
        place = ctx.shared + weights_at + ctx.lane % 16 * WEIGHT_PITCH + ctx.lane // 16 * 16
        value = ctx.shared + buffer + ctx.lane % 16 * pitch + first_column() * 2
        if tiles > 1:
            value = value + ctx.lane // 16 * 16  # the tile beside it, for the upper half
        sums = list(sums)
        for k in range(2):
            weights = [
                load_matrices(place + part * QUERIES * WEIGHT_PITCH + k * 32) for part in range(2)
            ]
            for n in range(0, tiles, 2):
                v = load_matrices(value + k * 16 * pitch + n * 16, transposed=True)
                for m in range(n, min(n + 2, tiles)):
                    quad = sums[4 * m : 4 * m + 4]
                    for weight in weights:
                        quad = ins.mma_bf16(quad, weight, v[2 * (m - n) : 2 * (m - n) + 2])
                    sums[4 * m : 4 * m + 4] = quad
        return sums

    @cute.jit
    def hide(buffer: Int32, index: Int32):
        """Zero the latents of one position of the tile."""
        if (index >= 0) & (index < TILE) & (ctx.thread < rank // 8):
            place = ctx.shared + buffer + index * pitch + ctx.thread * 16
            ins.store_words(place, [cutlass.Uint32(0)] * 4, 16, "shared")

    @cute.jit
    def mix_by_row(
        buffer: Int32, start: Int32, base: Int32, low: Int32, high: Int32, first: Int32, sums: list
    ):
        """`mix` where rows of the request see different parts of the tile: a later position may
        hold NaN, and 0 times that must not reach an earlier row. From the last row to the first,
        each takes its own sums and then its position is hidden."""
        passes = Int32(1)
        if start + TILE > base + low + 1:
            passes = high - low + 1
        query = first + ctx.lane // 4
        rows = [query // heads, (query + 8) // heads]
        for i in cutlass.range(passes, unroll=1):
            row = high - i
            if i > 0:
                cute.arch.sync_threads()
                hide(buffer, base + row + 1 - start)
                cute.arch.sync_threads()
            if ctx.warp < WARPS:
                mixed_sums = mix(buffer, sums)
                keep = [(passes == 1) | (r == row) for r in rows]
                sums = [
                    cutlass.select_(keep[n // 2 % 2], new, old)
                    for n, (new, old) in enumerate(zip(mixed_sums, sums, strict=True))
                ]
        return sums

    @cute.jit
    def store(request: Int32, split: Int32, first: Int32, sums: list, largest: list, total: list):
        """The split's sums, maxima and totals to scratch."""
        base = ctx.given["scratch"] + scratch
        for j in range_constexpr(2):
            query = first + ctx.lane // 4 + 8 * j
            column = ctx.warp * (tiles * 8)
            if (query < queries) & (column < rank):
                at = Int64((request * queries + query) * splits + split) * (rank * 4)
                place = base + at + (column + ctx.lane % 4 * 2) * 4
                for n in range_constexpr(tiles):
                    ins.store_global_pair(
                        place + n * 32, sums[4 * n + 2 * j], sums[4 * n + 2 * j + 1]
                    )
            query = first + ctx.warp * 2 + j
            if (query < queries) & (ctx.lane == 0):
                at = Int64((request * queries + query) * splits + split) * 8
                ins.store_global_pair(base + options.stats + at, largest[j], total[j])

    @cute.jit
    def attend(request: Int32, group: Int32, split: Int32, n: Int32):
        """One item. n: positions that the last row of the request sees."""
        first = group * QUERIES
        low, high = first // heads, cutlass.min(first + QUERIES - 1, Int32(queries - 1)) // heads
        base = n - per_request  # row i sees base + i + 1 positions
        chunk = cut.chunk(n)
        start = split * chunk
        stop = cutlass.min(start + chunk, base + high + 1)
        count = cutlass.max((stop - start + (TILE - 1)) // TILE, Int32(0))
        if ctx.warp < WARPS:
            load_queries(request, first)
        pages = pages_of(request, start)
        sums = [Float32(0.0)] * (4 * tiles)
        largest, total = [Float32(-INFINITY)] * 2, [Float32(0.0)] * 2
        # Turn u asks for tile u and works on tile u - stages.
        for u in cutlass.range(count + stages, unroll=1):
            next_pages = pages_of(request, start + (u + 1) * TILE)
            buffer = tiles_at + u % stages * (TILE * pitch)
            if u >= stages:
                here = start + (u - stages) * TILE
                cute.arch.cp_async_wait_group(stages - 1)
                cute.arch.sync_threads()
                if ctx.warp < WARPS:
                    score(buffer)
                cute.arch.sync_threads()
                if ctx.warp < WARPS:
                    largest, total = soften(here + ctx.lane, first, base, largest, total)
                cute.arch.sync_threads()
                if ctx.warp < WARPS:
                    sums = rescale(sums)
                    if const_expr(not mixed):
                        sums = mix(buffer, sums)
                if const_expr(mixed):
                    sums = mix_by_row(buffer, here, base, low, high, first, sums)
            if u < count:
                cute.arch.sync_threads()  # nobody still reads the buffer
                load_tile(pages, start + u * TILE, stop, buffer)
            cute.arch.cp_async_commit_group()
            pages = next_pages
        if ctx.warp < WARPS:
            store(request, split, first, sums, largest, total)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def pick(values, index):
        """Of values that lanes hold, 32 to a list element, the one of `index`."""
        found = cute.arch.shuffle_sync(values[0], index % 32)
        for k in range(1, ballots):
            other = cute.arch.shuffle_sync(values[k], index % 32)
            found = cutlass.select_(index // 32 == k, other, found)
        return found

    def look_up():
        """Of every request, in the lanes of each warp: its positions, and the splits of all up to
        it; and the splits of all."""
        reaches, ends, before = [], [], Int32(0)
        for k in range(ballots):
            request = ctx.lane + k * 32
            n = cut.reach(cutlass.min(request, Int32(sizes.requests - 1)))
            n = cutlass.select_(request < sizes.requests, n, Int32(0))
            end = cut.used(n)
            for far in (1, 2, 4, 8, 16):
                other = cute.arch.shuffle_sync(end, cutlass.max(ctx.lane - far, Int32(0)))
                end = end + cutlass.select_(ctx.lane >= far, other, Int32(0))
            reaches.append(n)
            ends.append(before + end)
            before = cute.arch.shuffle_sync(before + end, 31)
        return reaches, ends, before

    @cute.jit
    def run():
        if const_expr(spare > 0):
            total_rows = QUERIES + stages * TILE
            for i in cutlass.range(ctx.thread, total_rows * spare, ctx.threads, unroll=1):
                row = i // spare
                place = queries_at + row * pitch + (pieces + i - row * spare) * 16
                ins.store_words(ctx.shared + place, [cutlass.Uint32(0)] * 4, 16, "shared")
        reaches, ends, total = look_up()
        # Only splits that hold positions are items: short contexts cost no idle turns.
        for item in cutlass.range(ctx.cta, total * groups, ctx.ctas, unroll=1):
            part = item // groups
            request = Int32(0)
            for k in range_constexpr(ballots):
                done = cute.arch.vote_ballot_sync(ends[k] <= part)
                request = request + cute.arch.popc(done)
            n = pick(reaches, request)
            split = part - pick(ends, request) + cut.used(n)
            attend(request, item - part * groups, split, n)

    return None, run


def make_merge(ctx, number):
    """Warps take the splits of a row and head in turn, lanes four columns; then the warps' sums."""
    program, config = ctx.program, ctx.config
    options = config.plans[number].options
    stage = config.stages[number]
    step = anchor(program, stage, "mla_attend_latent")
    sizes = attention_of(program, step)
    (result,) = step.results
    source = next(
        i for i, s in enumerate(config.stages) if s.kind == "attend" and s.steps == stage.steps
    )
    scratch = config.stage_scratch[source]
    splits, rank = options.splits, sizes.rank
    cut = Splits(ctx, step, sizes, splits)
    lists = -(-splits // 32)  # splits that a lane looks after
    turns = -(-splits // WARPS)  # splits that a warp adds up
    parts = -(-rank // MERGE_COLUMNS) // options.blocks
    whole = rank % MERGE_COLUMNS == 0
    board = config.stage_smem[number]

    def weights_of(pair, used):
        """What each split counts, over the sum of all: lane l holds those of l, l + 32 and on."""
        tops, totals = [], []
        base = ctx.given["scratch"] + scratch + options.stats
        for k in range(lists):
            split = ctx.lane + k * 32
            place = base + Int64(pair * splits + cutlass.min(split, Int32(splits - 1))) * 8
            top, total = (ins.as_float(word) for word in ins.load_words(place, 8))
            tops.append(cutlass.select_(split < used, top, Float32(-INFINITY)))
            totals.append(cutlass.select_(split < used, total, Float32(0.0)))
        largest = tops[0]
        for top in tops[1:]:
            largest = cute.arch.fmax(largest, top)
        largest = cute.arch.warp_reduction_max(largest)
        shift = cutlass.select_(largest == Float32(-INFINITY), Float32(0.0), largest)
        weights = [cute.arch.exp2(top - shift) for top in tops]
        whole_sum = Float32(0.0)
        for weight, total in zip(weights, totals, strict=True):
            whole_sum = whole_sum + weight * total
        inverse = Float32(1.0) / cute.arch.warp_reduction_sum(whole_sum)
        return [weight * inverse for weight in weights]

    def add_up(pair, used, weights, column):
        """The warp's splits at four columns."""
        base = ctx.given["scratch"] + scratch
        loaded = []
        for j in range(turns):
            split = ctx.warp + j * WARPS
            place = base + Int64(pair * splits + split) * (rank * 4) + column * 4
            loaded.append(ins.load_global16(place, Int32(split < used)))
        sums = [Float32(0.0)] * 4
        for j, words in enumerate(loaded):
            weight = cute.arch.shuffle_sync(weights[j // 4], ctx.warp + j % 4 * WARPS)
            # Of a split that holds nothing the weight means nothing.
            weight = cutlass.select_(ctx.warp + j * WARPS < used, weight, Float32(0.0))
            sums = [s + weight * ins.as_float(w) for s, w in zip(sums, words, strict=True)]
        return sums

    def finish(row, head, column, alive):
        """Warp 0: the warps' sums in their order, rounded and stored."""
        sums = [Float32(0.0)] * 4
        for w in range(WARPS):
            words = ins.load_shared16(ctx.shared + board + (w * MERGE_COLUMNS + ctx.lane * 4) * 4)
            sums = [s + ins.as_float(word) for s, word in zip(sums, words, strict=True)]
        sums = [cutlass.select_(alive, s, Float32(0.0)) for s in sums]
        ctx.sink(result, row, head * rank + column, sums, None if whole else column < rank)

    @cute.jit
    def run():
        for item in cutlass.range(ctx.cta, sizes.rows * sizes.heads * parts, ctx.ctas, unroll=1):
            pair = item // parts
            row = pair // sizes.heads
            used = cut.used(cut.reach(row // sizes.per_request))
            weights = weights_of(pair, used)
            for b in cutlass.range(options.blocks, unroll=1):
                column = ((item - pair * parts) * options.blocks + b) * MERGE_COLUMNS
                column = column + ctx.lane * 4
                if ctx.warp < WARPS:
                    sums = add_up(pair, used, weights, cutlass.min(column, Int32(rank - 4)))
                    place = ctx.shared + board + (ctx.warp * MERGE_COLUMNS + ctx.lane * 4) * 4
                    ins.store_words(place, [ins.as_word(s) for s in sums], 16, "shared")
                cute.arch.sync_threads()
                if ctx.warp == 0:
                    finish(row, pair - row * sizes.heads, column, used > 0)
                cute.arch.sync_threads()

    return None, run
