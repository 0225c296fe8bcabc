"""Row stages: AttnRes merge and RMSNorm over whole rows, with the elementwise work around them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.context import make_block_sum, pack
from k3fuse.kernels.device.pointwise import LOG2_E, Pointwise, rounded
from k3fuse.kernels.program import ITEMSIZE
from k3fuse.kernels.rowwise import shape_of, width_of
from k3fuse.kernels.stages import ROW


def make_cluster_sum(ctx):
    """Sums over the CTAs of a cluster that share a row: in order of the CTAs."""
    cluster = ctx.config.cluster
    block_sum = make_block_sum(ctx)
    if cluster == 1:
        return block_sum

    @cute.jit
    def cluster_sum(values: list):
        totals = block_sum(values)
        board = ctx.shared + ctx.config.board_offset + 512
        rank = ctx.cta % cluster
        cute.arch.cluster_arrive()  # nobody still reads the last sums
        cute.arch.cluster_wait()
        if ctx.thread < cluster:
            for j in range_constexpr(len(totals)):
                ins.store_in_cta(board + (j * cluster + rank) * 4, ctx.thread, totals[j])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        result = []
        for j in range_constexpr(len(totals)):
            total = Float32(0.0)
            for c in range_constexpr(cluster):
                total = total + ins.load_shared_float(board + (j * cluster + c) * 4)
            result.append(total)
        return result

    return cluster_sum


def make(ctx, number):
    """Rows in turn; a thread holds up to four vectors of one, a stride of all threads apart."""
    config, program = ctx.config, ctx.program
    stage = config.stages[number]
    width = width_of(program, stage)
    rows, columns = shape_of(program, stage)
    cluster = config.cluster
    share = columns // width // cluster  # vectors of a CTA
    vectors = -(-share // ctx.threads)
    full = vectors * ctx.threads == share
    steps = [program.steps[i] for i in stage.steps]
    made = {r for step in steps for r in step.results}
    work = Pointwise(ctx, number)
    row_sum = make_cluster_sum(ctx)
    vectors_of = {}  # what this thread needs of the weights, by value

    def masked(value, alive):
        return value if full else cutlass.select_(alive, value, Float32(0.0))

    def merge(step, known, row, columns_of, alive):
        """attn_res_merge on what each thread holds."""
        query, top, denominator, mixed, prefix = step.operands
        eps = step.attribute("eps")
        # All loads before the first sum: they are one trip to the L2.
        old = [ctx.load(mixed, row, c, width) for c in columns_of]
        (before,) = ctx.load(top, row, 0, 1)
        (total,) = ctx.load(denominator, row, 0, 1)
        held = [work.value(prefix, row, c, width, k) for c, k in zip(columns_of, known)]
        asked = vectors_of[query]
        square, dot = Float32(0.0), Float32(0.0)
        for r in range(vectors):
            for x, u in zip(held[r], asked[r]):
                square = square + masked(x * x, alive[r])
                dot = dot + masked(x * u, alive[r])
        square, dot = row_sum([square, dot])
        score = dot * cute.math.rsqrt(
            square * Float32(1.0 / program.values[prefix].width) + Float32(eps)
        )
        largest = cute.arch.fmax(before, score)
        blocks = cute.arch.exp2((before - largest) * Float32(LOG2_E))
        own = cute.arch.exp2((score - largest) * Float32(LOG2_E))
        scale = Float32(1.0) / (blocks * total + own)
        blocks, own = blocks * scale, own * scale
        for r in range(vectors):
            out = [blocks * m + own * x for m, x in zip(old[r], held[r])]
            known[r][step.results[0]] = rounded(out, program.values[step.results[0]].dtype)

    def norm(step, known, row, columns_of, alive):
        """rms_norm on what each thread holds."""
        subject, weight = step.operands
        held = [work.value(subject, row, c, width, k) for c, k in zip(columns_of, known)]
        scales = vectors_of[weight]
        square = Float32(0.0)
        for r in range(vectors):
            for x in held[r]:
                square = square + masked(x * x, alive[r])
        (square,) = row_sum([square])
        factor = cute.math.rsqrt(
            square * Float32(1.0 / program.values[subject].width) + Float32(step.attribute("eps"))
        )
        for r in range(vectors):
            out = [x * factor * w for x, w in zip(held[r], scales[r])]
            known[r][step.results[0]] = rounded(out, program.values[step.results[0]].dtype)

    def row_vector(value, column):
        """Elements of a [D] value, such as the weight of a norm."""
        held = program.values[value]
        from k3fuse.kernels.device.context import unpack

        size = ITEMSIZE[held.dtype]
        at = ctx.address(value) + column * size
        words = ins.load_words(at, width * size, "global.L1::no_allocate")
        return unpack(words, held.dtype, width)

    def columns_here():
        """First column of each vector of this thread, and whether the vector exists."""
        part = ctx.cta % cluster
        places = [ctx.thread + r * ctx.threads for r in range(vectors)]
        # Threads past the end of the row repeat its last vector: loads need no branch.
        columns_of = [(part * share + cutlass.min(v, Int32(share - 1))) * width for v in places]
        return columns_of, [v < share for v in places]

    def before():
        """Weights of the row steps into registers, above the wait."""
        columns_of, _ = columns_here()
        for step in steps:
            if step.op in ROW:
                value = step.operands[1 if step.op == "rms_norm" else 0]
                vectors_of[value] = [row_vector(value, c) for c in columns_of]

    def one_row(row, writes):
        """All steps of one row. writes: whether this CTA is the one to store its results."""
        columns_of, alive = columns_here()
        known = [{} for _ in range(vectors)]
        for step in steps:
            if step.op in ROW:
                (merge if step.op == "attn_res_merge" else norm)(
                    step, known, row, columns_of, alive
                )
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
                    ins.store_words(at, words, width * size, "shared", None if full else alive[r])

    @cute.jit
    def run():
        if const_expr(stage.private):
            for row in cutlass.range(rows, unroll=1):
                one_row(row, row % ctx.ctas == ctx.cta)
            cute.arch.sync_threads()
        else:
            for row in cutlass.range(ctx.cta // cluster, rows, ctx.ctas // cluster, unroll=1):
                one_row(row, None)

    return before, run
