"""Device code of linear stages whose K a cluster shares; see `k3fuse.kernels.linear_cluster`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.tiles import make_tiles, multiply_few, multiply_many, quad, sums_of
from k3fuse.kernels.linear import FEW_TOKENS, STEP, TILE
from k3fuse.kernels.linear_cluster import SUMMERS


def make(ctx, number):
    """Tiles in turn over the clusters."""
    config, program = ctx.config, ctx.program
    o = config.plans[number].options
    base_offset = config.stage_smem[number]
    x_width = program.values[o.x].width
    row_bytes, part_steps = o.k * 2, o.steps
    groups = ctx.ctas // o.cluster
    tiles = make_tiles(ctx, number, o)
    few = o.m <= FEW_TOKENS
    triggers = program.trigger != "entry"

    def rank():
        return ctx.cta % o.cluster

    def tile_of(turn):
        return ctx.cta // o.cluster + turn * groups

    def count_of_cluster():
        return cutlass.max((o.tiles - ctx.cta // o.cluster + groups - 1) // groups, Int32(0))

    def full_of(slot):
        return ctx.shared + (base_offset + o.barriers_at) + slot * 8

    def empty_of(slot):
        return full_of(slot) + o.depth * 8

    def summed_of(board):
        return full_of(board) + 16 * o.depth

    def free_of(board):
        return summed_of(board) + 16

    def come_of(turn):
        return summed_of(turn) + 32

    def board_of(board):
        return ctx.shared + (base_offset + o.boards_at) + board * (o.split * o.warp_bytes)

    def inbox_of(turn, cta):
        at = (turn * o.cluster + cta) * o.part_bytes
        return ctx.shared + (base_offset + o.inbox_at) + at

    def step_of(q):
        """Step of this warp's slice within the CTA's part."""
        return ctx.warp * o.chunk + q

    def live(q, t):
        """Whether a lane's 8 columns of a step are of the CTA's part and within K."""
        column = (rank() * part_steps + step_of(q)) * STEP + t * 8
        return (step_of(q) < part_steps) & (column < o.k)

    def only(words, condition):
        return [cutlass.select_(condition, word, Uint32(0)) for word in words]

    def token_words(row, q, t):
        """16 bytes of a token, zeros where there is no column."""
        at = (row * x_width + (rank() * part_steps + step_of(q)) * STEP + t * 8) * 2
        if not o.ragged:
            return ins.load_words(ctx.address(o.x) + at, 16)
        here = live(q, t)
        return only(
            ins.load_words(ctx.address(o.x) + cutlass.select_(here, at, Int32(0)), 16), here
        )

    @cute.jit
    def ask():
        """Ask for the slices of all tiles, a bounded number at a time."""
        count = count_of_cluster()
        start = rank() * (part_steps * STEP * 2)
        size = Int32(part_steps * STEP * 2)
        if const_expr(o.ragged):
            size = cutlass.min(size, row_bytes - start)
        for n in cutlass.range(count, unroll=1):
            slot = n % o.depth
            if n >= o.ahead:
                other = n - o.ahead
                ins.wait_mbarrier(full_of(other % o.depth), (other // o.depth) & 1)
            if n >= o.depth:
                ins.wait_mbarrier(empty_of(slot), (n // o.depth - 1) & 1)
            if const_expr(triggers):
                if n == count - 1:
                    cute.arch.griddepcontrol_launch_dependents()
            if ctx.lane == 0:
                ins.expect_bytes(full_of(slot), size * TILE)
            if ctx.lane < TILE:
                place = ctx.shared + base_offset + slot * o.slot_bytes + ctx.lane * o.row_bytes
                row = tiles.row_address(tile_of(n), ctx.lane)
                ins.copy_bulk(place, row + Int64(start), size, full_of(slot))

    @cute.jit
    def before():
        if ctx.thread < o.depth:
            ins.init_mbarrier(full_of(ctx.thread), 1)
            ins.init_mbarrier(empty_of(ctx.thread), o.split)
        if ctx.thread < 2:
            ins.init_mbarrier(summed_of(ctx.thread), o.split)
            ins.init_mbarrier(free_of(ctx.thread), SUMMERS)
        if const_expr(o.cluster > 1):
            if ctx.thread < o.owned:
                ins.init_mbarrier(come_of(ctx.thread), 1)
                ins.expect_bytes(come_of(ctx.thread), o.cluster * o.part_bytes)
        cute.arch.mbarrier_init_fence()
        if const_expr(o.cluster > 1):
            cute.arch.cluster_arrive()
        cute.arch.sync_threads()
        if ctx.thread >= ctx.workers:
            ask()

    @cute.jit
    def multiply():
        """The sums of this warp's slice of K, tile by tile."""
        g, t = ctx.lane // 4, ctx.lane % 4
        halves = 1 if few else 2
        rows = [
            cutlass.min(g + 8 * h + 16 * m, Int32(o.m - 1))
            for m in range(o.mt)
            for h in range(halves)
        ]
        tokens = [[token_words(row, q, t) for row in rows] for q in range(o.chunk)]
        line = TILE * 4  # bytes of a token's sums
        for n in cutlass.range(count_of_cluster(), unroll=1):
            slot, board = n % o.depth, n % 2
            ins.wait_mbarrier(full_of(slot), (n // o.depth) & 1)
            weights = (
                ctx.shared
                + base_offset
                + slot * o.slot_bytes
                + g * o.row_bytes
                + (ctx.warp * (o.chunk * STEP) + t * 8) * 2
            )
            sums = [Float32(0.0) for _ in range(16 if few else 4 * o.mt)]
            for q in range_constexpr(o.chunk):
                w = ins.load_shared16(weights + q * (STEP * 2))
                if const_expr(o.ragged):
                    w = only(w, live(q, t))  # what was never copied may be no number
                if const_expr(few):
                    sums = multiply_few(sums, q, quad(tokens[q][0]), w)
                else:
                    for m in range_constexpr(o.mt):
                        k = 4 * m
                        new = multiply_many(sums[k : k + 4], tokens[q][2 * m : 2 * m + 2], w)
                        sums = [*sums[:k], *new, *sums[k + 4 :]]
            if n >= 2:
                ins.wait_mbarrier(free_of(board), (n // 2 - 1) & 1)
            place = board_of(board) + ctx.warp * o.warp_bytes + g * line + t * 8
            if const_expr(few):
                ins.store_shared_pair(place, *sums_of(sums))
            else:
                for m in range_constexpr(o.mt):
                    at = place + 16 * m * line
                    ins.store_shared_pair(at, sums[4 * m], sums[4 * m + 1])
                    ins.store_shared_pair(at + 8 * line, sums[4 * m + 2], sums[4 * m + 3])
            cute.arch.sync_warp()
            ins.arrive_mbarrier(summed_of(board), ctx.lane == 0)
            ins.arrive_mbarrier(empty_of(slot), ctx.lane == 0)

    def add_up(first, stride, terms):
        """Pairs of sums in order."""
        a, b = Float32(0.0), Float32(0.0)
        for r in range(terms):
            u, v = ins.load_shared_pair(first + r * stride)
            a, b = a + u, b + v
        return a, b

    def finish_pair(tile, e, a, b):
        """What follows on pair e of a tile's sums: 4 a token."""
        tiles.tails(tile, Int32(-1), e // 4, e % 4, Int32(0), a, b, tile < o.tiles, [])

    @cute.jit
    def finish(turn: Int32, local: Int32):
        """The tile that this CTA finishes in its turn."""
        ins.wait_mbarrier(come_of(turn), Int32(0), ".acquire.cluster")
        tile = tile_of(turn * o.cluster + rank())
        for e in cutlass.range(local, o.m * 4, SUMMERS * 32, unroll=1):
            a, b = add_up(inbox_of(turn, 0) + e * 8, o.part_bytes, o.cluster)
            finish_pair(tile, e, a, b)

    @cute.jit
    def add():
        """Sums of all warps to where the tile is finished."""
        local = ctx.thread - o.split * 32
        count = count_of_cluster()
        if const_expr(o.cluster > 1):
            cute.arch.cluster_wait()  # the barriers of the others are there
        for n in cutlass.range(count, unroll=1):
            board = n % 2
            ins.wait_mbarrier(summed_of(board), (n // 2) & 1)
            turn = n // o.cluster
            for e in cutlass.range(local, o.m * 4, SUMMERS * 32, unroll=1):
                a, b = add_up(board_of(board) + e * 8, o.warp_bytes, o.split)
                if const_expr(o.cluster == 1):
                    finish_pair(tile_of(n), e, a, b)
                else:
                    words = [ins.as_word(a), ins.as_word(b)]
                    at = inbox_of(turn, rank()) + e * 8
                    ins.send_words(at, come_of(turn), n % o.cluster, words)
            cute.arch.sync_warp()
            ins.arrive_mbarrier(free_of(board), ctx.lane == 0)
            if const_expr(o.cluster > 1):
                if (n % o.cluster == rank()) & (turn > 0):
                    finish(turn - 1, local)  # its last sums have come long ago
        if const_expr(o.cluster > 1):
            last = (count - rank() + o.cluster - 1) // o.cluster
            if last > 0:
                finish(last - 1, local)

    @cute.jit
    def run():
        if ctx.warp < o.split:
            multiply()
        elif ctx.thread < ctx.workers:
            add()

    return before, run
