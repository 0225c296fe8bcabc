"""Views and slices. They move no data; canonicalize removes those that say nothing."""

from __future__ import annotations

import math

from torch import Tensor

from k3fuse.ir.op import Attrs, Context, TypeRuleError, require
from k3fuse.ir.ops.rules import arity, declare, divisible, int_attr, size
from k3fuse.tensor_type import Dim, TensorType, shard


def _shape_attr(attrs: Attrs) -> tuple[Dim, ...]:
    value = attrs["shape"]
    require(isinstance(value, tuple), f"view: shape must be a tuple, is {value!r}")
    assert isinstance(value, tuple)
    dims: list[Dim] = []
    for d in value:
        require(isinstance(d, int | str), f"view: bad size {d!r}")
        assert isinstance(d, int | str)
        dims.append(d)
    return tuple(dims)


def _leading(shape: tuple[Dim, ...], dim: int) -> tuple[tuple[str, ...], int]:
    """The sizes before `dim`, multiplied: symbolic ones by name, numbers by value."""
    names = tuple(sorted(d for d in shape[:dim] if isinstance(d, str)))
    return names, math.prod(d for d in shape[:dim] if isinstance(d, int))


def _view(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "view")
    (x,) = types
    shape = _shape_attr(attrs)
    require(
        _leading(x.shape, len(x.shape)) == _leading(shape, len(shape)),
        f"view: {x} has another number of elements than {shape}",
    )
    if not x.placement.is_shard:
        return TensorType(x.dtype, shape, x.placement)
    before = _leading(x.shape, x.placement.dim)
    for dim, extent in enumerate(shape):
        if _leading(shape, dim) == before and isinstance(extent, int) and extent % ctx.tp == 0:
            return TensorType(x.dtype, shape, shard(dim))
    raise TypeRuleError(f"view: the shards of {x} are no equal blocks of {shape}")


def _view_reference(x: Tensor, shape: tuple[Dim, ...], *, ctx: Context) -> Tensor:
    return x.reshape(ctx.shape)


def _slice(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "slice")
    (x,) = types
    dim, start, stop = (int_attr(attrs, k) for k in ("dim", "start", "stop"))
    require(0 <= dim < len(x.shape), f"slice: {x} has no dimension {dim}")
    extent = size(x, dim, "slice")
    require(0 <= start < stop <= extent, f"slice: [{start}:{stop}] leaves dimension {dim} of {x}")
    require(
        not (x.placement.is_shard and x.placement.dim == dim),
        f"slice: dimension {dim} of {x} is split over the ranks",
    )
    shape = (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
    return TensorType(x.dtype, shape, x.placement)


def _slice_reference(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    return x.narrow(dim, start, stop - start)


def _take_shard(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "take_shard")
    (x,) = types
    require(x.placement.is_replicate, f"take_shard: {x} is not whole")
    return divisible(x.at(shard(int_attr(attrs, "dim"))), ctx, "take_shard")


def _take_shard_reference(x: Tensor, dim: int, *, ctx: Context) -> Tensor:
    return x.chunk(ctx.tp, dim)[ctx.rank]


declare(
    "take_shard",
    _take_shard,
    _take_shard_reference,
    ("dim",),
    ranked=True,
    doc="a rank's block of a value that every rank holds whole: no communication",
)
declare(
    "view",
    _view,
    _view_reference,
    ("shape",),
    ranked=True,
    doc="the same elements in another shape; shards must stay equal blocks",
)
declare(
    "slice",
    _slice,
    _slice_reference,
    ("dim", "start", "stop"),
    doc="elements start..stop of one dimension that is not split over the ranks",
)
