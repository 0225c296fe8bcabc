"""Device code of the row kernels; see `k3fuse.kernels.row` for what they do."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr, range_constexpr

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.device.aot import compile_pointers
from k3fuse.kernels.row import VECTOR, RowConfig
from k3fuse.kernels.spec import CompiledKernel


def unpack_all(words):
    """Eight bfloat16 in four words as float32."""
    return [value for word in words for value in ins.unpack_bf16(word)]


def pack_all(values):
    """Eight float32 rounded to bfloat16, in four words."""
    return [ins.pack_bf16(values[i], values[i + 1]) for i in range(0, 8, 2)]


def send_to_cta(address, arrived, cta, value):
    """A float32 to the same place of a CTA of the cluster; counts 4 bytes on its `arrived`.

    No fence: a cluster barrier with release would first wait for this CTA's stores to memory.
    """
    ins.asm(
        "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 bar, {$r1}, {$r2}; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], {$r3}, [bar]; }",
        read_only_args=[address, arrived, Int32(cta), value],
    )


def expect_bytes(arrived, count):
    """Make `arrived` an mbarrier that completes after `count` bytes; by one thread."""
    ins.asm("mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[arrived])
    ins.asm("fence.mbarrier_init.release.cluster;", read_only_args=[])
    ins.asm(
        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], {$r1};",
        read_only_args=[arrived, Int32(count)],
    )


def wait_bytes(arrived):
    """Until the bytes of `expect_bytes` are there."""
    ins.asm(
        "{ .reg .pred q; AGAIN: mbarrier.try_wait.parity.shared.b64 q, [{$r0}], 0; "
        "@!q bra AGAIN; }",
        read_only_args=[arrived],
    )


def alive_or_zero(value, alive):
    """The value, or zero in a thread past the end of the row."""
    return cutlass.select_(alive, value, Float32(0.0))


def make_body(c: RowConfig):
    """p: weight [H], x, y [M, H] bf16; with slots also slots [T, M, H] f32 and h [M, H] bf16."""
    warps = c.threads // 32
    row_vectors = c.H // VECTOR
    slot_size = c.M * c.H
    piece = c.threads * 16
    full = c.T // c.together if c.T else 0
    everywhere = c.share * c.cluster == row_vectors and c.vectors * c.threads == c.share

    def add_slots(sums, stage, source, count):
        """Add `count` slots from `source` on, in slot order.

        They pass through shared memory, where every thread reads only what it copied: of loads
        into registers ptxas keeps five in flight and puts the sums between them.
        """
        for s in range(count):
            for half in range(2):
                source_half = source + (s * slot_size + half * 4)
                ins.copy16(stage + (2 * s + half) * piece, source_half)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        for s in range(count):
            words = [
                *ins.load_shared16(stage + 2 * s * piece),
                *ins.load_shared16(stage + (2 * s + 1) * piece),
            ]
            sums = [a + ins.as_float(b) for a, b in zip(sums, words, strict=True)]
        return sums

    @cute.jit
    def body(p: list[cute.Pointer]):
        cute.arch.griddepcontrol_launch_dependents()
        thread = cute.arch.thread_idx()[0]
        board = ins.shared_base()  # one float a warp of the cluster, then an mbarrier
        arrived = board + (c.board_bytes - 8)
        if const_expr(c.cluster > 1):
            if thread == 0:
                expect_bytes(arrived, c.cluster * warps * 4)
            cute.arch.cluster_arrive_relaxed()
        rank = cute.arch.block_idx()[0]
        row = cute.arch.block_idx()[1]
        places = [thread + r * c.threads for r in range(c.vectors)]
        alive = [(v < c.share) & (rank * c.share + v < row_vectors) for v in places]
        stored = [None if everywhere else ok for ok in alive]
        # Threads past the end of the row repeat its last vector: loads need no branch.
        columns = [cutlass.min(rank * c.share + v, Int32(row_vectors - 1)) * VECTOR for v in places]
        weights = [
            ins.load_global16(p[0] + columns[r], how="L1::no_allocate") for r in range(c.vectors)
        ]
        cute.arch.griddepcontrol_wait()

        at = [row * c.H + column for column in columns]
        rows = []
        if const_expr(c.T == 0):
            rows = [ins.load_global16(p[1] + at[r]) for r in range(c.vectors)]
        else:
            stage = ins.shared_base() + (c.board_bytes + thread * 16)
            batch = c.together * slot_size
            for r in range_constexpr(c.vectors):
                # From +0.0, so that slots of -0.0 add up to +0.0 as the op says.
                sums = [Float32(0.0) for _ in range(VECTOR)]
                source = p[3] + at[r]
                ins.copy16(stage + 2 * c.together * piece, p[1] + at[r])  # with the first slots
                for block in cutlass.range(full, unroll=1):
                    sums = add_slots(sums, stage, source + block * batch, c.together)
                if const_expr(c.T % c.together > 0):
                    sums = add_slots(sums, stage, source + full * batch, c.T % c.together)
                summed = unpack_all(pack_all(sums))
                x = unpack_all(ins.load_shared16(stage + 2 * c.together * piece))
                rows.append(pack_all([a + b for a, b in zip(summed, x, strict=True)]))
                ins.store_global16(p[4] + at[r], rows[r], stored[r])

        square = Float32(0.0)
        for r in range_constexpr(c.vectors):
            own = Float32(0.0)
            for value in unpack_all(rows[r]):
                own = own + value * value
            square = square + (own if const_expr(everywhere) else alive_or_zero(own, alive[r]))
        square = cute.arch.warp_reduction_sum(square)
        warp = cute.arch.make_warp_uniform(thread // 32)
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()  # every CTA of the cluster runs: its memory may be written
            if thread % 32 == 0:
                for cta in range_constexpr(c.cluster):
                    send_to_cta(board + (rank * warps + warp) * 4, arrived, cta, square)
            wait_bytes(arrived)
        else:
            if thread % 32 == 0:
                ins.store_shared_float(board + warp * 4, square)
            cute.arch.sync_threads()
        total = Float32(0.0)
        for i in range_constexpr(c.cluster * warps):
            total = total + ins.load_shared_float(board + i * 4)
        scale = cute.math.rsqrt(total * Float32(1.0 / c.H) + Float32(c.eps))
        for r in range_constexpr(c.vectors):
            pairs = zip(unpack_all(rows[r]), unpack_all(weights[r]), strict=True)
            ins.store_global16(p[2] + at[r], pack_all([a * scale * b for a, b in pairs]), stored[r])

    return body


def build(config: RowConfig, arch: str) -> CompiledKernel:
    """Compile one configuration."""
    params = [
        ("weight", "weight", BFloat16, 16),
        ("x", "activation", BFloat16, 16),
        ("y", "activation", BFloat16, 16),
    ]
    if config.T:
        params += [
            ("slots", "mailbox", Float32, 16),
            ("h", "activation", BFloat16, 16),
        ]
    return compile_pointers(
        make_body(config),
        params,
        name=config.label,
        arch=arch,
        grid=(config.cluster, config.M, 1),
        block=config.threads,
        smem=config.smem,
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
    )
