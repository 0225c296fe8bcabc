"""Block phase of AttnRes: scores, softmax and mix of many queries over the snapshots of a row.

A row goes through three phases in a CTA: sums of products by warps (a pair of queries and a slice
of the row each, which reads a snapshot once for both), the softmax of a query by a warp, the mix
by threads, which hold their columns of all snapshots in registers while they go over the queries.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from k3fuse.kernels.attn_res import STEP_COLUMNS
from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.pointwise import LOG2_E

LINE = 128  # bytes of a prefetch
QUERY, TOP, DENOMINATOR, MIXED = 0, 8, 16, 24  # addresses of a query in the table
ENTRY = 32


def fold(values, lane):
    """Sums over the lanes of a warp of a power of two of values: lane l gets that of value
    l * len(values) // 32."""
    offset = 16
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        kept = [cutlass.select_(upper, values[half + i], values[i]) for i in range(half)]
        sent = [cutlass.select_(upper, values[i], values[half + i]) for i in range(half)]
        values = [
            k + cute.arch.shuffle_sync_bfly(s, offset) for k, s in zip(kept, sent, strict=True)
        ]
        offset //= 2
    (total,) = values
    while offset > 0:
        total = total + cute.arch.shuffle_sync_bfly(total, offset)
        offset //= 2
    return total


def unpack4(words):
    """Four bfloat16 as float32."""
    return [value for word in words for value in ins.unpack_bf16(word)]


