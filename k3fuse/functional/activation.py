"""Elementwise gates of the MLPs and of the attention output."""

from __future__ import annotations

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import accumulation_dtype


@model_op
def situ_mul(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """SiTU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    gate, up [M, I] -> [M, I] in gate's dtype, rounded once (K3 spec 2.6).
    """
    acc = accumulation_dtype(gate)
    g, u = gate.to(acc), up.to(acc)
    soft = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (soft * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


@model_op
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU: gate sigmoid(gate) * up, [M, I] each -> [M, I] in gate's dtype, rounded once."""
    acc = accumulation_dtype(gate)
    return (torch.nn.functional.silu(gate.to(acc)) * up.to(acc)).to(gate.dtype)


@model_op
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), [M, P] each -> [M, P] in x's dtype (MLA output gate, K3 spec 2.5)."""
    acc = accumulation_dtype(x)
    return (x.to(acc) * torch.sigmoid(gate.to(acc))).to(x.dtype)
