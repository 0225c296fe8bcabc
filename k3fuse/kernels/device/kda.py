"""Kimi delta attention: the delta rule, whole heads of few requests, the gated norm of a head."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.context import unpack
from k3fuse.kernels.device.kda_inputs import (
    F,
    Inputs,
    K,
    Q,
    V,
    dot,
    fma,
    make_fetch,
    mul,
    read_weight,
)
from k3fuse.kernels.device.kda_windows import replace_window
from k3fuse.kernels.device.pointwise import LOG2_E, sigmoid
from k3fuse.kernels.kda import LANES

LN_2 = 0.6931471805599453
L2_EPS = 1e-6


def make(ctx, number):
    """By kind of stage."""
    kinds = {
        "kda": make_rule,
        "kda_heads": make_heads,
        "commit": make_rule,
        "head_norm": make_head_norm,
    }
    return kinds[ctx.config.stages[number].kind](ctx, number)


def softplus(x):
    """log(1 + exp(x)); where exp(x) is small, its series."""
    e = cute.arch.exp2(-cute.math.absf(x) * Float32(LOG2_E))
    near = mul(cute.math.log2(Float32(1.0) + e, fastmath=True), Float32(LN_2))
    far = mul(e, fma(e, fma(e, Float32(1.0 / 3.0), Float32(-0.5)), Float32(1.0)))
    return cutlass.select_(e < Float32(1.0 / 64.0), far, near) + cute.arch.fmax(x, Float32(0.0))


class Rule:
    """What items of the delta rule have in common: places, the part of S of a lane, one row.

    Lanes part, part + 8, .. of a warp hold a value row: pieces of 4 columns.
    """

    def __init__(self, ctx, options, step):
        self.ctx, self.options = ctx, options
        self.inputs = Inputs(ctx, step)
        self.commit = self.inputs.commit
        self.keeps = step.op != "kda_verify"
        self.dim, self.heads = options.head_dim, options.heads
        self.width = self.dim // 32  # channels of a lane where a warp holds a head; pieces of a row
        self.slices = self.dim // options.slice
        self.per = options.slice * LANES // options.threads  # value rows of a lane
        self.first_kind = K if self.commit else Q  # a commit has no use for q
        self.k_at, self.a_at, self.v_at = self.dim * 4, self.dim * 8, self.dim * 12
        self.beta_at = self.v_at + options.slice * 4

    def place_of(self, item):
        """Request, head, first value row."""
        pair = item // self.slices
        request = pair // self.heads
        first = (item - pair * self.slices) * self.options.slice
        return request, pair - request * self.heads, first

    def state_at(self, slot, head, first):
        """First byte of the lane's value rows."""
        row = first + self.ctx.thread // LANES * self.per
        at = (Int64(slot) * self.heads + head) * (self.dim * self.dim * 4)
        return at + Int64(row * (self.dim * 4) + self.ctx.thread % LANES * 16)

    def load_state(self, slot, head, first, live):
        """The lane's part of S; zeros, and no access, where there is none."""
        base = self.ctx.address(self.inputs.recurrent) + self.state_at(slot, head, first)
        found = []
        for u in range(self.per):
            for p in range(self.width):
                words = ins.load_global16(base + (u * self.dim * 4 + p * 128), Int32(live))
                found += [ins.as_float(word) for word in words]
        return found

    def keep_state(self, slot, head, first, state):
        """S back into its slot."""
        base = self.ctx.address(self.inputs.recurrent) + self.state_at(slot, head, first)
        for u in range(self.per):
            for p in range(self.width):
                i = (u * self.width + p) * 4
                words = [ins.as_word(value) for value in state[i : i + 4]]
                ins.store_words(base + (u * self.dim * 4 + p * 128), words, 16)

    def prepare_channels(self, board, kind, request, slot, row, head, first):
        """Convolution of q, k or v, and the L2 norm of q and k."""
        lane, dim, width = self.ctx.lane, self.dim, self.width
        values = kind == V
        at = lane * width
        column = Int32(cutlass.select_(values, at % self.options.slice, at))
        channel = head * dim + column + Int32(cutlass.select_(values, first, Int32(0)))
        y = self.inputs.convolve(kind, request, slot, row, channel, width)
        square = cute.arch.warp_reduction_sum(dot(y, y))
        scale = cute.math.rsqrt(square + Float32(L2_EPS))
        if not self.commit:
            scale = cutlass.select_(kind == Q, mul(scale, Float32(dim**-0.5)), scale)
        scale = Float32(cutlass.select_(values, Float32(1.0), scale))
        part = Int32(cutlass.select_(values, Int32(self.v_at), kind * (dim * 4)))
        words = [ins.as_word(mul(value, scale)) for value in y]
        ins.store_words(board + part + column * 4, words, width * 4, "shared")

    def decay(self, f, channel, head):
        """exp of the log decay of neighbouring channels."""
        inputs, bound = self.inputs, self.options.lower_bound
        bias = inputs.weight(inputs.dt_bias, channel, self.width)
        (a_log,) = inputs.weight(inputs.a_log, head, 1)
        rate = cute.arch.exp2(a_log * Float32(LOG2_E))
        found = []
        for x, y in zip(f, bias, strict=True):
            logit = x + y
            if bound is None:
                power = mul(mul(rate, softplus(logit)), Float32(-LOG2_E))
            else:
                power = mul(sigmoid(mul(rate, logit)), Float32(bound * LOG2_E))
            found.append(cute.arch.exp2(power))
        return found

    def put_decay(self, board, f, request, slot, row, head):
        """The decay of a head whose f a warp holds, and beta, on the board."""
        column = self.ctx.lane * self.width
        b = ins.load_words(self.inputs.beta_input(request, slot, row, head), 2)
        found = self.decay(f, head * self.dim + column, head)
        words = [ins.as_word(value) for value in found]
        ins.store_words(board + self.a_at + column * 4, words, self.width * 4, "shared")
        (beta,) = unpack(b, "bf16", 2)[:1]
        place = board + self.beta_at
        ins.store_words(place, [ins.as_word(sigmoid(beta))], 4, "shared", self.ctx.lane == 0)

    def prepare_decay(self, board, request, slot, row, head):
        """exp of the log decay, and beta."""
        channel = head * self.dim + self.ctx.lane * self.width
        at = self.inputs.row(F, request, slot, row) + Int64(channel * 2)
        f = unpack(ins.load_words(at, 2 * self.width), "bf16", self.width)
        self.put_decay(board, f, request, slot, row, head)

    def one_row(self, board, state, part, group):
        """The delta rule: S and o of the lane's value rows."""
        pieces = [board + part * 16 + p * 128 for p in range(self.width)]
        keys, state = [quad(at + self.k_at) for at in pieces], list(state)
        guesses = [[None] * 4 for _ in range(self.per)]
        for p in range(self.width):
            decay = quad(pieces[p] + self.a_at)
            for u in range(self.per):
                for e in range(4):
                    i = (u * self.width + p) * 4 + e
                    state[i] = mul(state[i], decay[e])
                    guesses[u][e] = add_to(guesses[u][e], state[i], keys[p][e])
        beta = ins.load_shared_float(board + self.beta_at)
        deltas = []
        for u in range(self.per):
            v = ins.load_shared_float(board + self.v_at + (group * self.per + u) * 4)
            deltas.append(beta * (v - over_lanes(guesses[u])))
        sums = [[None] * 4 for _ in range(self.per)]
        for p in range(self.width):
            query = None if self.commit else quad(pieces[p])
            for u in range(self.per):
                for e in range(4):
                    i = (u * self.width + p) * 4 + e
                    state[i] = fma(deltas[u], keys[p][e], state[i])
                    if not self.commit:
                        sums[u][e] = add_to(sums[u][e], state[i], query[e])
        return state, [] if self.commit else [over_lanes(s) for s in sums]


