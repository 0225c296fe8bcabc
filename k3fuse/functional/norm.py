"""RMSNorm of a whole row, and the gated per-head RMSNorm behind KDA."""

from __future__ import annotations

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE


@model_op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded once to x's dtype.

    x [M, D], weight [D] -> [M, D] (K3 spec 2.0; the engines' single rounding).
    """
    return (_normalize(x.to(ACCUMULATE), eps) * weight.to(ACCUMULATE)).to(x.dtype)


@model_op
def gated_rms_norm(
    o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMSNorm of each head of `o` times sigmoid(gate), rounded once to gate's dtype.

    o [M, P] float32, gate [M, P], weight [Dh] shared by the P / Dh heads -> [M, P]
    (K3 spec 2.4, last two lines).
    """
    heads = torch.unflatten(o.to(ACCUMULATE), -1, (-1, weight.shape[0]))
    normed = (_normalize(heads, eps) * weight.to(ACCUMULATE)).flatten(-2)
    return (normed * torch.sigmoid(gate.to(ACCUMULATE))).to(gate.dtype)


def _normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
