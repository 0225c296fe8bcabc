"""Device code of the projection; see `k3fuse.kernels.projection` for what it does."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.aot import compile_pointers
from k3fuse.kernels.projection import RESIDENT_STEPS, STEP, STEP_BYTES, TILE, ProjectionConfig
from k3fuse.kernels.spec import CompiledKernel


def no_sums():
    """Four independent quads of sums: two mma a step, even and odd steps."""
    return [Float32(0.0) for _ in range(16)]


def token_quad(words):
    """A lane's 16 bytes of a token as the A operand: words 0, 1 in row g, words 2, 3 in row g+8."""
    return [words[0], words[2], words[1], words[3]]


def multiply_step(sums, step, x, w):
    """Add 32 columns of 8 tokens times 8 rows.

    x serves both mma: with words 0, 1 of the weights its row g counts, with words 2, 3 its row g+8.
    The other halves of the sums are never read.
    """
    at = 8 * (step % 2)
    low = ins.mma_bf16(sums[at : at + 4], x, w[0:2])
    high = ins.mma_bf16(sums[at + 4 : at + 8], x, w[2:4])
    return [*sums[:at], *low, *high, *sums[at + 8 :]]


def sums_of(sums):
    """Token g times rows 2t and 2t+1."""
    return (
        (sums[0] + sums[6]) + (sums[8] + sums[14]),
        (sums[1] + sums[7]) + (sums[9] + sums[15]),
    )


