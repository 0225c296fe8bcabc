"""Elementwise gates of the MLPs and of the attention output."""

from __future__ import annotations

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE


@model_op
def situ_mul(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """SiTU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    gate, up [M, I] -> [M, I] in gate's dtype, rounded once (K3 spec 2.6).
    """
    g, u = gate.to(ACCUMULATE), up.to(ACCUMULATE)
    soft = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (soft * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


@model_op
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU: gate sigmoid(gate) * up, [M, I] each -> [M, I] in gate's dtype, rounded once."""
    return (torch.nn.functional.silu(gate.to(ACCUMULATE)) * up.to(ACCUMULATE)).to(gate.dtype)


@model_op
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), [M, P] each -> [M, P] in x's dtype (MLA output gate, K3 spec 2.5)."""
    return (x.to(ACCUMULATE) * torch.sigmoid(gate.to(ACCUMULATE))).to(x.dtype)