def make(ctx, number):
    """Rows, or a row's groups of queries, in turn."""
    config, program = ctx.config, ctx.program
    options = config.plans[number].options
    steps = [program.steps[i] for i in config.stages[number].steps]
    snapshots = steps[0].operands[1:]
    eps = steps[0].attribute("eps")
    count, columns, lanes = options.snapshots, options.columns, options.lanes
    pairs, slices, slots, pitch = options.pairs, options.slices, options.slots, options.pitch
    items = ctx.held(snapshots[0]).rows * options.groups
    padded = columns % STEP_COLUMNS != 0
    base = config.stage_smem[number]
    # A few queries to a CTA leave most warps idle: each asks for its next chunk early.
    ahead = options.groups > 1 and options.chunks > 1

    def note(index, step):
        """A query's addresses into the table, by lane 0."""
        table = ctx.shared + base + options.table + index * ENTRY
        values = (step.operands[0], *step.results)
        addresses = [ctx.address(value).toint() for value in values]
        for place in (QUERY, DENOMINATOR):
            ins.asm(
                "st.shared.v2.b64 [{$r0}], { {$r1}, {$r2} };",
                read_only_args=[table + place, *addresses[place // 8 : place // 8 + 2]],
                predicate=ctx.lane == 0,
            )

    @cute.jit
    def before():
        if ctx.warp == 0:
            for index, step in enumerate(steps):
                note(index, step)
        if const_expr(padded):  # columns past the end add nothing to the sums
            rest = (pitch - columns * 2) // 16
            for i in cutlass.range(ctx.thread, count * rest, ctx.threads, unroll=1):
                snapshot = i // rest
                place = ctx.shared + base + snapshot * pitch + columns * 2
                zeros = [cutlass.Uint32(0)] * 4
                ins.store_words(place + (i - snapshot * rest) * 16, zeros, 16, "shared")

    @cute.jit
    def ask():
        """Queries into the L2, dealt out over all warps of the grid."""
        table = ctx.shared + base + options.table
        first = ctx.cta + ctx.warp * ctx.ctas
        for query in cutlass.range(first, options.queries, ctx.ctas * ctx.warps, unroll=1):
            address = ins.load_shared8(table + query * ENTRY + QUERY)
            for at in cutlass.range(ctx.lane * LINE, columns * 4, 32 * LINE, unroll=1):
                ins.asm("prefetch.global.L2 [{$r0}];", read_only_args=[address + Int64(at)])

    @cute.jit
    def fetch(row: Int32):
        """The snapshots of a row into shared memory."""
        for v in cutlass.range(ctx.thread, columns // 8, ctx.threads, unroll=1):
            for s in cutlass.range_constexpr(count):
                place = ctx.shared + base + s * pitch + v * 16
                ins.copy16(place, ctx.address(snapshots[s]) + (row * columns + v * 8) * 2)
        ins.asm("cp.async.wait_all;")

    def query_at(address, column):
        """Four elements of a query."""
        place = cutlass.min(column, Int32(columns - 4)) if padded else column
        words = ins.load_words(address + Int64(place * 4), 16, "global.L1::no_allocate")
        values = [ins.as_float(word) for word in words]
        if padded:
            values = [cutlass.select_(column < columns, v, Float32(0.0)) for v in values]
        return values

    def snapshot_at(s, column):
        """Four elements of a snapshot."""
        return unpack4(ins.load_words(ctx.shared + base + s * pitch + column * 2, 8, "shared"))

    def columns_of(piece, chunk):
        """The first column of a lane in each step of a chunk."""
        step = (piece * options.chunks + chunk) * options.depth
        return [(step + r) * STEP_COLUMNS + ctx.lane * 4 for r in range(options.depth)]

    def queries_of(a, b, piece, chunk):
        """Elements of two queries in each step of a chunk."""
        return [[query_at(a, column), query_at(b, column)] for column in columns_of(piece, chunk)]

    def write_sums(sums, piece, slot):
        """Sums of whole slots, each of `lanes` snapshots, to the board of a slice."""
        total = fold(sums, ctx.lane)
        each = 32 // len(sums)
        place = ctx.shared + base + options.board + (piece * slots + slot) * (lanes * 4)
        place = place + ctx.lane // each * 4
        live = ctx.lane % each == 0
        ins.asm("st.shared.f32 [{$r0}], {$r1};", read_only_args=[place, total], predicate=live)

    @cute.jit
    def dots(a: Int64, b: Int64, piece: Int32, pair: Int32):
        """Products of two queries with all snapshots over a slice."""
        sums = [Float32(0.0)] * (2 * lanes)
        asked = queries_of(a, b, piece, Int32(0)) if ahead else []
        for chunk in cutlass.range(options.chunks, unroll=1):
            now = asked if ahead else queries_of(a, b, piece, chunk)
            if const_expr(ahead):
                following = cutlass.min(chunk + 1, Int32(options.chunks - 1))
                asked = queries_of(a, b, piece, following)
            for column, queries in zip(columns_of(piece, chunk), now, strict=True):
                for s in cutlass.range_constexpr(count):
                    x = snapshot_at(s, column)
                    for q in cutlass.range_constexpr(2):
                        for j in cutlass.range_constexpr(4):
                            sums[q * lanes + s] = sums[q * lanes + s] + x[j] * queries[q][j]
        write_sums(sums, piece, pair * 2)

    @cute.jit
    def squares(piece: Int32):
        """Of all snapshots over a slice."""
        sums = [Float32(0.0)] * lanes
        first = piece * (options.chunks * options.depth)
        for step in cutlass.range(options.chunks * options.depth, unroll=1):
            column = (first + step) * STEP_COLUMNS + ctx.lane * 4
            for s in cutlass.range_constexpr(count):
                for x in snapshot_at(s, column):
                    sums[s] = sums[s] + x * x
        write_sums(sums, piece, 2 * pairs)

    @cute.jit
    def weigh(row: Int32, query: Int32, entry: Int32):
        """Softmax of a query over the snapshots, a lane each."""
        mine = ctx.shared + base + options.board + cutlass.min(ctx.lane, Int32(lanes - 1)) * 4
        dot, square = Float32(0.0), Float32(0.0)
        for piece in cutlass.range(slices, unroll=4):
            at = mine + piece * (slots * lanes * 4)
            dot = dot + ins.load_shared_float(at + query * (lanes * 4))
            square = square + ins.load_shared_float(at + 2 * pairs * lanes * 4)
        score = dot * cute.math.rsqrt(square * Float32(1.0 / columns) + Float32(eps))
        real = ctx.lane < count
        top = cute.arch.warp_reduction_max(cutlass.select_(real, score, Float32(-float("inf"))))
        weight = cute.arch.exp2((score - top) * Float32(LOG2_E))
        weight = cutlass.select_(real, weight, Float32(0.0))
        total = cute.arch.warp_reduction_sum(weight)
        place = ctx.shared + base + options.weights + query * options.weight_pitch
        if ctx.lane * 4 < options.weight_pitch:
            ins.store_shared_float(place + ctx.lane * 4, weight)
        if ctx.lane == 0:
            at = Int64(row * 4)
            ins.store_words(ins.load_shared8(entry + TOP) + at, [ins.as_word(top)], 4)
            ins.store_words(ins.load_shared8(entry + DENOMINATOR) + at, [ins.as_word(total)], 4)

    @cute.jit
    def mix(row: Int32, table: Int32, asked: Int32):
        """Sums of the snapshots by the weights of each query."""
        for v in cutlass.range(ctx.thread, columns // 4, ctx.threads, unroll=1):
            held = [snapshot_at(s, v * 4) for s in range(count)]
            at = Int64((row * columns + v * 4) * 4)
            for query in cutlass.range(asked, unroll=1):
                place = ctx.shared + base + options.weights + query * options.weight_pitch
                weights = []
                for i in cutlass.range_constexpr(options.weight_pitch // 16):
                    weights += [ins.as_float(w) for w in ins.load_shared16(place + i * 16)]
                out = [weights[0] * x for x in held[0]]
                for s in cutlass.range_constexpr(1, count):
                    out = [o + weights[s] * x for o, x in zip(out, held[s], strict=True)]
                target = ins.load_shared8(table + query * ENTRY + MIXED) + at
                ins.store_words(target, [ins.as_word(o) for o in out], 16)

    @cute.jit
    def run():
        cute.arch.sync_threads()  # the table is there
        ask()
        for item in cutlass.range(ctx.cta, items, ctx.ctas, unroll=1):
            row = item // options.groups
            first = (item - row * options.groups) * options.share
            asked = cutlass.min(Int32(options.share), Int32(options.queries) - first)
            table = ctx.shared + base + options.table + first * ENTRY
            fetch(row)
            cute.arch.sync_threads()
            for unit in cutlass.range(ctx.warp, (pairs + 1) * slices, ctx.warps, unroll=1):
                pair = unit // slices
                piece = unit - pair * slices
                if pair < pairs:
                    a = cutlass.min(pair * 2, asked - 1)  # a pair may lack its second query
                    b = cutlass.min(pair * 2 + 1, asked - 1)
                    dots(
                        ins.load_shared8(table + a * ENTRY + QUERY),
                        ins.load_shared8(table + b * ENTRY + QUERY),
                        piece,
                        pair,
                    )
                else:
                    squares(piece)
            cute.arch.sync_threads()
            for query in cutlass.range(ctx.warp, asked, ctx.warps, unroll=1):
                weigh(row, query, table + query * ENTRY)
            cute.arch.sync_threads()
            mix(row, table, asked)
            cute.arch.sync_threads()

    return before, run
