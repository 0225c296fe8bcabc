"""Exchanges between ranks: whole collectives as stock engines run them, and their halves.

A fused collective is a push into the peers' mailboxes, which belongs to the launch that made the
data, and a read of the own mailbox, which belongs to the launch that needs it. The result of a
push is that mailbox. Sums run in rank order in fp32 and round once, so every rank gets the same
bits whichever way they travelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from k3fuse.ir.graph import Attr
from k3fuse.ir.op import Attrs, Context, Op, register, require
from k3fuse.ir.ops.rules import arity, declare, divisible, int_attr
from k3fuse.tensor_type import REPLICATE, DType, TensorType, shard

PUSHES = ("push_partial", "push_chunks", "push_gather")
"""Ops whose result lives in mailboxes written by peers."""


def rank_order_sum(terms: list[Tensor], rounded: torch.dtype) -> Tensor:
    """Sum in the order given, in fp32 (fp64 if the terms are), rounded once to `rounded`.

    The terms of a matrix product travel in fp32, unrounded, so that a sum over ranks is rounded as
    often as one on a single rank: once.
    """
    acc = torch.promote_types(terms[0].dtype, torch.float32)
    total = terms[0].to(acc)
    for term in terms[1:]:
        total = total + term.to(acc)
    # A real -0.0 would look like an empty mailbox word (faults B04): sums are +0.0.
    return (total + 0.0).to(rounded)


def _collective(
    name: str,
    rule: Callable[[TensorType, Attrs, Context], TensorType],
    run: Callable[[list[Tensor], Attrs, Context], list[Tensor]],
    attrs: tuple[str, ...] = (),
    *,
    wide: bool = False,
    doc: str,
) -> None:
    def infer(types: list[TensorType], given: Attrs, ctx: Context) -> list[TensorType]:
        arity(types, 1, name)
        return [rule(types[0], given, ctx)]

    def group(operands: list[list[Tensor]], given: Attrs, ctx: Context) -> list[tuple[Tensor, ...]]:
        return [(out,) for out in run([ops[0] for ops in operands], given, ctx)]

    register(
        Op(
            name=name,
            infer=infer,
            group_reference=group,
            attrs=frozenset(attrs),
            wide=wide,
            doc=doc,
        )
    )


def _partial(x: TensorType, name: str) -> None:
    require(x.placement.is_partial, f"{name}: {x} is no partial sum")


def _summed(x: TensorType, attrs: Attrs) -> TensorType:
    """The type of a sum of terms of type x, whole on every rank."""
    out = attrs.get("out")
    return TensorType(x.dtype if out is None else DType(str(out)), x.shape)


def _all_reduce(x: TensorType, attrs: Attrs, ctx: Context) -> TensorType:
    _partial(x, "all_reduce")
    return _summed(x, attrs)


def _reduce_scatter(x: TensorType, attrs: Attrs, ctx: Context) -> TensorType:
    _partial(x, "reduce_scatter")
    return divisible(_summed(x, attrs).at(shard(int_attr(attrs, "dim"))), ctx, "reduce_scatter")


def _all_gather(x: TensorType, attrs: Attrs, ctx: Context) -> TensorType:
    require(x.placement == shard(int_attr(attrs, "dim")), f"all_gather: {x} is not split along dim")
    return x.at(REPLICATE)


def _push_partial(x: TensorType, attrs: Attrs, ctx: Context) -> TensorType:
    _partial(x, "push_partial")
    return TensorType(x.dtype, (ctx.tp, *x.shape))


def _push_chunks(x: TensorType, attrs: Attrs, ctx: Context) -> TensorType:
    _partial(x, "push_chunks")
    dim = int_attr(attrs, "dim")
    divisible(x.at(shard(dim)), ctx, "push_chunks")
    return TensorType(x.dtype, (ctx.tp, *x.shape), shard(dim + 1))


def _sum_slots(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "sum_slots")
    (slots,) = types
    require(slots.shape[0] == ctx.tp, f"sum_slots: {slots} has not one slot a rank")
    require(not slots.placement.is_partial, f"sum_slots: {slots} must have arrived")
    placement = shard(slots.placement.dim - 1) if slots.placement.is_shard else REPLICATE
    return replace(_summed(slots, attrs), shape=slots.shape[1:], placement=placement)


def _sum_slots_reference(slots: Tensor, *, ctx: Context, out: str | None = None) -> Tensor:
    return rank_order_sum([slots[rank] for rank in range(slots.shape[0])], _rounded(out, ctx))


def _receive(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 1, "receive")
    return types[0]


def _receive_reference(x: Tensor) -> Tensor:
    return x


def _chunks(parts: list[Tensor], dim: int) -> list[list[Tensor]]:
    """chunks[owner][source]."""
    cut = [part.chunk(len(parts), dim) for part in parts]
    return [[source[owner] for source in cut] for owner in range(len(parts))]


def _gathered(parts: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(parts, dim) for _ in parts]


def _dim(attrs: Attrs) -> int:
    return int_attr(attrs, "dim")


def _rounded(out: Attr, ctx: Context) -> torch.dtype:
    """The dtype that a sum is rounded to: `out`, by default that of its terms."""
    if ctx.exact:
        return torch.float64
    return (ctx.types[0].dtype if out is None else DType(str(out))).to_torch()


_collective(
    "all_reduce",
    _all_reduce,
    lambda parts, attrs, ctx: [
        rank_order_sum(parts, _rounded(attrs.get("out"), ctx)) for _ in parts
    ],
    ("out",),
    doc="sum of the ranks' terms, whole on every rank",
)
_collective(
    "reduce_scatter",
    _reduce_scatter,
    lambda parts, attrs, ctx: [
        rank_order_sum(chunk, _rounded(attrs.get("out"), ctx))
        for chunk in _chunks(parts, _dim(attrs))
    ],
    ("dim", "out"),
    doc="sum of the ranks' terms, rank r keeping block r along `dim`",
)
_collective(
    "all_gather",
    _all_gather,
    lambda parts, attrs, _: _gathered(parts, _dim(attrs)),
    ("dim",),
    doc="the ranks' shards side by side along `dim`, whole on every rank",
)
_collective(
    "push_partial",
    _push_partial,
    lambda parts, _, __: [torch.stack(parts) for _ in parts],
    wide=True,
    doc="one-shot: every rank's term into its slot of every rank's mailbox",
)
_collective(
    "push_chunks",
    _push_chunks,
    lambda parts, attrs, _: [torch.stack(c) for c in _chunks(parts, _dim(attrs))],
    ("dim",),
    wide=True,
    doc="first half of two-shot: block j of every rank's term into a slot of rank j's mailbox",
)
_collective(
    "push_gather",
    _all_gather,
    lambda parts, attrs, _: _gathered(parts, _dim(attrs)),
    ("dim",),
    doc="every rank's shard into its place in every rank's mailbox",
)
declare(
    "receive",
    _receive,
    _receive_reference,
    doc="what arrived in the own mailbox, kept beyond the mailbox's next use",
)
declare(
    "sum_slots",
    _sum_slots,
    _sum_slots_reference,
    ("out",),
    ranked=True,
    doc="sum over the slots of the own mailbox, in rank order",
)