def make_body(c: ProjectionConfig):
    """p: w [N, K] bf16, x [M, K] bf16, y [M, N] bf16 or f32, all contiguous."""
    tiles = c.N // TILE
    all_steps = c.K // STEP
    steps, chunks = c.steps, c.steps // c.chunk
    ragged = steps * c.split != all_steps
    chunk_bytes = c.chunk * STEP_BYTES
    stride = c.ctas * c.groups
    next_tile = stride * TILE * c.K
    resident = steps <= RESIDENT_STEPS
    token_bytes = TILE * 4
    warp_sums = c.M * token_bytes

    @cute.jit
    def ask(state: list, ring: Int32, w: cute.Pointer, step0: Int32, asked_of: Int32):
        """Start this lane's copies of the next chunk; returns the state after it.

        A group is committed even without copies left, so that the wait can count groups.
        """
        asked, slot, chunk, offset = state
        if asked < asked_of:
            source = w + (offset + chunk * (c.chunk * STEP))
            for q in range_constexpr(c.chunk):
                size = None
                if const_expr(ragged):
                    inside = step0 + chunk * c.chunk + q < all_steps
                    size = cutlass.select_(inside, Int32(16), Int32(0))
                ins.copy16(ring + (slot * chunk_bytes + q * STEP_BYTES), source + q * STEP, size)
        cute.arch.cp_async_commit_group()
        chunk += 1
        if chunk == chunks:
            chunk = Int32(0)
            offset += next_tile
        return [asked + 1, following(slot), chunk, offset]

    def following(slot):
        return cutlass.select_(slot == c.depth - 1, Int32(0), slot + 1)

    def token_words(x, step):
        """16 bytes of a token, or zeros beyond K."""
        live = Int32(step < all_steps) if ragged else None
        return token_quad(ins.load_global16(x, live))

    def store(y, tile, g, t, a, b, mine):
        target = y + (g * c.N + tile * TILE + 2 * t)
        if c.out == "bf16":
            ins.store_global4(target, ins.pack_bf16(a, b), mine)
        else:
            ins.store_global_pair(target, a, b, mine)

    @cute.jit
    def body(p: list[cute.Pointer]):
        thread = cute.arch.thread_idx()[0]
        lane = thread % 32
        g = lane // 4  # weight row of the tile, and token
        t = lane % 4
        warp = cute.arch.make_warp_uniform(thread // 32)
        part = warp % c.split
        group = warp // c.split
        if const_expr(c.trigger == "entry"):
            cute.arch.griddepcontrol_launch_dependents()
        first = cute.arch.block_idx()[0] * c.groups + group
        count = (tiles - first + stride - 1) // stride
        asked_of = count * chunks
        step0 = part * steps
        ring = ins.shared_base() + (warp * (c.depth * chunk_bytes) + lane * 16)
        column = step0 * STEP + t * 8
        w = p[0] + (Int64(first * TILE + g) * c.K + column)
        # Lanes beyond M repeat the last token: their sums are dropped, and loads need no branch.
        x = p[1] + (cutlass.min(g, Int32(c.M - 1)) * c.K + column)

        # Chunk n goes to slot n % depth. State: chunks asked for; slot, chunk of its tile and
        # offset in w of the next.
        state = [Int32(0), Int32(0), Int32(0), Int64(0)]
        for _ in cutlass.range(c.depth - 1, unroll=1):
            state = ask(state, ring, w, step0, asked_of)
        cute.arch.griddepcontrol_wait()

        held = []
        if const_expr(resident):
            held = [token_words(x + s * STEP, step0 + s) for s in range(steps)]
        slot = Int32(0)
        for i in cutlass.range(count, unroll=1):
            if const_expr(c.trigger == "last_tile"):  # noqa: SIM102
                if i == count - 1:
                    cute.arch.griddepcontrol_launch_dependents()
            sums = no_sums()
            if const_expr(resident):
                for j in range_constexpr(chunks):
                    # The slot asked into now was multiplied one chunk ago.
                    state = ask(state, ring, w, step0, asked_of)
                    cute.arch.cp_async_wait_group(c.depth - 1)
                    for q in range_constexpr(c.chunk):
                        s = j * c.chunk + q
                        words = ins.load_shared16(ring + (slot * chunk_bytes + q * STEP_BYTES))
                        sums = multiply_step(sums, s, held[s], words)
                    slot = following(slot)
            else:
                for j in cutlass.range(chunks, unroll=1):
                    state = ask(state, ring, w, step0, asked_of)
                    here = j * c.chunk
                    near = [
                        token_words(x + (here + q) * STEP, step0 + here + q) for q in range(c.chunk)
                    ]
                    cute.arch.cp_async_wait_group(c.depth - 1)
                    for q in range_constexpr(c.chunk):
                        words = ins.load_shared16(ring + (slot * chunk_bytes + q * STEP_BYTES))
                        sums = multiply_step(sums, q, near[q], words)
                    slot = following(slot)
            tile = first + i * stride
            a, b = sums_of(sums)
            mine = None
            if const_expr(c.M < TILE):
                mine = g < c.M
            if const_expr(c.split > 1):
                lane_at = g * token_bytes + t * 8
                # Two buffers: a warp can write tile i + 2 only after all read tile i.
                buffer = ins.shared_base() + (c.ring_bytes + (i % 2) * c.sums_bytes)
                ins.store_shared_pair(buffer + (warp * warp_sums + lane_at), a, b, mine)
                ins.barrier(group + 1, c.split * 32)
                if part == i % c.split:
                    total_a = Float32(0.0)
                    total_b = Float32(0.0)
                    # Lanes beyond M read, and drop, the sums of the last token.
                    read_at = cutlass.min(g, Int32(c.M - 1)) * token_bytes + t * 8
                    base = buffer + (group * (c.split * warp_sums) + read_at)
                    for r in range_constexpr(c.split):
                        u, v = ins.load_shared_pair(base + r * warp_sums)
                        total_a = total_a + u
                        total_b = total_b + v
                    store(p[2], tile, g, t, total_a, total_b, mine)
            else:
                store(p[2], tile, g, t, a, b, mine)

    return body


def build(config: ProjectionConfig, arch: str) -> CompiledKernel:
    """Compile one configuration."""
    y = BFloat16 if config.out == "bf16" else Float32
    return compile_pointers(
        make_body(config),
        [
            ("w", "weight", BFloat16, 16),
            ("x", "activation", BFloat16, 16),
            ("y", "activation", y, 16),
        ],
        name=config.label,
        arch=arch,
        grid=(config.ctas, 1, 1),
        block=config.warps * 32,
        smem=config.smem,
    )
