"""Small CuTe DSL kernels whose PTX the audit is tested on; `kernels.py DIR` compiles them all.

Run it with an interpreter that has nvidia-cutlass-dsl 4.8.1. Needs no GPU.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import sys
import tempfile
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import AddressSpace, BFloat16, Float32, Int32, Int64, Uint8, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream, nullptr
from cutlass.experimental import primitives

ARCHES = ("sm_90a", "sm_103a")
EMPTY = 0x80000000
LIMIT = 1 << 20
WORD4 = "{ {$w0}, {$w1}, {$w2}, {$w3} }"
asm = cute.arch.inline_ptx


def pointer(dtype, align=16):
    """A stand-in for a device pointer of a parameter."""
    return nullptr(dtype, AddressSpace.gmem, assumed_align=align)


@cute.jit
def projection(p: list[cute.Pointer], n: list[Int32]):
    """w, x, y: y[row] = sum of w[row] * x; the first weights are loaded above the wait."""
    t = cute.arch.thread_idx()[0]
    row = cute.arch.block_idx()[0]
    cute.arch.griddepcontrol_launch_dependents()
    w = p[0] + (Int64(row) * 1024 + t)
    early = [cute.arch.load(w + 128 * i, Float32) for i in range(4)]
    cute.arch.griddepcontrol_wait()
    total = Float32(0.0)
    for i in range_constexpr(8):
        value = early[i] if i < 4 else cute.arch.load(w + 128 * i, Float32)
        total = total + value * cute.arch.load(p[1] + (t + 128 * i), Float32)
    total = cute.arch.warp_reduction_sum(total)
    if t % 32 == 0:
        cute.arch.atomic_add(p[2] + row, total, sem="relaxed", scope="gpu")


@cute.jit
def poll(box: cute.Pointer):
    """Spin until no word at `box` is the empty pattern."""
    read = "ld.volatile.global.v4.b32 " + WORD4 + ", [{$r0}];"
    a, b, c, d = asm(read, write_only_types=[Uint32] * 4, read_only_args=[box])
    empty = (
        (a == Uint32(EMPTY)) | (b == Uint32(EMPTY)) | (c == Uint32(EMPTY)) | (d == Uint32(EMPTY))
    )
    tries = Int32(0)
    while empty & (tries < LIMIT):
        a, b, c, d = asm(read, write_only_types=[Uint32] * 4, read_only_args=[box])
        empty = (
            (a == Uint32(EMPTY))
            | (b == Uint32(EMPTY))
            | (c == Uint32(EMPTY))
            | (d == Uint32(EMPTY))
        )
        tries += 1
    return a, b, c, d


@cute.jit
def exchange(p: list[cute.Pointer], n: list[Int32]):
    """x, multicast, box, epoch, y; ranks: send x to every rank, add up what the ranks sent."""
    t = cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    turn = cute.arch.load(p[3], Uint32)
    stage = Int32(turn % Uint32(3))
    read = "ld.global.v4.b32 " + WORD4 + ", [{$r0}];"
    mine = asm(read, write_only_types=[Uint32] * 4, read_only_args=[p[0] + t * 4])
    send = "multimem.st.relaxed.sys.global.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };"
    words = [
        asm("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[v]) for v in mine
    ]
    asm(send, read_only_args=[p[1] + (stage * 4096 + t * 4), *words])
    total = Uint32(0)
    for rank in range(n[0]):
        a, b, c, d = poll(p[2] + ((stage * n[0] + rank) * 512 + t * 4))
        total = total + a + b + c + d
    cute.arch.store(p[4] + t, total)
    cute.arch.sync_threads()
    if t == 0:
        cute.arch.store(p[3], turn + Uint32(1))
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def flag_exchange(p: list[cute.Pointer], n: list[Int32]):
    """boxes (a table of peer addresses), flag, epoch, y: wait for a flag to reach the epoch."""
    t = cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    turn = cute.arch.load(p[2], Uint32) + Uint32(1)
    if t == 0:
        tries = Int32(0)
        seen = cute.arch.load(p[1], Uint32, sem="acquire", scope="sys")
        while (seen < turn) & (tries < LIMIT):
            seen = cute.arch.load(p[1], Uint32, sem="acquire", scope="sys")
            tries += 1
        cute.arch.store(p[2], turn)
    cute.arch.sync_threads()
    peer = cute.make_ptr(
        Float32, cute.arch.load(p[0] + n[0], Int64), AddressSpace.gmem, assumed_align=16
    )
    cute.arch.store(p[3] + t, cute.arch.load(peer + t, Float32, sem="relaxed", scope="sys"))


@cute.jit
def bulk(p: list[cute.Pointer], n: list[Int32]):
    """w, x, y: bulk copies to shared memory, the weights' above the wait."""
    t = cute.arch.thread_idx()[0]
    base = cute.arch.get_dyn_smem(Uint8, alignment=1024)
    bar = cute.recast_ptr(base + 8192, dtype=Int64)
    if t == 0:
        cute.arch.mbarrier_init(bar, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(bar, 8192)
        primitives.cp_async_bulk_shared_cluster_global(base, p[0], bar, 4096)
    cute.arch.griddepcontrol_wait()
    if t == 0:
        primitives.cp_async_bulk_shared_cluster_global(base + 4096, p[1], bar, 4096)
    cute.arch.mbarrier_wait(bar, 0)
    s = cute.make_tensor(cute.recast_ptr(base, dtype=BFloat16), cute.make_layout(4096))
    total = Float32(0.0)
    for j in cutlass.range(t, 2048, 128, unroll=4):
        total += s[j].to(Float32) * s[j + 2048].to(Float32)
    cute.arch.store(p[2] + t, total)


@cute.jit
def warps(p: list[cute.Pointer], n: list[Int32]):
    """w, x, y: only warp 0 waits and reads x; it hands x on through shared memory."""
    t = cute.arch.thread_idx()[0]
    s = cute.arch.alloc_smem(Float32, 128, 128)
    row = cute.make_tensor(s, cute.make_layout(128))
    if t < 32:
        cute.arch.griddepcontrol_wait()
    value = cute.arch.load(p[0] + t, Float32)
    if t < 32:
        for i in range_constexpr(4):
            row[t + 32 * i] = cute.arch.load(p[1] + (t + 32 * i), Float32)
    cute.arch.sync_threads()
    cute.arch.store(p[2] + t, value * row[t])


@cute.jit
def preload(p: list[cute.Pointer], n: list[Int32]):
    """w, x, y; rows: a loop over weights above the wait."""
    t = cute.arch.thread_idx()[0]
    total = Float32(0.0)
    for i in cutlass.range(0, n[0], 1, unroll=1):
        total += cute.arch.load(p[0] + (i * 128 + t), Float32)
    cute.arch.griddepcontrol_wait()
    cute.arch.store(p[2] + t, total * cute.arch.load(p[1] + t, Float32))


@cute.jit
def held_pointer(p: list[cute.Pointer], n: list[Int32]):
    """w, state, y; which: pick one of two pointers, and pass one through shared memory."""
    t = cute.arch.thread_idx()[0]
    s = cute.arch.alloc_smem(Int64, 2, 16)
    held = cute.make_tensor(s, cute.make_layout(2))
    if t == 0:
        held[0] = p[0].toint()
    cute.arch.sync_threads()
    weight = cute.make_ptr(Float32, held[0], AddressSpace.gmem, assumed_align=16)
    value = cute.arch.load(weight + t, Float32)
    picked = p[0].toint()
    if n[0] > 0:
        picked = p[0].toint() + Int64(4096)
    picked = cute.make_ptr(Float32, picked, AddressSpace.gmem, assumed_align=16)
    value = value + cute.arch.load(picked + t, Float32)
    cute.arch.griddepcontrol_wait()
    cute.arch.store(p[2] + t, value + cute.arch.load(p[1] + t, Float32))


F32 = (Float32,) * 3
KERNELS = {
    "projection": (projection, F32, 0),
    "exchange": (exchange, (Uint32, Uint32, Uint32, Uint32, Uint32), 0),
    "flag_exchange": (flag_exchange, (Int64, Uint32, Uint32, Float32), 0),
    "bulk": (bulk, (Uint8, Uint8, Float32), 8192 + 8),
    "warps": (warps, F32, 0),
    "preload": (preload, F32, 0),
    "held_pointer": (held_pointer, F32, 0),
}
"""name -> body, element types of its pointers, dynamic shared memory in bytes."""


def compile_ptx(name: str, arch: str) -> str:
    """PTX of one kernel as the DSL prints it."""
    body, dtypes, smem = KERNELS[name]

    @cute.kernel
    def kernel(p: list[cute.Pointer], n: list[Int32]):
        body(p, n)

    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(p: list[cute.Pointer], n: list[Int32], stream: CUstream):
        kernel(p, n).launch(
            grid=[1, 1, 1], block=[128, 1, 1], smem=smem, stream=stream, use_pdl=True
        )

    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            host,
            [pointer(dtype) for dtype in dtypes],
            [Int32(0)],
            make_fake_stream(),
            no_jit_engine=True,
            options=f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {folder}",
        )
    return compiled.artifacts.PTX


def main(folder: Path) -> None:
    """Write NAME.ARCH.ptx of every kernel and target."""
    for arch in ARCHES:
        for name in KERNELS:
            text = compile_ptx(name, arch).rstrip("\0")
            (folder / f"{name}.{arch}.ptx").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
