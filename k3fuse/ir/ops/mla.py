"""Multi-head latent attention on a paged latent cache: as traced, and in absorbed form."""

from __future__ import annotations

from k3fuse import functional
from k3fuse.ir.op import Attrs, Context, require
from k3fuse.ir.ops.rules import arity, declare, divisible, int_attr, replicated, sharded_dim, size
from k3fuse.tensor_type import TensorType, shard


def _append(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 6, "mla_append")
    replicated(types, "mla_append")
    cache, c, k_pe = types[:3]
    width = size(c, 1, "mla_append") + size(k_pe, 1, "mla_append")
    require(width == cache.shape[-1], f"mla_append: {c} and {k_pe} do not fill a row of {cache}")
    int_attr(attrs, "rows_per_request")
    return cache


def _attend(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 6, "mla_attend")
    q, cache, kv_b, *rest = types
    replicated([cache, *rest], "mla_attend")
    nope, rope, v = (int_attr(attrs, k) for k in ("nope_dim", "rope_dim", "v_dim"))
    heads = size(q, 1, "mla_attend") // (nope + rope)
    require(
        q.shape[1] == heads * (nope + rope) and kv_b.shape[0] == heads * (nope + v),
        f"mla_attend: {q} and {kv_b} hold different heads",
    )
    return _heads_out(types, TensorType(q.dtype, (q.shape[0], heads * v)), "mla_attend", ctx, w=2)


def _heads_out(
    types: list[TensorType], result: TensorType, name: str, ctx: Context, *, w: int
) -> TensorType:
    """Row-of-heads result of operand 0 and per-head weight `w`: whole, or both cut by heads."""
    x, weight = types[0], types[w]
    if x.placement.is_replicate and weight.placement.is_replicate:
        return result
    require(
        sharded_dim(x, 1) and sharded_dim(weight, 0), f"{name}: {x} and {weight} not cut by heads"
    )
    return divisible(result.at(shard(1)), ctx, name)


def _absorb_query(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 2, "mla_absorb_query")
    q, w_uk = types
    heads, nope, rank = (size(w_uk, d, "mla_absorb_query") for d in range(3))
    rope = int_attr(attrs, "rope_dim")
    require(
        nope == attrs["nope_dim"] and q.shape[1] == heads * (nope + rope),
        f"mla_absorb_query: {q} does not fit {w_uk}",
    )
    result = TensorType(q.dtype, (q.shape[0], heads * (rank + rope)))
    return _heads_out(types, result, "mla_absorb_query", ctx, w=1)


def _attend_latent(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 5, "mla_attend_latent")
    q, cache, *rest = types
    replicated([cache, *rest], "mla_attend_latent")
    rank, rope = int_attr(attrs, "kv_lora"), int_attr(attrs, "rope_dim")
    require(
        cache.shape[-1] == rank + rope, f"mla_attend_latent: {cache} rows are not {rank}+{rope}"
    )
    heads = size(q, 1, "mla_attend_latent") // (rank + rope)
    require(q.shape[1] == heads * (rank + rope), f"mla_attend_latent: {q} is not whole heads")
    result = TensorType(q.dtype, (q.shape[0], heads * rank), q.placement)
    return divisible(result, ctx, "mla_attend_latent")


def _value(types: list[TensorType], attrs: Attrs, ctx: Context) -> TensorType:
    arity(types, 2, "mla_value")
    o, w_uv = types
    heads, v, rank = (size(w_uv, d, "mla_value") for d in range(3))
    require(o.shape[1] == heads * rank, f"mla_value: {o} does not fit {w_uv}")
    result = TensorType(o.dtype, (o.shape[0], heads * v))
    return _heads_out(types, result, "mla_value", ctx, w=1)


declare(
    "mla_append",
    _append,
    functional.mla_append,
    ("rows_per_request",),
    updates={0: 0},
    doc="write the rows' [c | k_pe] into the paged cache at their positions",
)
declare(
    "mla_attend",
    _attend,
    functional.mla_attend,
    ("nope_dim", "rope_dim", "v_dim", "rows_per_request"),
    doc="causal attention over the cache, keys and values expanded by kv_b (K3 spec 2.5)",
)
declare(
    "mla_absorb_query",
    _absorb_query,
    functional.mla_absorb_query,
    ("nope_dim", "rope_dim"),
    doc="per head [q_nope W_UK | q_pe]: the query in the space of the cached rows",
)
declare(
    "mla_attend_latent",
    _attend_latent,
    functional.mla_attend_latent,
    ("kv_lora", "rope_dim", "softmax_scale", "rows_per_request"),
    doc="causal attention of absorbed queries over the cached rows; returns latent rows",
)
declare("mla_value", _value, functional.mla_value, doc="per head W_UV times the latent row")
