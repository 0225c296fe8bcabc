"""Type rules shared by op families, and the short way to declare an op from a function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, LocalReference, Op, register, require
from k3fuse.tensor_type import DType, TensorType

Rule = Callable[[list[TensorType], Attrs, Context], TensorType | list[TensorType]]


def declare(
    name: str,
    rule: Rule,
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    attrs: tuple[str, ...] = (),
    *,
    updates: dict[int, int] | None = None,
    commutative: bool = False,
    variadic: bool = False,
    ranked: bool = False,
    wide: bool = False,
    doc: str,
) -> Op:
    """Register an op whose reference is `reference(*operands, **attrs)` on one rank's tensors.

    With `variadic` the reference takes the operands as one list; with `ranked` it also gets
    `ctx=` (which rank of how many).
    """

    def infer(types: list[TensorType], given: Attrs, ctx: Context) -> list[TensorType]:
        result = rule(types, given, ctx)
        return result if isinstance(result, list) else [result]

    def run(operands: list[Tensor], given: Attrs, ctx: Context) -> tuple[Tensor, ...]:
        extra = {"ctx": ctx} if ranked else {}
        positional = [operands] if variadic else operands
        out = reference(*positional, **given, **extra)
        return out if isinstance(out, tuple) else (out,)

    local: LocalReference = run
    return register(
        Op(
            name=name,
            infer=infer,
            reference=local,
            attrs=frozenset(attrs),
            updates=updates or {},
            commutative=commutative,
            wide=wide,
            doc=doc,
        )
    )


def arity(types: list[TensorType], count: int, name: str) -> None:
    """The op `name` takes exactly `count` operands."""
    require(len(types) == count, f"{name} takes {count} operands, got {len(types)}")


def replicated(types: list[TensorType], name: str) -> None:
    """Every operand must be whole on every rank."""
    for index, type_ in enumerate(types):
        require(
            type_.placement.is_replicate,
            f"{name}: operand {index} must be replicated, is {type_}",
        )


def same_shape(a: TensorType, b: TensorType, name: str) -> None:
    """Equal global shapes: no op broadcasts."""
    require(a.shape == b.shape, f"{name}: shapes differ, {a} and {b}")


def same_placement(a: TensorType, b: TensorType, name: str) -> None:
    """Both whole, both cut along one dimension, or both terms of a sum."""
    require(a.placement == b.placement, f"{name}: placements differ, {a} and {b}")


def size(type_: TensorType, dim: int, name: str) -> int:
    """A dimension that must be a plain number."""
    value = type_.shape[dim]
    require(isinstance(value, int), f"{name}: dimension {dim} of {type_} must be a number")
    assert isinstance(value, int)
    return value


def divisible(type_: TensorType, ctx: Context, name: str) -> TensorType:
    """A sharded result must cut into equal blocks; says which dimension does not."""
    if type_.placement.is_shard:
        value = type_.shape[type_.placement.dim]
        require(
            isinstance(value, int) and value % ctx.tp == 0,
            f"{name}: dimension {type_.placement.dim} of {type_} does not divide by {ctx.tp} ranks",
        )
    return type_


def float_attr(attrs: Attrs, key: str) -> float:
    """A number attribute."""
    value = attrs[key]
    require(isinstance(value, int | float), f"attribute {key} must be a number, is {value!r}")
    assert isinstance(value, int | float)
    return float(value)


def int_attr(attrs: Attrs, key: str) -> int:
    """An integer attribute."""
    value = attrs[key]
    require(isinstance(value, int), f"attribute {key} must be an integer, is {value!r}")
    assert isinstance(value, int)
    return value


def accumulator(dtype: DType) -> DType:
    """fp32 arithmetic, or fp64 when the operands are fp64 (the exact interpreter)."""
    return DType.F64 if dtype == DType.F64 else DType.F32


def result_dtype(out: str | None, *, term: bool) -> torch.dtype | None:
    """The torch dtype of attribute `out`; a term of a sum is rounded when the sum is whole."""
    if out is None:
        return None
    dtype = DType(out)
    return functional.UNROUNDED if term and dtype == DType.F32 else dtype.to_torch()


def sharded_dim(type_: TensorType, dim: int) -> bool:
    """Whether the ranks hold blocks along `dim`."""
    return type_.placement.is_shard and type_.placement.dim == dim
