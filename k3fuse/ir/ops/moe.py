"""Mixture of experts: routing, and the routed experts as one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import (
    arity,
    declare,
    divisible,
    float_attr,
    int_attr,
    replicated,
    result_dtype,
    sharded_dim,
    size,
)
from k3fuse.tensor_type import PARTIAL, DType, TensorType

EXPERT_SHARD_DIMS = (1, 1, 2, 1, 1, 2)
"""Dimension over the intermediate size of w1, w3, w2 and of their scales."""


def _route(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    arity(types, 2, "route_topk")
    replicated(types, "route_topk")
    logits, bias = types
    require(
        logits.dtype in (DType.F32, DType.F64),
        f"route_topk: logits must be f32, are {logits}: narrower ones choose other experts",
    )
    top_k = int_attr(attrs, "top_k")
    require(bias.shape == logits.shape[1:], f"route_topk: bias {bias} does not fit {logits}")
    require(top_k <= size(logits, 1, "route_topk"), f"route_topk: {top_k} of {logits}")
    float_attr(attrs, "scale")
    shape = (logits.shape[0], top_k)
    return [TensorType(DType.I32, shape), TensorType(logits.dtype, shape)]


def _experts(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    require(len(types) in (6, 9), "moe_experts takes z, ids, weights, w1, w3, w2 [, 3 scales]")
    replicated(types[:3], "moe_experts")
    z, weights = types[0], types[3:]
    packed = weights[0].dtype == DType.U8
    require(packed == (len(types) == 9), "moe_experts: packed weights and scales go together")
    width = size(weights[0], 2, "moe_experts") * (2 if packed else 1)
    require(z.shape[1] == width, f"moe_experts: {z} does not fit {weights[0]}")
    out = attrs.get("out")
    result = z if out is None else TensorType(DType(str(out)), z.shape)
    require(result.dtype.itemsize >= z.dtype.itemsize, f"moe_experts: {out} would narrow {z}")
    if all(w.placement.is_replicate for w in weights):
        return result
    for type_, dim in zip(weights, EXPERT_SHARD_DIMS, strict=False):
        require(sharded_dim(type_, dim), f"moe_experts: {type_} is not cut by intermediate size")
        divisible(type_, ctx, "moe_experts")
    return result.at(PARTIAL)


def _experts_reference(
    *operands: Tensor,
    ctx: Context,
    out: str | None = None,
    unrounded: bool = False,
    **attrs: Any,
) -> Tensor:
    dtype = result_dtype(out, term=unrounded or ctx.types[3].placement.is_shard)
    return functional.moe_experts(*operands, **attrs, out_dtype=dtype)


declare(
    "route_topk",
    _route,
    functional.route_topk,
    ("top_k", "renormalize", "scale"),
    doc="sigmoid scores, biased choice of top_k experts (ties to the lower id), unbiased weights",
)
declare(
    "moe_experts",
    _experts,
    _experts_reference,
    ("activation", "beta", "linear_beta", "out", "unrounded"),
    ranked=True,
    doc="sum over a row's experts of weight * W2 act(W1 z, W3 z) (K3 spec 2.8)",
)