def quad(address):
    """Four float32 of shared memory."""
    return [ins.as_float(word) for word in ins.load_shared16(address)]


def add_to(total, a, b):
    """total + a b; None counts as no total yet."""
    return mul(a, b) if total is None else fma(a, b, total)


def over_lanes(four):
    """Sum of a lane's four sums, then over the lanes of the value row."""
    total = (four[0] + four[1]) + (four[2] + four[3])
    return cute.arch.warp_reduction_sum(total, threads_in_group=LANES)


def make_rule(ctx, number):
    """Items in turn."""
    config = ctx.config
    o = config.plans[number].options
    step = ctx.program.steps[config.stages[number].steps[0]]
    rule = Rule(ctx, o, step)
    inputs, commit, keeps = rule.inputs, rule.commit, rule.keeps
    out = None if commit else step.results[0]
    dim, per, width = rule.dim, rule.per, rule.width
    kinds = F + 1 - rule.first_kind
    place_of = rule.place_of
    table = config.stage_smem[number]
    boards = table + o.table_bytes
    several = o.items > ctx.ctas

    def entry_of(request):
        """Slot, and rows to run: 0 for a request that must not be touched."""
        slot, rows = ins.load_words(ctx.shared + table + request * 8, 8, "shared")
        return Int32(slot), Int32(rows)

    def ask(item):
        """The lane's part of S of an item, if there is one."""
        request, head, first = place_of(cutlass.min(item, Int32(o.items - 1)))
        slot, rows = entry_of(request)
        live = (item < o.items) & (rows > 0) & (ctx.thread < o.threads)
        return rule.load_state(slot, head, first, live)

    @cute.jit
    def prepare(board: Int32, request: Int32, slot: Int32, rows: Int32, head: Int32, first: Int32):
        """q, k, decay, v and beta of all rows into shared memory, each by a warp."""
        for task in cutlass.range(ctx.warp, rows * kinds, ctx.warps, unroll=1):
            row = task // kinds
            kind = task - row * kinds + rule.first_kind
            if kind == F:
                rule.prepare_decay(board + row * o.row_bytes, request, slot, row, head)
            else:
                at = board + row * o.row_bytes
                rule.prepare_channels(at, kind, request, slot, row, head, first)

    @cute.jit
    def run_rows(board: Int32, state: list, request: Int32, rows: Int32, head: Int32, first: Int32):
        """The rows of an item in order; S after them."""
        part = ctx.thread % LANES
        group = ctx.thread // LANES
        for row in cutlass.range(rows, unroll=1):
            state, found = rule.one_row(board + row * o.row_bytes, state, part, group)
            if const_expr(not commit):
                column = head * dim + first + group * per
                ctx.sink(out, request * o.rows + row, column, found, part == 0)
        return state

    @cute.jit
    def no_rows(request: Int32, head: Int32, first: Int32):
        """o of a padding request."""
        column = head * dim + first + ctx.thread // LANES * per
        mine = (ctx.thread % LANES == 0) & (ctx.thread < o.threads)
        for row in cutlass.range(o.rows, unroll=1):
            ctx.sink(out, request * o.rows + row, column, [Float32(0.0)] * per, mine)

    @cute.jit
    def fill_table():
        """Slots from memory, none below 0; rows to run, 0 for padding."""
        slots = cute.recast_ptr(ctx.address(inputs.slots), dtype=Int32)
        for i in cutlass.range(ctx.thread, o.requests, ctx.threads, unroll=1):
            slot = Int32(cute.arch.load(slots + i, Int32, cop="cg"))
            rows = Int32(o.rows)
            if const_expr(commit):
                accepted = cute.recast_ptr(ctx.address(inputs.accepted), dtype=Int32)
                count = Int32(cute.arch.load(accepted + i, Int32, cop="cg"))
                rows = cutlass.max(cutlass.min(count, rows), Int32(0))
            rows = Int32(cutlass.select_(slot < 0, Int32(0), rows))
            slot = cutlass.max(slot, Int32(0))
            ins.store_words(ctx.shared + table + i * 8, [Uint32(slot), Uint32(rows)], 8, "shared")
        cute.arch.sync_threads()

    @cute.jit
    def replace_windows(request: Int32, slot: Int32, rows: Int32, head: Int32):
        """Of one head, after all its warps have read them."""
        units = 3 * dim // 4
        for unit in cutlass.range(ctx.thread, units, ctx.threads, unroll=1):
            kind = unit // (dim // 4)
            channel = head * dim + (unit - kind * (dim // 4)) * 4
            replace_window(inputs, kind, request, slot, rows, channel)

    @cute.jit
    def run():
        fill_table()
        board = ctx.shared + boards
        other = board + o.board_bytes
        state = [Float32(0.0)] * (4 * width * per)
        if const_expr(several):
            state = ask(ctx.cta)
        for item in cutlass.range(ctx.cta, o.items, ctx.ctas, unroll=1):
            request, head, first = place_of(item)
            slot, rows = entry_of(request)
            if const_expr(not several):
                state = ask(item)
            if rows > 0:
                prepare(board, request, slot, rows, head, first)
            following = state
            if const_expr(several):
                following = ask(item + ctx.ctas)
            cute.arch.sync_threads()
            if rows > 0:
                if ctx.thread < o.threads:
                    after = run_rows(board, state, request, rows, head, first)
                    if const_expr(keeps):
                        rule.keep_state(slot, head, first, after)
                if const_expr(commit):
                    replace_windows(request, slot, rows, head)
            else:
                if const_expr(not commit):
                    no_rows(request, head, first)
            state = following
            board, other = other, board

    return make_fetch(ctx, [*inputs.convs, inputs.a_log, inputs.dt_bias]), run


def make_heads(ctx, number):
    """The decay's projection, the delta rule and the gated norm of a head by a cluster of CTAs.

    Each CTA has a slice of the value rows and computes f of the head for itself, from weights that
    are in registers before the wait. All CTAs of a head get all of its o; the first does the norm,
    and the conv windows are replaced when all have read them.
    """
    config = ctx.config
    o = config.plans[number].options
    rule_options = o.rule
    linear, step, norm = (ctx.program.steps[i] for i in config.stages[number].steps)
    rule = Rule(ctx, rule_options, step)
    inputs, dim, width, per = rule.inputs, rule.dim, rule.width, rule.per
    source, weight = linear.operands
    gate, scale = norm.operands[1:]
    (result,) = norm.results
    cluster = config.cluster
    board = config.stage_smem[number]
    f_at = board + o.rule.board_bytes
    o_at = f_at + dim * 4
    lanes = o.lanes  # of a row of the projection's weights, 16 bytes each
    row_bytes = lanes * 16
    passes = -(-dim * lanes // ctx.threads)

    class Held:
        words = ()

    def row_of(turn):
        """The output that a thread works on in a pass."""
        return (turn * ctx.threads + ctx.thread) // lanes

    fetch = make_fetch(ctx, [*inputs.convs, inputs.a_log, inputs.dt_bias, scale])

    def before():
        cute.arch.cluster_arrive()
        _, head, _ = rule.place_of(ctx.cta)
        base = ctx.address(weight) + Int64(head * dim * row_bytes) + ctx.thread % lanes * 16
        Held.words = [
            ins.load_words(
                base + cutlass.min(row_of(turn), Int32(dim - 1)) * row_bytes,
                16,
                "global.L1::no_allocate",
            )
            for turn in range(passes)
        ]
        fetch()

    def project(request):
        """f of the head, rounded to bfloat16, into shared memory as float32."""
        at = ctx.address(source) + Int64(request * row_bytes) + ctx.thread % lanes * 16
        x = unpack(ins.load_words(at, 16, "global.cg"), "bf16", 8)
        for turn in range(passes):
            total = dot(x, unpack(Held.words[turn], "bf16", 8))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            (rounded, _) = ins.unpack_bf16(ins.pack_bf16(total, Float32(0.0)))
            row = row_of(turn)
            live = (ctx.thread % lanes == 0) & (row < dim)
            place = ctx.shared + f_at + cutlass.min(row, Int32(dim - 1)) * 4
            ins.store_words(place, [ins.as_word(rounded)], 4, "shared", live)

    def normalize(request, head):
        """RMSNorm of o of the head by a warp, times sigmoid of the gate."""
        inner = ctx.lane * width
        column = head * dim + inner
        place = ctx.shared + o_at + inner * 4
        x = [ins.load_shared_float(place + i * 4) for i in range(width)]
        g = ctx.load(gate, request, column, width)
        w = read_weight(ctx, scale, inner, width)
        ctx.sink(result, request, column, normed(x, w, g, dim, o.eps))

    @cute.jit
    def prepare(request: Int32, slot: Int32, head: Int32, first: Int32):
        for task in cutlass.range(ctx.warp, 3, ctx.warps, unroll=1):
            rule.prepare_channels(ctx.shared + board, task, request, slot, Int32(0), head, first)

    @cute.jit
    def run():
        request, head, first = rule.place_of(ctx.cta)
        slots = cute.recast_ptr(ctx.address(inputs.slots), dtype=Int32)
        slot = Int32(cute.arch.load(slots + request, Int32, cop="cg"))
        live = slot >= 0
        kept = cutlass.max(slot, Int32(0))
        state = rule.load_state(kept, head, first, live & (ctx.thread < rule_options.threads))
        project(request)
        if live:
            prepare(request, kept, head, first)
        cute.arch.sync_threads()
        if live & (ctx.warp == ctx.warps - 1):
            column = ctx.lane * width
            f = [ins.load_shared_float(ctx.shared + f_at + (column + i) * 4) for i in range(width)]
            rule.put_decay(ctx.shared + board, f, request, kept, Int32(0), head)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()  # all CTAs of the head have started
        part, group = ctx.thread % LANES, ctx.thread // LANES
        found = [Float32(0.0)] * per
        if live:
            state, found = rule.one_row(ctx.shared + board, state, part, group)
            if ctx.thread < rule_options.threads:
                rule.keep_state(kept, head, first, state)
        if (part < cluster) & (ctx.thread < rule_options.threads):
            for u in cutlass.range_constexpr(per):
                place = ctx.shared + o_at + (first + group * per + u) * 4
                ins.store_in_cta(place, part, found[u])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        turn = ctx.cta % cluster
        if (turn == 0) & (ctx.warp == 0):
            normalize(request, head)
        if live:
            replace(request, kept, head, turn)

    @cute.jit
    def replace(request: Int32, slot: Int32, head: Int32, turn: Int32):
        """The conv windows of the head, dealt out over its CTAs, the last one first."""
        start = (cluster - 1 - turn) * ctx.threads + ctx.thread
        for unit in cutlass.range(start, 3 * dim // 4, cluster * ctx.threads, unroll=1):
            kind = unit // (dim // 4)
            channel = head * dim + (unit - kind * (dim // 4)) * 4
            replace_window(inputs, kind, request, slot, Int32(1), channel)

    return before, run


def normed(x, weight, gate, dim, eps):
    """RMSNorm of a head that a warp holds, times sigmoid of the gate."""
    square = cute.arch.warp_reduction_sum(dot(x, x))
    mean = mul(square, Float32(1.0 / dim))
    factor = cute.math.rsqrt(mean + Float32(eps))
    return [a * factor * s * sigmoid(z) for a, s, z in zip(x, weight, gate, strict=True)]


def make_head_norm(ctx, number):
    """gated_rms_norm: RMSNorm of a head of a row by a warp, times sigmoid of the gate."""
    o = ctx.config.plans[number].options
    step = ctx.program.steps[ctx.config.stages[number].steps[0]]
    subject, gate, weight = step.operands
    (result,) = step.results
    width = o.head_dim // 32

    def one(row, head):
        inner = ctx.lane * width
        column = head * o.head_dim + inner
        x = ctx.load(subject, row, column, width)
        g = ctx.load(gate, row, column, width)
        w = read_weight(ctx, weight, inner, width)
        ctx.sink(result, row, column, normed(x, w, g, o.head_dim, o.eps))

    @cute.jit
    def run():
        first = ctx.warp * ctx.ctas + ctx.cta
        for unit in cutlass.range(first, o.rows * o.heads, ctx.ctas * ctx.warps, unroll=1):
            row = unit // o.heads
            one(row, unit - row * o.heads)

    return make_fetch(ctx, [weight]), run
