"""Router and routed experts."""

from __future__ import annotations

from typing import Literal

import torch

from k3fuse.functional import mxfp4
from k3fuse.functional.activation import silu_mul, situ_mul
from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE

# Gathered expert weights are copies, so a long prefill goes through in chunks of this many
# elements of one weight (64 MiB in float32).
_CHUNK_ELEMENTS = 1 << 24


@model_op
def route_topk(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, renormalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts a row: logits [M, E] float32, bias [E] float32 -> ids, weights.

    ids [M, top_k] int32, best first; weights [M, top_k] in the logits' dtype. Scores are
    sigmoids; the bias takes part in the choice only; equal scores go to the lower id
    (K3 spec 2.8). A NaN score is chosen only when nothing else is left, and then weighs 0, so the
    ids are always distinct and in range and the weights always finite.
    """
    scores = torch.sigmoid(logits)
    choice = scores + bias.to(scores.dtype)
    choice = torch.where(torch.isnan(choice), -torch.inf, choice)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.nan_to_num(scores.gather(1, ids), nan=0.0)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * scale


@model_op
def moe_experts(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor | None = None,
    w3_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    activation: Literal["situ", "silu"],
    beta: float = 0.0,
    linear_beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs: z [M, Z] -> [M, Z] in `out_dtype`.

    `out_dtype` defaults to z's dtype; where the result is a term of a longer sum, over ranks or
    with a shared expert, it is `UNROUNDED`.

    ids [M, k] int32 and weights [M, k] float32 from `route_topk`. w1 (gate) and w3 (up)
    [E, I, Z], w2 (down) [E, Z, I]; with scales the weights are MXFP4: packed uint8 [E, I, Z/2],
    [E, Z, I/2] and scales uint8 [E, I, Z/32], [E, Z, I/32]. The activation is rounded to z's
    dtype, everything else is rounded once at the end (K3 spec 2.8).
    """
    experts = ids.flatten().long()
    rows = z.repeat_interleave(ids.shape[1], dim=0)
    per_expert = w1.shape[1] * z.shape[1]
    chunk = max(1, _CHUNK_ELEMENTS // per_expert)
    outputs: list[torch.Tensor] = []
    for start in range(0, rows.shape[0], chunk):
        chosen = experts[start : start + chunk]
        x = rows[start : start + chunk].to(ACCUMULATE)
        gate = _project(x, w1, w1_scale, chosen).to(z.dtype)
        up = _project(x, w3, w3_scale, chosen).to(z.dtype)
        if activation == "situ":
            hidden = situ_mul(gate, up, beta=beta, linear_beta=linear_beta)
        else:
            hidden = silu_mul(gate, up)
        outputs.append(_project(hidden.to(ACCUMULATE), w2, w2_scale, chosen))
    y = torch.unflatten(torch.cat(outputs), 0, tuple(ids.shape))
    total = (weights.to(ACCUMULATE).unsqueeze(-1) * y).sum(1)
    return total if z.dtype == torch.float64 else total.to(out_dtype or z.dtype)


def _project(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, experts: torch.Tensor
) -> torch.Tensor:
    """Row i times the weight of its own expert: x [n, K], weight [E, N, K] -> [n, N]."""
    if scale is None:
        chosen = weight[experts].to(x.dtype)
    else:
        chosen = mxfp4.dequantize(weight[experts], scale[experts], x.dtype)
    return torch.bmm(chosen, x.unsqueeze(-1)).squeeze(-1)
