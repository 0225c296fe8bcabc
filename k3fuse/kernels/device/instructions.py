"""PTX that the kernels share. Addresses in shared memory are 32-bit byte addresses."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
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


def load_words(address, count, how="global.cg"):
    """`count` bytes (2, 4, 8, 16 or 32) as a list of words; two bytes come zero-extended.

    how: "global.cg", "volatile.global", "global.L1::no_allocate" or "shared".
    """
    if count == 2:
        return [
            asm(
                f"{{ .reg .b16 h; ld.{how}.b16 h, [{{$r0}}]; cvt.u32.u16 {{$w0}}, h; }}",
                write_only_types=[Uint32],
                read_only_args=[address],
            )
        ]
    if count == 4:
        return [
            asm(
                f"ld.{how}.b32 {{$w0}}, [{{$r0}}];",
                write_only_types=[Uint32],
                read_only_args=[address],
            )
        ]
    if count == 8:
        return list(
            asm(
                f"ld.{how}.v2.b32 {{ {{$w0}}, {{$w1}} }}, [{{$r0}}];",
                write_only_types=[Uint32] * 2,
                read_only_args=[address],
            )
        )
    if count == 16:
        return list(
            asm(
                f"ld.{how}.v4.b32 {WORDS}, [{{$r0}}];",
                write_only_types=FOUR,
                read_only_args=[address],
            )
        )
    if count != 32:
        raise ValueError(f"a load of {count} bytes")
    return [*load_words(address, 16, how), *load_words(address + 16, 16, how)]


def store_words(address, words, count, how="global", predicate=None):
    """`count` bytes (2, 4, 8, 16 or 32) of a list of words. how: "global", "volatile.global",
    "shared".

    A predicate travels as a number: one that the compiler knows would be printed as one, not as
    a register, where ptxas takes only registers.
    """
    if count == 32:
        store_words(address, words[:4], 16, how, predicate)
        store_words(address + 16, words[4:], 16, how, predicate)
        return
    if count not in (2, 4, 8, 16):
        raise ValueError(f"a store of {count} bytes")
    used = words[: max(count // 4, 1)]
    names = [f"{{$r{i + 1}}}" for i in range(len(used))]
    if count == 2:
        before, vector, data = f".reg .b16 h; cvt.u16.u32 h, {names[0]};", "b16", "h"
    else:
        before, vector = "", f"v{len(used)}.b32" if len(used) > 1 else "b32"
        data = f"{{ {', '.join(names)} }}" if len(used) > 1 else names[0]
    guard, asked = "", [address, *used]
    if predicate is not None:
        before += f" .reg .pred q; setp.ne.b32 q, {{$r{len(used) + 1}}}, 0;"
        guard, asked = "@q ", [*asked, Int32(predicate)]
    asm(f"{{ {before} {guard}st.{how}.{vector} [{{$r0}}], {data}; }}", read_only_args=asked)


def as_word(value):
    """The bits of a float32."""
    return Uint32(llvm.bitcast(Uint32.mlir_type, value.ir_value()))


def round_bf16(values):
    """Float32 values rounded to bfloat16 and back."""
    if len(values) == 1:
        return [unpack_bf16(pack_bf16(values[0], values[0]))[0]]
    words = [pack_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return [value for word in words for value in unpack_bf16(word)]


def load_shared8(address):
    """A 64-bit word."""
    return asm("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def store_shared8(address, value):
    """A 64-bit word."""
    asm("st.shared.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def store_in_cta(address, cta, value):
    """A float32 to the same address of another CTA of the cluster."""
    asm(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; "
        "st.shared::cluster.f32 [there], {$r2}; }",
        read_only_args=[address, cta, value],
    )


def send_words(address, barrier, cta, words):
    """One, two or four words to the same address of a CTA of the cluster, where the same barrier
    counts their bytes."""
    vector = "" if len(words) == 1 else f".v{len(words)}"
    names = ", ".join(f"{{$r{i + 3}}}" for i in range(len(words)))
    data = names if len(words) == 1 else f"{{ {names} }}"
    asm(
        "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 bar, {$r1}, {$r2}; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
        f"{vector}.b32 [there], {data}, [bar]; }}",
        read_only_args=[address, barrier, cta, *words],
    )


def opaque(number):
    """A number that the compiler does not know."""
    return asm(f"mov.b32 {{$w0}}, {number};", write_only_types=[Int32])


def add_shared(address, value):
    """Add to a word of shared memory; what it was before."""
    return asm(
        "atom.shared.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, value],
    )


def or_shared(address, value):
    """Set bits of a word of shared memory."""
    asm("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def init_mbarrier(address, count):
    """A barrier in shared memory that `count` arrivals complete."""
    asm("mbarrier.init.shared.b64 [{$r0}], {$r1};", read_only_args=[address, Int32(count)])


def arrive_mbarrier(address, predicate):
    """One arrival, where the predicate (known only at run time) holds."""
    asm("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[address], predicate=predicate)


def expect_bytes(address, count):
    """One arrival; the phase completes when that many more bytes have been copied."""
    asm(
        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], {$r1};",
        read_only_args=[address, Int32(count)],
    )


def wait_mbarrier(address, parity, scope=""):
    """Until the phase of this parity is complete. scope: ".acquire.cluster" behind sends of other
    CTAs."""
    asm(
        f"{{ .reg .pred done; again: mbarrier.try_wait.parity{scope}.shared::cta.b64 done, "
        "[{$r0}], {$r1}; "
        "@done bra complete; bra again; complete: }",
        read_only_args=[address, parity],
    )


def copy_bulk(shared, source, count, barrier):
    """Start an asynchronous copy of `count` bytes, a multiple of 16, that `barrier` counts."""
    asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(count), barrier],
    )
