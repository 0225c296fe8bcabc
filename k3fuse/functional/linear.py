"""Token row in, token row out: embedding, projections, and the greedy choice of a token."""

from __future__ import annotations

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE


@model_op
def linear(
    x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x W^T without bias: x [M, K], weight [N, K] -> [M, N], rounded once to `out_dtype`.

    `out_dtype` defaults to x's dtype. Router and LM head ask for float32, which a float64 run
    keeps as float64 (K3 spec 2.0); terms of a longer sum ask for `UNROUNDED`.
    """
    y = x.to(ACCUMULATE) @ weight.to(ACCUMULATE).T
    if out_dtype is None:
        return y.to(x.dtype)
    if x.dtype == torch.float64:
        return y
    return y.to(out_dtype)


@model_op
def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Row `tokens[m]` of the table: tokens [M] int64, weight [V, D] -> [M, D]."""
    return torch.nn.functional.embedding(tokens, weight)


@model_op
def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The greedy token of each row: logits [M, V] -> [M] int64.

    Equal logits go to the lowest id. NaN never wins; a row of nothing but NaN gives 0.
    """
    real = ~torch.isnan(logits)
    best = torch.where(real, logits, -torch.inf).amax(-1, keepdim=True)
    return ((logits == best) & real).to(torch.uint8).argmax(-1)
