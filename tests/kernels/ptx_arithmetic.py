"""PTX instructions that compute a lane from its own operands, as numpy functions over all lanes.

Approximate instructions give the nearest float32, with the flushes to zero that they ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

U32, F32, F64 = np.uint32, np.float32, np.float64

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"{kind}8": dtype for kind, dtype in (("b", np.uint8), ("u", np.uint8), ("s", np.int8))},
    **{f"{kind}16": dtype for kind, dtype in (("b", np.uint16), ("u", np.uint16), ("s", np.int16))},
    **{f"{kind}32": dtype for kind, dtype in (("b", U32), ("u", U32), ("s", np.int32), ("f", F32))},
    **{f"{kind}64": dtype for kind, dtype in (("b", np.uint64), ("u", np.uint64), ("s", np.int64))},
}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


class Lanewise(NamedTuple):
    """compute(*operands) -> result, of these types."""

    compute: Callable[..., Any]
    result: str
    operands: tuple[str, ...]


def lanewise(op: tuple[str, ...]) -> Lanewise | None:
    """What an opcode computes; None for instructions that are not lane by lane."""
    name, kind = op[0], op[-1]
    if ".".join(op) in _WHOLE:
        return _WHOLE[".".join(op)]
    if name == "setp":
        return Lanewise(_comparison(op[1], kind), "pred", (kind, kind))
    if name == "cvt" and kind in DTYPES and op[-2] in DTYPES and len(op) == 3:
        target = DTYPES[op[-2]]
        return Lanewise(lambda a: np.asarray(a).astype(target), op[-2], (kind,))
    if name in ("mul", "mad") and kind != "f32" and op[1] in ("lo", "wide", "hi"):
        return _product(name, op[1], kind)
    if name == "selp":
        return Lanewise(lambda a, b, p: np.where(p, a, b), kind, (kind, kind, "pred"))
    if name in ("shl", "shr"):
        shift = _shift_left if name == "shl" else _shift_right
        return Lanewise(shift, kind, (kind, "u32"))
    if name == "popc":
        return Lanewise(lambda a: np.bitwise_count(a).astype(U32), "b32", (kind,))
    if kind == "f32" and name in _FLOAT and set(op[1:-1]) <= {"rn", "approx", "ftz"}:
        compute, count = _FLOAT[name]
        return Lanewise(_flushed(compute) if "ftz" in op else compute, kind, (kind,) * count)
    if name in _INTEGER and len(op) == 2 and kind in DTYPES:
        compute, count = _INTEGER[name]
        return Lanewise(compute, kind, (kind,) * count)
    return None


def to_bf16(x: Any) -> Any:
    """Bits of float32 rounded to bfloat16, to nearest even, in the low half of a word."""
    bits = np.asarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FFF), rounded)


def halves(words: Any, kind: str) -> tuple[Any, Any]:
    """The two bfloat16 or float16 of each word as float32, low half first."""
    if kind == "f16":
        low, high = (words & U32(0xFFFF)).astype(np.uint16), (words >> U32(16)).astype(np.uint16)
        return low.view(np.float16).astype(F32), high.view(np.float16).astype(F32)
    return (words << U32(16)).view(F32), (words & U32(0xFFFF0000)).view(F32)


def _comparison(test: str, kind: str) -> Callable[[Any, Any], Any]:
    if test in ("nan", "num"):
        return (lambda a, b: np.isnan(a) | np.isnan(b)) if test == "nan" else _ordered
    plain = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
    plain |= {"gt": np.greater, "ge": np.greater_equal}
    if test in plain:
        if kind == "f32" and test == "ne":
            return lambda a, b: (a != b) & _ordered(a, b)
        return plain[test]
    return lambda a, b: plain[test[:-1]](a, b) | ~_ordered(a, b)  # "ltu" and so on


def _ordered(a: Any, b: Any) -> Any:
    return ~(np.isnan(a) | np.isnan(b))


def _product(name: str, part: str, kind: str) -> Lanewise:
    wide = WIDE.get(kind)
    if part == "wide":
        result = DTYPES[WIDE[kind]]
        multiply = lambda a, b: np.multiply(a, b, dtype=result)  # noqa: E731
        if name == "mad":
            kinds = (kind, kind, WIDE[kind])
            return Lanewise(lambda a, b, c: multiply(a, b) + c, WIDE[kind], kinds)
        return Lanewise(multiply, WIDE[kind], (kind, kind))
    if part == "lo":
        if name == "mad":
            return Lanewise(lambda a, b, c: a * b + c, kind, (kind,) * 3)
        return Lanewise(np.multiply, kind, (kind, kind))
    assert name == "mul"
    if wide is not None:
        bits, dtype = np.dtype(DTYPES[kind]).itemsize * 8, DTYPES[wide]
        return Lanewise(
            lambda a, b: (np.multiply(a, b, dtype=dtype) >> dtype(bits)).astype(DTYPES[kind]),
            kind,
            (kind, kind),
        )
    return Lanewise(_high_signed if kind == "s64" else _high_unsigned, kind, (kind, kind))


def _high_unsigned(a: Any, b: Any) -> Any:
    """The upper 64 bits of products, from products of halves."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


