"""AttnRes: the softmax mix over block snapshots and the running sum, whole and in two phases.

Two phases (K3 spec 2.3): `attn_res_blocks` needs only the snapshots and the folded query, so it
can run long before the running sum is known; `attn_res_merge` adds that one source by online
softmax.
"""

from __future__ import annotations

from torch import Tensor

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import accumulator, arity, declare, float_attr, replicated
from k3fuse.tensor_type import TensorType


def _mix(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    """Operands: norm weight [D], projection weight [1,D], then the sources [M,D], last the sum."""
    require(len(types) >= 3, "attn_res_mix takes a norm, a projection and at least one source")
    replicated(types, "attn_res_mix")
    norm, proj, *sources = types
    float_attr(attrs, "eps")
    require(all(s == sources[0] for s in sources), "attn_res_mix: sources differ in type")
    width = sources[0].shape[1:]
    require(
        norm.shape == width and proj.shape == (1, *width),
        f"attn_res_mix: {norm} and {proj} do not fit {sources[0]}",
    )
    return sources[0]


def _blocks(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    """Operands: folded query u [D], then the snapshots [M,D]."""
    require(len(types) >= 2, "attn_res_blocks takes a query and at least one snapshot")
    replicated(types, "attn_res_blocks")
    query, *sources = types
    float_attr(attrs, "eps")
    require(all(s == sources[0] for s in sources), "attn_res_blocks: snapshots differ in type")
    require(query.shape == sources[0].shape[1:], f"attn_res_blocks: {query} does not fit")
    acc = accumulator(sources[0].dtype)
    rows = sources[0].shape[:1]
    return [TensorType(acc, rows), TensorType(acc, rows), TensorType(acc, sources[0].shape)]


def _mix_reference(operands: list[Tensor], eps: float) -> Tensor:
    norm, proj, *sources = operands
    return functional.attn_res_mix(sources, norm, proj, eps=eps)


def _blocks_reference(operands: list[Tensor], eps: float) -> tuple[Tensor, ...]:
    query, *snapshots = operands
    return functional.attn_res_blocks(snapshots, query, eps=eps)


def _merge(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    """Operands: query [D], block part (max [M], denominator [M], sum [M,D]), running sum [M,D]."""
    arity(types, 5, "attn_res_merge")
    replicated(types, "attn_res_merge")
    query, top, denominator, mixed, prefix = types
    float_attr(attrs, "eps")
    require(
        mixed.shape == prefix.shape
        and top.shape == denominator.shape == prefix.shape[:1]
        and query.shape == prefix.shape[1:],
        f"attn_res_merge: block part does not fit {prefix}",
    )
    return prefix


declare(
    "attn_res_mix",
    _mix,
    _mix_reference,
    ("eps",),
    variadic=True,
    doc="softmax over <RMSNorm(source), proj> of the raw sources (K3 spec 2.3)",
)
declare(
    "attn_res_blocks",
    _blocks,
    _blocks_reference,
    ("eps",),
    variadic=True,
    wide=True,
    doc="block phase of the mix: running maximum, denominator and unnormalised sum",
)
declare(
    "attn_res_merge",
    _merge,
    functional.attn_res_merge,
    ("eps",),
    doc="merge phase of the mix: the running sum joins the block phase by online softmax",
)
