"""Multi-head latent attention over a paged latent cache, whole and in its absorbed parts.

A cache row is [latent c | k_pe] of one position, shared by all heads. No rotation is applied: the
rope part only takes part in the dot product (K3 spec 2.5).
"""

from __future__ import annotations

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE
from k3fuse.functional.slots import live_requests


@model_op
def mla_append(
    cache: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    *,
    rows_per_request: int,
) -> torch.Tensor:
    """Write row i of request r at position lengths[r] + i and return the new cache.

    cache [pages, page_size, D] with D = kv_lora + rope; c [M, kv_lora]; k_pe [M, rope];
    block_table [R, max_pages] int32, page of each page_size positions; lengths [R] int32;
    slots [R] int32, -1 for padding, which writes nothing.

    A live row past its block table or on a page below 0 makes torch raise an index error.
    """
    pages, page_size, width = cache.shape
    offsets = torch.arange(rows_per_request, device=cache.device)
    live = live_requests(slots).unsqueeze(1)
    positions = torch.where(live, lengths.long().unsqueeze(1) + offsets, 0)
    page = block_table.long().gather(1, positions // page_size)
    # A live row on an unassigned page gets an index that torch rejects, never a wrapped one.
    page = torch.where(page < 0, pages + 1, page)
    spare = pages * page_size
    index = torch.where(live, page * page_size + positions % page_size, spare)
    rows = torch.cat([c, k_pe], dim=-1).to(cache.dtype)
    flat = torch.cat([cache.flatten(0, 1), cache.new_zeros(1, width)])
    flat[index.flatten()] = rows
    return flat[:spare].view(pages, page_size, width)


@model_op
def mla_attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    kv_b_weight: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    *,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    rows_per_request: int,
) -> torch.Tensor:
    """Causal attention of all heads over the cached latents.

    q [M, heads * (nope + rope)]; kv_b_weight [heads * (nope + v), kv_lora], each head's key rows
    before its value rows; the rest as in `mla_append`. Row i of request r sees positions
    0 .. lengths[r] + i. Returns [M, heads * v] in q's dtype; 0 for padding.

    Defined by the absorbed form, and rounded where engines that absorb round: the query in latent
    space, the mixed latents, and the result (K3 spec 2.5).
    """
    kv_b = torch.unflatten(kv_b_weight, 0, (-1, nope_dim + v_dim))
    query = mla_absorb_query(q, kv_b[:, :nope_dim], nope_dim=nope_dim, rope_dim=rope_dim)
    latent = mla_attend_latent(
        query,
        cache,
        block_table,
        lengths,
        slots,
        kv_lora=kv_b_weight.shape[1],
        rope_dim=rope_dim,
        softmax_scale=(nope_dim + rope_dim) ** -0.5,
        rows_per_request=rows_per_request,
    )
    return mla_value(latent, kv_b[:, nope_dim:])


@model_op
def mla_absorb_query(
    q: torch.Tensor, w_uk: torch.Tensor, *, nope_dim: int, rope_dim: int
) -> torch.Tensor:
    """Move each head's query into the latent space: q_nope W_UK beside the untouched q_pe.

    q [M, heads * (nope + rope)], w_uk [heads, nope, kv_lora] -> [M, heads * (kv_lora + rope)],
    rounded to q's dtype.
    """
    heads = torch.unflatten(q, -1, (-1, nope_dim + rope_dim))
    latent = torch.einsum("mhn,hnc->mhc", heads[..., :nope_dim].to(ACCUMULATE), w_uk.to(ACCUMULATE))
    return torch.cat([latent.to(q.dtype), heads[..., nope_dim:]], dim=-1).flatten(1)


@model_op
def mla_attend_latent(
    q_latent: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_lora: int,
    rope_dim: int,
    softmax_scale: float,
    rows_per_request: int,
) -> torch.Tensor:
    """Attention of absorbed queries over the latent cache itself.

    q_latent [M, heads * (kv_lora + rope)]; the rest as in `mla_attend`. Returns the mixed
    latents [M, heads * kv_lora] in q_latent's dtype, rounded once; 0 for padding.
    """
    width = kv_lora + rope_dim
    # All heads query one shared key: [R, rows, 1, heads, kv_lora + rope].
    queries = q_latent.to(ACCUMULATE).view(
        -1, rows_per_request, 1, q_latent.shape[1] // width, width
    )
    keys = _gather_pages(cache, block_table).to(ACCUMULATE).unsqueeze(1)
    o = _attend(queries, keys, keys[..., :kv_lora], lengths, slots, softmax_scale)
    return o.reshape(q_latent.shape[0], -1).to(q_latent.dtype)


@model_op
def mla_value(o_latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Expand mixed latents to values: o_latent [M, heads * kv_lora], w_uv [heads, v, kv_lora]
    -> [M, heads * v] in o_latent's dtype, rounded once.
    """
    heads = torch.unflatten(o_latent.to(ACCUMULATE), -1, (w_uv.shape[0], -1))
    return torch.einsum("mhc,hvc->mhv", heads, w_uv.to(ACCUMULATE)).flatten(1).to(o_latent.dtype)


def _gather_pages(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The cache rows of each request by position: [R, max_pages * page_size, D]."""
    return cache[block_table.clamp(min=0).long()].flatten(1, 2)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """queries [R, rows, G, Q, D], keys [R, G, S, D], values [R, G, S, E] -> [R, rows, G, Q, E].

    Row by row: what a row may not see is cut out before the products, so that garbage or NaN
    in later positions and in unused pages cannot reach it.
    """
    live = live_requests(slots)
    positions = torch.arange(keys.shape[2], device=keys.device)
    outputs: list[torch.Tensor] = []
    for row in range(queries.shape[1]):
        visible = positions <= (lengths.unsqueeze(1) + row)
        scores = queries[:, row] @ keys.transpose(-1, -2) * scale
        scores = torch.where(visible[:, None, None, :], scores, -torch.inf)
        seen = torch.where(visible[:, None, :, None], values, 0)
        outputs.append(torch.softmax(scores, dim=-1) @ seen)
    o = torch.stack(outputs, dim=1)
    return torch.where(live.view(-1, 1, 1, 1, 1), o, 0)
