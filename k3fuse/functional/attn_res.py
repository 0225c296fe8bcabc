"""Attention over residual snapshots (AttnRes)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE


@model_op
def attn_res_mix(
    sources: Sequence[torch.Tensor],
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """Softmax-weighted sum of the residual sources, weighted by how their norms score.

    sources: n tensors [M, D], snapshots first and the running sum last; norm_weight [D];
    proj_weight [1, D] -> [M, D] in the sources' dtype. Scores read the normalised sources, the
    sum reads the raw ones; the result is rounded once, before the norm that follows (K3 spec 2.3).
    """
    dtype = sources[0].dtype
    query = norm_weight.to(ACCUMULATE) * proj_weight[0].to(ACCUMULATE)
    values = torch.stack([source.to(ACCUMULATE) for source in sources])
    rstd = torch.rsqrt(values.square().mean(-1) + eps)
    weights = torch.softmax((values * query).sum(-1) * rstd, dim=0)
    return (weights.unsqueeze(-1) * values).sum(0).to(dtype)


@model_op
def attn_res_blocks(
    snapshots: Sequence[torch.Tensor], query: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block phase of the mix: what the snapshots contribute, before the running sum is known.

    snapshots: n tensors [M, D]; query [D] = norm weight * projection. Returns the largest score
    [M], the sum of exp(score - largest) [M] and the exp-weighted sum of the raw snapshots [M, D],
    all unrounded (K3 spec 2.3, two-phase form).
    """
    values = torch.stack([snapshot.to(ACCUMULATE) for snapshot in snapshots])
    scores = _scores(values, query.to(ACCUMULATE), eps)
    top = scores.amax(0)
    weights = torch.exp(scores - top)
    return top, weights.sum(0), (weights.unsqueeze(-1) * values).sum(0)


@model_op
def attn_res_merge(
    query: torch.Tensor,
    top: torch.Tensor,
    denominator: torch.Tensor,
    mixed: torch.Tensor,
    prefix: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """Merge phase of the mix: the running sum `prefix` [M, D] joins the block phase.

    query [D]; top and denominator [M] and mixed [M, D] from `attn_res_blocks`. Returns the mix
    [M, D] in prefix's dtype, rounded once (online softmax, K3 spec 2.3).
    """
    value = prefix.to(ACCUMULATE)
    score = _scores(value, query.to(ACCUMULATE), eps)
    largest = torch.maximum(top, score)
    blocks, own = torch.exp(top - largest), torch.exp(score - largest)
    total = blocks * denominator + own
    out = (blocks / total).unsqueeze(-1) * mixed + (own / total).unsqueeze(-1) * value
    return out.to(prefix.dtype)


def _scores(values: torch.Tensor, query: torch.Tensor, eps: float) -> torch.Tensor:
    """<RMSNorm(value), query> of values [..., M, D] -> [..., M]; query has the norm weight."""
    rstd = torch.rsqrt(values.square().mean(-1) + eps)
    return (values * query).sum(-1) * rstd
