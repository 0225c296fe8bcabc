"""The dtypes that an op computes in and gives its wider results in."""

from __future__ import annotations

import torch

ACCUMULATE = torch.float64
"""Every op computes in float64 and rounds where the contract says (K3 spec section 2.0).

The contract asks for float32 accumulation. The reference accumulates wider, so that the order of a
sum does not show in its results: the stock forward, any split of it over ranks and any fusion of
it round the same numbers to the same bits.
"""


UNROUNDED = ACCUMULATE
"""As `out_dtype`: a term of a sum that is rounded when it is complete; float32 in a kernel."""


def float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a result that the contract states in float32: float64 in a float64 run."""
    return torch.promote_types(dtype, torch.float32)
