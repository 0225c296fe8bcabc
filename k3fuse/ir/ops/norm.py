"""Normalisation: RMSNorm of a whole row, and the per-head gated RMSNorm behind KDA."""

from __future__ import annotations

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import arity, declare, float_attr, replicated, same_shape, size
from k3fuse.tensor_type import TensorType


def _rms_norm(types: list[TensorType], attrs: Attrs, _: Context) -> TensorType:
    arity(types, 2, "rms_norm")
    replicated(types, "rms_norm")
    x, weight = types
    float_attr(attrs, "eps")
    require(weight.shape == x.shape[-1:], f"rms_norm: weight {weight} does not fit {x}")
    return x


def _gated_rms_norm(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 3, "gated_rms_norm")
    o, gate, weight = types
    same_shape(o, gate, "gated_rms_norm")
    replicated([weight], "gated_rms_norm weight")
    float_attr(attrs, "eps")
    require(
        o.placement == gate.placement and not o.placement.is_partial,
        f"gated_rms_norm: {o} and {gate} must be cut alike",
    )
    width, head = size(o, 1, "gated_rms_norm"), size(weight, 0, "gated_rms_norm")
    local = width // ctx.tp if o.placement.is_shard else width
    require(local % head == 0, f"gated_rms_norm: rank width {local} is not whole heads of {head}")
    return gate


declare(
    "rms_norm",
    _rms_norm,
    functional.rms_norm,
    ("eps",),
    doc="x / sqrt(mean(x^2) + eps) * weight over the last dimension, one rounding",
)
declare(
    "gated_rms_norm",
    _gated_rms_norm,
    functional.gated_rms_norm,
    ("eps",),
    doc="per-head RMSNorm of o, times sigmoid(gate); heads as wide as the weight",
)
