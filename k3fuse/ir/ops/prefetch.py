"""L2 prefetch: a hint that changes no value, so it needs a home in the graph but no result."""

from __future__ import annotations

from torch import Tensor

from k3fuse.ir.op import Attrs, Context, Op, register, require
from k3fuse.tensor_type import TensorType


def _infer(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    require(bool(types), "l2_prefetch takes at least one static value")
    return []


def _nothing(operands: list[Tensor], attrs: Attrs, ctx: Context) -> tuple[Tensor, ...]:
    return ()


register(
    Op(
        name="l2_prefetch",
        infer=_infer,
        reference=_nothing,
        attrs=frozenset(("bytes",)),
        effect=True,
        doc="bring the first `bytes` of the static operands, in order, into L2",
    )
)
