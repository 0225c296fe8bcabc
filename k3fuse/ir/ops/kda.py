"""Kimi delta attention: one step of the gated delta rule on recurrent and convolution state."""

from __future__ import annotations

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import (
    accumulator,
    arity,
    declare,
    divisible,
    int_attr,
    replicated,
    sharded_dim,
    size,
)
from k3fuse.tensor_type import TensorType

STEP_ATTRS = ("head_dim", "gate_lower_bound", "rows_per_request")
# q k v f b | q_conv k_conv v_conv a_log dt_bias | conv_state recurrent_state slots [| journals]
STEP_SHARD_DIMS: tuple[int | None, ...] = (1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 2, 1, None, 3, 2, 2)
COMMIT_SHARD_DIMS: tuple[int | None, ...] = (3, 2, 2, 0, 0, 0, 0, 0, 2, 1, None, None)
"""The dimension of each operand that runs over heads; None for what every rank needs whole."""


def _by_heads(types: list[TensorType], dims: tuple[int | None, ...], name: str) -> bool:
    """Whether all operands are cut by heads (True) or all are whole (False)."""
    by_head = [(t, d) for t, d in zip(types, dims, strict=False) if d is not None]
    replicated([t for t, d in zip(types, dims, strict=False) if d is None], name)
    if all(t.placement.is_replicate for t, _ in by_head):
        return False
    for index, (type_, dim) in enumerate(by_head):
        require(sharded_dim(type_, dim), f"{name}: operand {index}, {type_}, is not cut by heads")
    return True


def _step(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    arity(types, 13, "kda_step")
    _by_heads(types, STEP_SHARD_DIMS, "kda_step")
    q, conv, recurrent = types[0], types[10], types[11]
    width, head_dim = size(q, 1, "kda_step"), int_attr(attrs, "head_dim")
    require(
        width == size(recurrent, 1, "kda_step") * head_dim, f"kda_step: {q} is not H*{head_dim}"
    )
    require(all(t.shape == q.shape for t in types[:4]), "kda_step: q, k, v, f differ in shape")
    o = divisible(TensorType(accumulator(q.dtype), q.shape, q.placement), ctx, "kda_step")
    return [o, conv, divisible(recurrent, ctx, "kda_step")]


def _verify(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    arity(types, 16, "kda_verify")
    _by_heads(types, STEP_SHARD_DIMS, "kda_verify")
    return [_step(types[:13], attrs, ctx)[0], *types[13:]]


def _commit(types: list[TensorType], attrs: Attrs, ctx: Context) -> list[TensorType]:
    arity(types, 12, "kda_commit")
    _by_heads(types, COMMIT_SHARD_DIMS, "kda_commit")
    return [types[8], types[9]]


declare(
    "kda_step",
    _step,
    functional.kda_step,
    STEP_ATTRS,
    updates={10: 1, 11: 2},
    doc="conv + SiLU, L2 norm, decay, delta rule in row order; commits every row (K3 spec 2.4)",
)
declare(
    "kda_verify",
    _verify,
    functional.kda_verify,
    STEP_ATTRS,
    updates={13: 1, 14: 2, 15: 3},
    doc="kda_step that leaves the state alone and journals its rows for kda_commit (spec 6.4)",
)
declare(
    "kda_commit",
    _commit,
    functional.kda_commit,
    ("head_dim", "gate_lower_bound"),
    updates={8: 0, 9: 1},
    doc="replays the first accepted[r] journalled rows of each request into the state",
)