def _high_signed(a: Any, b: Any) -> Any:
    high = _high_unsigned(np.asarray(a).view(np.uint64), np.asarray(b).view(np.uint64))
    return high.view(np.int64) - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


def _shift_left(a: Any, count: Any) -> Any:
    bits = a.dtype.itemsize * 8
    held = np.minimum(count, U32(bits - 1)).astype(a.dtype)
    return np.where(count < bits, a << held, a.dtype.type(0))


def _shift_right(a: Any, count: Any) -> Any:
    bits = a.dtype.itemsize * 8
    held = np.minimum(count, U32(bits - 1)).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> held
    return np.where(count < bits, a >> held, a.dtype.type(0))


def _funnel_left(low: Any, high: Any, count: Any) -> Any:
    pair = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | low
    return ((pair << (count & U32(31)).astype(np.uint64)) >> np.uint64(32)).astype(U32)


def _permute(a: Any, b: Any, selector: Any) -> Any:
    pair = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint64)
    for byte in range(4):
        chosen = (selector >> U32(4 * byte)) & U32(15)
        picked = (pair >> ((chosen & U32(7)) * U32(8)).astype(np.uint64)) & np.uint64(0xFF)
        sign = np.where(picked >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        result |= np.where(chosen & U32(8), sign, picked) << np.uint64(8 * byte)
    return result.astype(U32)


def _divide(a: Any, b: Any) -> Any:
    """Towards zero; of a division by zero PTX says nothing."""
    if np.asarray(a).dtype.kind == "u":
        return a // np.maximum(b, 1)
    size = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) == (b < 0), size, -size).astype(np.asarray(a).dtype)


def _fma(a: Any, b: Any, c: Any) -> Any:
    """The product is exact in float64; the sum is rounded twice, which rarely shows."""
    return (np.asarray(a, F64) * b + c).astype(F32)


def _fma_down(a: Any, b: Any, c: Any) -> Any:
    exact = np.asarray(a, F64) * b + c
    near = exact.astype(F32)
    return np.where(near > exact, np.nextafter(near, F32(-np.inf)), near)


def _flushed(compute: Callable[..., Any]) -> Callable[..., Any]:
    def flush(x: Any) -> Any:
        return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)

    return lambda *operands: flush(compute(*map(flush, operands)))


def _two_bf16(a: Any, b: Any) -> Any:
    (a0, a1), (b0, b1) = halves(np.asarray(a), "bf16"), halves(np.asarray(b), "bf16")
    return to_bf16(a0 * b0) | (to_bf16(a1 * b1) << U32(16))


def _two_f16(high: Any, low: Any) -> Any:
    upper, lower = (np.asarray(x).astype(np.float16).view(np.uint16) for x in (high, low))
    return lower.astype(U32) | (upper.astype(U32) << U32(16))


_FLOAT: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (np.add, 2),
    "sub": (np.subtract, 2),
    "mul": (np.multiply, 2),
    "div": (np.divide, 2),
    "fma": (_fma, 3),
    "max": (np.fmax, 2),
    "min": (np.fmin, 2),
    "neg": (np.negative, 1),
    "abs": (np.abs, 1),
    "mov": (lambda a: a, 1),
    "rcp": (lambda a: F32(1) / a, 1),
    "ex2": (lambda a: np.exp2(np.asarray(a, F64)).astype(F32), 1),
    "lg2": (lambda a: np.log2(np.asarray(a, F64)).astype(F32), 1),
    "rsqrt": (lambda a: (1 / np.sqrt(np.asarray(a, F64))).astype(F32), 1),
}
_INTEGER: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (np.add, 2),
    "sub": (np.subtract, 2),
    "and": (np.bitwise_and, 2),
    "or": (np.bitwise_or, 2),
    "xor": (np.bitwise_xor, 2),
    "not": (np.invert, 1),
    "neg": (np.negative, 1),
    "min": (np.minimum, 2),
    "max": (np.maximum, 2),
    "div": (_divide, 2),
    "mov": (lambda a: a, 1),
}
_WHOLE = {
    "cvt.rn.bf16x2.f32": Lanewise(
        lambda a, b: to_bf16(b) | (to_bf16(a) << U32(16)), "b32", ("f32", "f32")
    ),
    "cvt.rn.f16x2.f32": Lanewise(_two_f16, "b32", ("f32", "f32")),
    "cvt.sat.f32.f32": Lanewise(
        lambda a: np.where(np.isnan(a), F32(0), np.clip(a, F32(0), F32(1))), "f32", ("f32",)
    ),
    "fma.rm.f32": Lanewise(_fma_down, "f32", ("f32",) * 3),
    "mul.rn.bf16x2": Lanewise(_two_bf16, "b32", ("b32", "b32")),
    "prmt.b32": Lanewise(_permute, "b32", ("b32",) * 3),
    "shf.l.wrap.b32": Lanewise(_funnel_left, "b32", ("b32",) * 3),
}
