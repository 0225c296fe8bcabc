"""PTX that the kernels share. Addresses in shared memory are 32-bit byte addresses."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32
from cutlass._mlir.dialects import llvm

asm = cute.arch.inline_ptx
FOUR = [Uint32] * 4
WORDS = "{ {$w0}, {$w1}, {$w2}, {$w3} }"


def shared_base():
    """The first byte of dynamic shared memory."""
    return Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())


def copy16(shared, source, size=None):
    """Start an asynchronous copy of 16 bytes; `size` 0 writes zeros and reads nothing."""
    head = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16"
    if size is None:
        asm(f"{head};", read_only_args=[shared, source])
    else:
        asm(f"{head}, {{$r2}};", read_only_args=[shared, source, size])


def load_shared16(address):
    """Four words."""
    return list(
        asm(
            f"ld.shared.v4.b32 {WORDS}, [{{$r0}}];", write_only_types=FOUR, read_only_args=[address]
        )
    )


def load_shared_pair(address):
    """Two float32."""
    return list(
        asm(
            "ld.shared.v2.f32 { {$w0}, {$w1} }, [{$r0}];",
            write_only_types=[Float32] * 2,
            read_only_args=[address],
        )
    )


def store_shared_pair(address, a, b, predicate=None):
    """Two float32."""
    asm(
        "st.shared.v2.f32 [{$r0}], { {$r1}, {$r2} };",
        read_only_args=[address, a, b],
        predicate=predicate,
    )


def load_shared_float(address):
    """One float32."""
    return asm(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_shared_float(address, value):
    """One float32."""
    asm("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_global16(source, live=None, how="cg"):
    """Four words past L1; zeros, and no access, where `live` (Int32) is 0.

    Never `.nc`: ptxas moves such a load below the PDL wait.
    """
    load = f"ld.global.{how}.v4.b32 {WORDS}, [{{$r0}}];"
    if live is None:
        return list(asm(load, write_only_types=FOUR, read_only_args=[source]))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4))
    return list(
        asm(
            f"{{ .reg .pred q; setp.ne.b32 q, {{$r1}}, 0; {zeros} @q {load} }}",
            write_only_types=FOUR,
            read_only_args=[source, live],
        )
    )


def store_global16(target, words, predicate=None):
    """Four words."""
    asm(
        "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[target, *words],
        predicate=predicate,
    )


def store_global4(target, word, predicate=None):
    """One word."""
    asm("st.global.b32 [{$r0}], {$r1};", read_only_args=[target, word], predicate=predicate)


def store_global_pair(target, a, b, predicate=None):
    """Two float32."""
    asm(
        "st.global.v2.f32 [{$r0}], { {$r1}, {$r2} };",
        read_only_args=[target, a, b],
        predicate=predicate,
    )


def barrier(name, threads):
    """Named barrier of `threads` threads."""
    asm("bar.sync {$r0}, {$r1};", read_only_args=[name, Int32(threads)])


def as_float(word):
    """The float32 of these bits."""
    return Float32(llvm.bitcast(Float32.mlir_type, word.ir_value()))


def unpack_bf16(word):
    """The two bfloat16 of a word as float32, low half first."""
    return as_float(word << Uint32(16)), as_float(word & Uint32(0xFFFF0000))


def pack_bf16(low, high):
    """Two float32 rounded to bfloat16 in one word."""
    return asm(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def mma_bf16(sums, a, b):
    """m16n8k16: sums + a b, with float32 sums in four registers a lane."""
    return list(
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *sums],
        )
    )
