"""The dtype that an op computes in."""

from __future__ import annotations

import torch


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float32 for inputs of 32 bits or fewer, float64 as soon as one input is float64.

    Every op computes in this dtype and rounds once to its result dtype, so a float64 run is
    float64 throughout (K3 spec section 2.0).
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
