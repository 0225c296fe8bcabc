"""Linear maps, the embedding, and the choice of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import (
    arity,
    declare,
    divisible,
    replicated,
    result_dtype,
    same_shape,
    sharded_dim,
)
from k3fuse.tensor_type import PARTIAL, DType, TensorType, shard


def _linear(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 2, "linear")
    x, weight = types
    require(
        len(x.shape) == 2 and len(weight.shape) == 2 and x.shape[1] == weight.shape[1],
        f"linear: {x} and weight {weight} do not multiply",
    )
    out = attrs.get("out")
    dtype = x.dtype if out is None else DType(str(out))
    require(dtype.itemsize >= x.dtype.itemsize, f"linear: {dtype} would narrow {x}")
    result = TensorType(dtype, (x.shape[0], weight.shape[0]))
    if x.placement.is_replicate and weight.placement.is_replicate:
        return result
    if x.placement.is_replicate and sharded_dim(weight, 0):  # column parallel
        return divisible(result.at(shard(1)), ctx, "linear")
    if sharded_dim(x, 1) and sharded_dim(weight, 1):  # row parallel
        return result.at(PARTIAL)
    require(False, f"linear: {x} with weight {weight} is no column, row or whole split")
    return result


def _linear_reference(
    x: Tensor, weight: Tensor, *, ctx: Context, out: str | None = None, unrounded: bool = False
) -> Tensor:
    dtype = result_dtype(out, term=unrounded or ctx.types[0].placement.is_shard)
    return functional.linear(x, weight, out_dtype=dtype)


def _embedding(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 2, "embedding")
    tokens, weight = types
    replicated([tokens], "embedding")
    result = TensorType(weight.dtype, (*tokens.shape, weight.shape[1]))
    if sharded_dim(weight, 0):  # vocabulary split: other ranks' rows are zero here
        divisible(weight, ctx, "embedding")
        return result.at(PARTIAL)
    replicated([weight], "embedding weight")
    return result


def _embedding_reference(tokens: Tensor, weight: Tensor, *, ctx: Context) -> Tensor:
    rows = weight.shape[0]
    if ctx.types[1].placement.is_replicate:
        return functional.embedding(tokens, weight)
    local = tokens - ctx.rank * rows
    mine = (local >= 0) & (local < rows)
    picked = functional.embedding(local.clamp(0, rows - 1), weight)
    return torch.where(mine[:, None], picked, torch.zeros_like(picked))


def _argmax(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "argmax")
    replicated(types, "argmax")
    return TensorType(DType.I64, types[0].shape[:1])


def _argmax_local(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    arity(types, 1, "argmax_local")
    (logits,) = types
    require(sharded_dim(logits, 1), f"argmax_local: {logits} must be split by vocabulary")
    pair = (logits.shape[0], ctx.tp)
    return [
        TensorType(logits.dtype, pair, shard(1)),
        TensorType(DType.I64, pair, shard(1)),
    ]


def _argmax_local_reference(logits: Tensor, *, ctx: Context) -> tuple[Tensor, Tensor]:
    best = functional.argmax(logits)[:, None]
    return logits.gather(1, best), best + ctx.rank * logits.shape[1]


def _argmax_pick(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 2, "argmax_pick")
    replicated(types, "argmax_pick")
    same_shape(types[0], types[1], "argmax_pick")
    return TensorType(DType.I64, types[0].shape[:1])


def _argmax_pick_reference(values: Tensor, ids: Tensor) -> Tensor:
    return ids.gather(1, functional.argmax(values)[:, None])[:, 0]


declare(
    "linear",
    _linear,
    _linear_reference,
    ("out", "unrounded"),
    ranked=True,
    doc="y = x W^T, fp32 accumulation, one rounding to `out` (default: the dtype of x)",
)
declare(
    "embedding",
    _embedding,
    _embedding_reference,
    ranked=True,
    doc="rows of the table by token id; a table split by vocabulary gives a partial sum",
)
declare(
    "argmax",
    _argmax,
    functional.argmax,
    doc="id of the largest logit of each row; ties go to the lower id, NaN never wins",
)
declare(
    "argmax_local",
    _argmax_local,
    _argmax_local_reference,
    ranked=True,
    doc="the best logit of each rank's vocabulary shard and its global id, one column a rank",
)
declare(
    "argmax_pick",
    _argmax_pick,
    _argmax_pick_reference,
    doc="the id of the best of the ranks' candidates; ties go to the lower rank, so lower id",
)
