"""The vocabulary of values: dtype, shape with symbolic rows, placement over the ranks.

Shapes are global; the placement says what each rank of the tensor-parallel group holds, in the
words of torch DTensor: replicated (no suffix in text), `@S(dim)` sharded, `@P` partial sums.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from k3fuse.errors import ParseError

Dim = int | str
"""A size, or the name of one that is known at lowering only: M rows, R requests, slots, pages."""


class DType(StrEnum):
    """Element types, by the names used in IR text."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def itemsize(self) -> int:
        return _TORCH[self].itemsize

    def to_torch(self) -> torch.dtype:
        return _TORCH[self]


_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U8: torch.uint8,
}
_FLOATS = {DType.BF16, DType.F16, DType.F32, DType.F64}
_NAMES = {dtype.value for dtype in DType}
_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TORCH.items()}


def dtype_of(torch_dtype: torch.dtype) -> DType:
    """The IR name of a torch dtype; KeyError for one that the IR does not have."""
    return _FROM_TORCH[torch_dtype]


def widest(a: DType, b: DType) -> DType:
    """The dtype that torch would promote a pair to."""
    return dtype_of(torch.promote_types(a.to_torch(), b.to_torch()))


@dataclass(frozen=True)
class Placement:
    """What a rank holds of a value: all of it, one shard of `dim`, or a term of a sum."""

    kind: str = "replicate"  # replicate | shard | partial
    dim: int = -1

    def __str__(self) -> str:
        if self.kind == "shard":
            return f"@S({self.dim})"
        return "@P" if self.kind == "partial" else ""

    @property
    def is_replicate(self) -> bool:
        return self.kind == "replicate"

    @property
    def is_shard(self) -> bool:
        return self.kind == "shard"

    @property
    def is_partial(self) -> bool:
        return self.kind == "partial"


REPLICATE = Placement()
PARTIAL = Placement("partial")


def shard(dim: int) -> Placement:
    """Shard(dim): rank r holds the r-th of T equal blocks along `dim`."""
    return Placement("shard", dim)


@dataclass(frozen=True)
class TensorType:
    """dtype, global shape and placement of a value."""

    dtype: DType
    shape: tuple[Dim, ...]
    placement: Placement = REPLICATE

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(d) for d in self.shape)}]{self.placement}"

    def at(self, placement: Placement) -> TensorType:
        return replace(self, placement=placement)

    def local_shape(self, tp: int) -> tuple[Dim, ...]:
        """The shape that one of `tp` ranks holds."""
        if not self.placement.is_shard:
            return self.shape
        dims = list(self.shape)
        size = dims[self.placement.dim]
        if isinstance(size, str) or size % tp:
            raise ValueError(f"dimension {self.placement.dim} of {self} does not divide by {tp}")
        dims[self.placement.dim] = size // tp
        return tuple(dims)

    def local_numel(self, tp: int, dims: dict[str, int]) -> int:
        """Elements on one rank, with the symbolic dimensions bound by `dims`."""
        count = 1
        for size in self.local_shape(tp):
            count *= dims[size] if isinstance(size, str) else size
        return count

    def local_bytes(self, tp: int, dims: dict[str, int]) -> int:
        return self.local_numel(tp, dims) * self.dtype.itemsize


_TYPE = re.compile(r"(\w+)\[([\w,]*)\](@P|@S\((\d+)\))?$")


def parse_type(text: str) -> TensorType:
    """Read what `str(TensorType)` writes."""
    match = _TYPE.match(text.strip())
    if match is None or match[1] not in _NAMES:
        raise ParseError(f"not a tensor type: '{text}' (expected for example bf16[M,7168]@S(1))")
    sizes = [s for s in match[2].split(",") if s]
    shape = tuple(int(s) if s.isdigit() else s for s in sizes)
    if match[3] is None:
        placement = REPLICATE
    else:
        placement = PARTIAL if match[3] == "@P" else shard(int(match[4]))
    return TensorType(DType(match[1]), shape, placement)
