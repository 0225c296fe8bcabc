"""Row stages: AttnRes merge and RMSNorm over whole rows, with the elementwise work around them."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.context import is_empty, pack, unpack
from k3fuse.kernels.device.pointwise import LOG2_E, Pointwise, rounded
from k3fuse.kernels.program import ITEMSIZE
from k3fuse.kernels.rowwise import BOARDS_BYTES, shape_of, width_of
from k3fuse.kernels.stages import ROW

TRIP_WORDS = 64  # registers that hold terms of sums over ranks on their way


class State:
    """What the parts before the stage hand to it."""

    fetched = ()


def make_row_sum(ctx, number):
    """Sums over all threads that share a row, in a fixed order; the same bits in every thread.

    Each warp puts its sum on a board of every CTA of the cluster: one barrier a sum, since sums in
    turn use two boards.
    """
    cluster, warps = ctx.config.cluster, ctx.workers // 32
    count = cluster * warps
    base = ctx.config.stage_smem[number]
    private = ctx.config.stages[number].private

    @cute.jit
    def row_sum(values: list, turn: Int32):
        board = ctx.shared + base + (turn & 1) * (BOARDS_BYTES // 2)
        sums = [cute.arch.warp_reduction_sum(value) for value in values]
        if const_expr(cluster == 1):
            if ctx.lane == 0:
                for j in range_constexpr(len(sums)):
                    ins.store_shared_float(board + (j * count + ctx.warp) * 4, sums[j])
            ctx.sync_workers()
        elif const_expr(private):  # no barrier of the cluster, whose askers go on
            barrier = ctx.shared + base + BOARDS_BYTES + (turn & 1) * 8
            if ctx.thread == 0:
                ins.expect_bytes(barrier, len(sums) * count * 4)
            place = ctx.cta % cluster * warps + ctx.warp
            if ctx.lane < cluster:
                for j in range_constexpr(len(sums)):
                    at = board + (j * count + place) * 4
                    ins.send_words(at, barrier, ctx.lane, [ins.as_word(sums[j])])
            ins.wait_mbarrier(barrier, (turn >> 1) & 1, ".acquire.cluster")
        else:
            place = ctx.cta % cluster * warps + ctx.warp
            if ctx.lane < cluster:
                for j in range_constexpr(len(sums)):
                    ins.store_in_cta(board + (j * count + place) * 4, ctx.lane, sums[j])
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        totals = []
        for j in range_constexpr(len(sums)):
            total = Float32(0.0)
            for first in range_constexpr(0, count, 32):
                at = cutlass.min(ctx.lane + first, Int32(count - 1))
                term = ins.load_shared_float(board + (j * count + at) * 4)
                total = total + cutlass.select_(ctx.lane + first < count, term, Float32(0.0))
            totals.append(cute.arch.warp_reduction_sum(total))
        return totals

    return row_sum


def make_arrived(ctx):
    """By dtype and bytes of an access: the words at some places of the own mailbox, all on their
    way at once, and again until none is empty."""

    def make(dtype, count):
        @cute.jit
        def arrived(places: list):
            words = [Uint32(0)] * (len(places) * count // 4)
            waiting = Boolean(True)
            while waiting:
                words = [w for p in places for w in ins.load_words(p, count, "volatile.global")]
                waiting = is_empty(words, dtype)
            return words

        return arrived

    return {(d, n): make(d, n) for d in ("bf16", "f32") for n in (4, 8, 16, 32)}


def make(ctx, number):
    """Rows in turn; a thread holds up to four vectors of one, a stride of all threads apart."""
    config, program = ctx.config, ctx.program
    stage = config.stages[number]
    width = width_of(program, stage)
    rows, columns = shape_of(program, stage)
    cluster = config.cluster
    shared_out = stage.private and cluster > 1  # the row's work, of which all CTAs keep the result
    barriers = config.stage_smem[number] + BOARDS_BYTES
    share = columns // width // cluster  # vectors of a CTA
    vectors = -(-share // ctx.workers)
    full = vectors * ctx.workers == share
    steps = [program.steps[i] for i in stage.steps]
    made = {r for step in steps for r in step.results}
    work = Pointwise(ctx, number)
    row_sum = make_row_sum(ctx, number)
    arrived = make_arrived(ctx)
    sums_of_row = sum(step.op in ROW for step in steps)
    vectors_of = {}  # what this thread needs of the weights, by value

    def masked(value, alive):
        return value if full else cutlass.select_(alive, value, Float32(0.0))

    def merge(step, known, row, columns_of, alive, turn):
        """attn_res_merge on what each thread holds."""
        query, top, denominator, mixed, prefix = step.operands
        eps = step.attribute("eps")
        # All loads before the first sum: they are one trip to the L2.
        old = [work.value(mixed, row, c, width, k) for c, k in zip(columns_of, known)]
        (before,) = known[0].get(top) or ctx.load(top, row, 0, 1)
        (total,) = known[0].get(denominator) or ctx.load(denominator, row, 0, 1)
        held = [work.value(prefix, row, c, width, k) for c, k in zip(columns_of, known)]
        asked = vectors_of[query]
        square, dot = Float32(0.0), Float32(0.0)
        for r in range(vectors):
            for x, u in zip(held[r], asked[r]):
                square = square + masked(x * x, alive[r])
                dot = dot + masked(x * u, alive[r])
        square, dot = row_sum([square, dot], turn)
        score = dot * cute.math.rsqrt(
            square * Float32(1.0 / program.values[prefix].width) + Float32(eps)
        )
        largest = cute.arch.fmax(before, score)
        blocks = cute.arch.exp2((before - largest) * Float32(LOG2_E))
        own = cute.arch.exp2((score - largest) * Float32(LOG2_E))
        scale = cute.arch.rcp_approx(blocks * total + own)
        blocks, own = blocks * scale, own * scale
        for r in range(vectors):
            out = [blocks * m + own * x for m, x in zip(old[r], held[r])]
            known[r][step.results[0]] = rounded(out, program.values[step.results[0]].dtype)

    def norm(step, known, row, columns_of, alive, turn):
        """rms_norm on what each thread holds."""
        subject, weight = step.operands
        held = [work.value(subject, row, c, width, k) for c, k in zip(columns_of, known)]
        scales = vectors_of[weight]
        square = Float32(0.0)
        for r in range(vectors):
            for x in held[r]:
                square = square + masked(x * x, alive[r])
        (square,) = row_sum([square], turn)
        factor = cute.math.rsqrt(
            square * Float32(1.0 / program.values[subject].width) + Float32(step.attribute("eps"))
        )
        for r in range(vectors):
            out = [x * factor * w for x, w in zip(held[r], scales[r])]
            known[r][step.results[0]] = rounded(out, program.values[step.results[0]].dtype)

    def row_vector(value, column):
        """Elements of a [D] value, such as the weight of a norm."""
        held = program.values[value]
        size = ITEMSIZE[held.dtype]
        at = ctx.address(value) + column * size
        words = ins.load_words(at, width * size, "global.L1::no_allocate")
        return unpack(words, held.dtype, width)

    def columns_here():
        """First column of each vector of this thread, and whether the vector exists."""
        part = ctx.cta % cluster
        places = [ctx.thread + r * ctx.workers for r in range(vectors)]
        # Threads past the end of the row repeat its last vector: loads need no branch.
        columns_of = [(part * share + cutlass.min(v, Int32(share - 1))) * width for v in places]
        return columns_of, [v < share for v in places]

    def before():
        """Weights of the row steps into registers, above the wait."""
        if shared_out:
            prepare()
        elif cluster > 1:  # nobody writes to a CTA that has not started
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        columns_of, _ = columns_here()
        for step in steps:
            if step.op in ROW:
                value = step.operands[1 if step.op == "rms_norm" else 0]
                vectors_of[value] = [row_vector(value, c) for c in columns_of]

    @cute.jit
    def prepare():
        """Barriers of what the CTAs of a cluster send one another."""
        if ctx.thread == 0:
            for i in range_constexpr(3):
                ins.init_mbarrier(ctx.shared + barriers + i * 8, 1)
            ins.expect_bytes(ctx.shared + barriers + 16, rows * columns * 2)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()

    def slots_read():
        """Sums over ranks that the stage reads at its own columns."""
        found, todo = [], [operand for step in steps for operand in step.operands]
        for value in todo:
            if value not in work.inline:
                continue
            step = program.producer(value)
            if step.op == "sum_slots" and value not in found:
                found.append(value)
            if step.op not in ("sum_slots", "slice", "embedding"):
                todo += step.operands
        return found

    def memory_read():
        """Rows in memory that the stage reads at its own columns."""
        found, todo = [], [operand for step in steps for operand in step.operands]
        for value in todo:
            held, step = program.values[value], program.producer(value)
            if value in work.inline and step.op not in ("sum_slots", "slice", "embedding"):
                todo += step.operands
            whole = held.shape[:1] == (rows,) and held.width == columns
            if step is None and held.place == "activation" and whole and value not in found:
                found.append(value)
        return found

    def sum_all(value, row, columns_of):
        """The sum over ranks of all vectors of this thread, in as few trips as registers allow."""
        (mailbox,) = program.producer(value).operands
        held = program.values[mailbox]
        slots, row_width = held.shape[0], held.shape[2]
        size = ITEMSIZE[held.dtype]
        count = width * size
        words = slots * count // 4
        if ctx.debug or count < 4 or words > TRIP_WORDS:  # debugging bounds every spin
            return [ctx.sum_slots(mailbox, row, c, width) for c in columns_of]
        base = ctx.stage_of(mailbox) + row * (row_width * size)
        step = max(1, TRIP_WORDS // words)
        totals = []
        for r in range(0, len(columns_of), step):
            places = [
                base + (c * size + s * (held.shape[1] * row_width * size))
                for c in columns_of[r : r + step]
                for s in range(slots)
            ]
            seen = arrived[held.dtype, count](places)
            for v in range(len(places) // slots):
                total = [Float32(0.0)] * width
                for s in range(slots):
                    at = (v * slots + s) * (count // 4)
                    terms = unpack(seen[at : at + count // 4], held.dtype, width)
                    total = [a + b for a, b in zip(total, terms)]
                totals.append(total)
        return totals

    def numbers_read():
        """Single numbers in memory that merges read."""
        found = [v for step in steps if step.op == "attn_res_merge" for v in step.operands[1:3]]
        return [v for v in found if program.producer(v) is None]

    ahead = slots_read()
    early = memory_read()
    numbers = numbers_read()
    single = rows == 1
    state = State()

    def fetch():
        """Ask for what lies in memory before anything else behind the wait."""
        columns_of, _ = columns_here()
        state.fetched = [ctx.load(v, Int32(0), c, width) for c in columns_of for v in early]
        state.fetched += [ctx.load(v, Int32(0), 0, 1) for v in numbers]

    def one_row(row, turn, writes, fetched):
        """All steps of one row. turn: sums done before; writes: whether this CTA is the one to
        store its results; fetched: what lies in memory, or nothing."""
        columns_of, alive = columns_here()
        known = [{} for _ in range(vectors)]
        whole = len(columns_of) * len(early)
        for number, values in enumerate(fetched[:whole]):
            known[number // len(early)][early[number % len(early)]] = values
        known[0].update(zip(numbers, fetched[whole:]))
        for value in ahead:
            for at, total in zip(known, sum_all(value, row, columns_of)):
                at[value] = rounded(total, program.values[value].dtype)
        for step in steps:
            if step.op in ROW:
                do = merge if step.op == "attn_res_merge" else norm
                do(step, known, row, columns_of, alive, turn)
                turn = turn + 1
        for r in range(vectors):
            live = writes if full else (alive[r] if writes is None else alive[r] & writes)
            work.finish(known[r], row, columns_of[r], width, live)
            for value in made:
                offset = config.private_offset(value)
                if offset is not None:
                    held = program.values[value]
                    words = pack(known[r][value], held.dtype)
                    size = ITEMSIZE[held.dtype]
                    at = ctx.shared + offset + (row * held.width + columns_of[r]) * size
                    if shared_out:
                        send_row(at, words, alive[r])
                    else:
                        here = None if full else alive[r]
                        ins.store_words(at, words, width * size, "shared", here)

    @cute.jit
    def send_row(at: Int32, words: list, alive: Boolean):
        if alive:
            for cta in range_constexpr(cluster):
                ins.send_words(at, ctx.shared + barriers + 16, Int32(cta), words)

    @cute.jit
    def all_rows(fetched: list):
        if const_expr(stage.private):
            if ctx.thread < ctx.workers:
                if const_expr(shared_out):
                    cute.arch.cluster_wait()
                if const_expr(single):
                    one_row(Int32(0), Int32(0), ctx.cta < cluster, fetched)
                else:
                    groups = ctx.ctas // cluster
                    for row in cutlass.range(rows, unroll=1):
                        one_row(row, row * sums_of_row, row % groups == ctx.cta // cluster, [])
                if const_expr(shared_out):
                    ins.wait_mbarrier(ctx.shared + barriers + 16, Int32(0), ".acquire.cluster")
            if const_expr(not shared_out):
                ctx.sync_workers()
        elif const_expr(single):
            if ctx.cta < cluster:
                one_row(Int32(0), Int32(0), None, fetched)
        else:
            stride = ctx.ctas // cluster
            for row in cutlass.range(ctx.cta // cluster, rows, stride, unroll=1):
                one_row(row, row // stride * sums_of_row, None, [])

    def run():
        all_rows(list(state.fetched))

    if config.rings and stage.level == 0 and rows == 1 and early:
        run.fetch = fetch
    return before, run
