# pyright: reportUnknownMemberType=false
# Tensor.tolist has no type in torch's stubs.

from __future__ import annotations

import pytest
import torch

from k3fuse.functional import mxfp4


def group(first: int, scale: int, dtype: torch.dtype) -> torch.Tensor:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = first
    return mxfp4.dequantize(packed, torch.tensor([[scale]], dtype=torch.uint8), dtype)[0]


def test_nibble_order() -> None:
    # Fault B41.
    assert group(0x21, 127, torch.float32)[:2].tolist() == [0.5, 1.0]
    assert group(0xF7, 127, torch.float32)[:2].tolist() == [6.0, -6.0]
    assert torch.signbit(group(0x08, 127, torch.float32)[0])


def test_scale_extremes() -> None:
    # Fault B42.
    value = group(0x02, 0, torch.float32)[0]
    assert value.item() == 5.877471754111438e-39
    assert value.view(torch.int32).item() == 0x00400000
    assert group(0x01, 0, torch.bfloat16)[0].view(torch.int16).item() == 0x0020
    assert group(0x02, 127, torch.float32)[0] == 1.0
    assert group(0x02, 254, torch.float32)[0] == 2.0**127
    assert torch.isnan(group(0x02, 255, torch.float32)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_round_trip(dtype: torch.dtype) -> None:
    generator = torch.default_generator.manual_seed(0)
    packed = torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 150, (3, 4, 2), dtype=torch.uint8, generator=generator)
    x = mxfp4.dequantize(packed, scale, dtype)
    assert x.dtype == dtype
    assert x.shape == (3, 4, 64)
    again = mxfp4.dequantize(*mxfp4.quantize(x), dtype)
    assert torch.equal(again, x)


def test_quantize_rounds_to_even_and_saturates() -> None:
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6.0, 7.5, 0.25, 0.75, 2.5, 5.0, -1.25, -0.3])
    y = mxfp4.dequantize(*mxfp4.quantize(x), torch.float32)
    assert y[0, :8].tolist() == [6.0, 6.0, 0.0, 1.0, 2.0, 4.0, -1.0, -0.5]
    x[0, 9] = torch.nan
    assert mxfp4.quantize(x)[1].item() == 255
