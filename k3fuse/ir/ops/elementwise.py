"""Elementwise ops: sums, products, casts, and the gated activations of the MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import arity, declare, float_attr, same_placement, same_shape
from k3fuse.tensor_type import DType, TensorType, widest


def _binary(name: str, *, sums: bool) -> None:
    def rule(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
        arity(types, 2, name)
        a, b = types
        same_shape(a, b, name)
        same_placement(a, b, name)
        require(sums or not a.placement.is_partial, f"{name}: not linear, so not of partial sums")
        return TensorType(widest(a.dtype, b.dtype), a.shape, a.placement)

    def reference(a: Tensor, b: Tensor) -> Tensor:
        return a + b if sums else a * b

    declare(name, rule, reference, commutative=True, doc=f"elementwise {name} of equal shapes")


def _unary(name: str, reference: torch.nn.Module) -> None:
    def rule(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
        arity(types, 1, name)
        require(not types[0].placement.is_partial, f"{name}: not linear, so not of partial sums")
        return types[0]

    def rounded(x: Tensor) -> Tensor:
        return reference(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)

    declare(name, rule, rounded, doc=f"elementwise {name}, fp32 inside")


def _gated(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 2, "gated activation")
    a, b = types
    same_shape(a, b, "gated activation")
    same_placement(a, b, "gated activation")
    require(not a.placement.is_partial, "gated activation: not linear, so not of partial sums")
    for key in attrs:
        float_attr(attrs, key)
    return a


def _cast(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "cast")
    (x,) = types
    dtype = DType(str(attrs["dtype"]))
    require(dtype.is_float == x.dtype.is_float, f"cast: {x} to {dtype} changes the kind of number")
    return TensorType(dtype, x.shape, x.placement)


def _cast_reference(x: Tensor, dtype: str, *, ctx: Context) -> Tensor:
    wanted = DType(dtype).to_torch()
    # An exact (fp64) run keeps fp64 through every cast: rounding is what it leaves out.
    return x if ctx.exact and wanted.is_floating_point else x.to(wanted)


_binary("add", sums=True)
_binary("mul", sums=False)
_unary("sigmoid", torch.nn.Sigmoid())
_unary("silu", torch.nn.SiLU())
declare(
    "situ_mul",
    _gated,
    functional.situ_mul,
    ("beta", "linear_beta"),
    doc="b tanh(g/b) sigmoid(g) * c tanh(u/c), fp32 inside (K3 spec 2.6)",
)
declare("silu_mul", _gated, functional.silu_mul, doc="silu(gate) * up, fp32 inside")
declare("sigmoid_mul", _gated, functional.sigmoid_mul, doc="x * sigmoid(gate), fp32 inside")
declare(
    "cast",
    _cast,
    _cast_reference,
    ("dtype",),
    ranked=True,
    doc="round or widen to `dtype`",
)
