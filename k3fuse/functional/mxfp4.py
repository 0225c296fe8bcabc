"""MXFP4: 4-bit e2m1 codes, two a byte, with one power-of-two scale for 32 of them.

Layout of the checkpoint (K3 spec 4.3): byte j of a row holds element 2j in its low nibble and
element 2j + 1 in its high nibble; a scale byte s is worth 2^(s - 127), and 255 is NaN.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from k3fuse.functional.model_op import model_op

GROUP = 32
"""Consecutive elements that share one scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(_MAGNITUDES))


@model_op
def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed [..., K/2] uint8, scale [..., K/32] uint8 -> [..., K] in `dtype`.

    Exact in bfloat16, float32 and float64: a code times a power of two has at most 2 bits.
    """
    acc = torch.promote_types(dtype, torch.float32)
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    codes = torch.tensor(_CODES, dtype=acc, device=packed.device)[nibbles.int()]
    groups = torch.unflatten(codes, -1, (-1, GROUP))
    return (groups * _scale_value(scale).to(acc).unsqueeze(-1)).flatten(-2).to(dtype)


@model_op
def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K], K a multiple of 32 -> packed [..., K/2] uint8, scale [..., K/32] uint8.

    The scale puts the largest element of a group into [4, 8); values above 6 become 6; ties go
    to the even code. A group with NaN or infinity gets the NaN scale.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    groups = torch.unflatten(x.to(acc), -1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(torch.nan_to_num(largest)).exponent  # largest < 2^exponent
    scale = torch.where(torch.isfinite(largest), (exponent - 3 + 127).clamp(0, 254), 255)
    scale = scale.to(torch.uint8)
    magnitude = (groups / _scale_value(scale).to(acc).unsqueeze(-1)).abs()
    midpoints = torch.tensor(_MIDPOINTS, dtype=acc, device=x.device)
    low = torch.bucketize(magnitude, midpoints)
    high = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(groups)
    pairs = torch.unflatten(code.to(torch.uint8).flatten(-2), -1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale


def _scale_value(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as float32, by bits: pow and exp2 may flush 2^-127, which is subnormal."""
    bits = scale.int() << 23
    bits = torch.where(scale == 0, 0x00400000, bits)
    bits = torch.where(scale == 255, 0x7FC00000, bits)
    return bits.int().view(torch.float32)
