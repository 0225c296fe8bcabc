from __future__ import annotations

import pytest
import torch

from k3fuse.errors import ParseError
from k3fuse.tensor_type import (
    PARTIAL,
    REPLICATE,
    DType,
    Placement,
    TensorType,
    dtype_of,
    parse_type,
    shard,
    widest,
)


@pytest.mark.parametrize(
    "text",
    ["bf16[M,7168]", "f32[]", "u8[896,3072,1792]@S(1)", "bf16[M,8]@P", "i32[R,table]", "i64[M]"],
)
def test_text_round_trip(text: str) -> None:
    assert str(parse_type(text)) == text


@pytest.mark.parametrize("placement", [REPLICATE, PARTIAL, shard(0), shard(1)])
@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_round_trips(dtype: DType, placement: Placement) -> None:
    type_ = TensorType(dtype, (3, "M"), placement)
    assert parse_type(str(type_)) == type_


@pytest.mark.parametrize(
    "text", ["bf16", "bf17[8]", "bf16[8", "bf16[8]@S", "bf16[8]@S(x)", "[8]", ""]
)
def test_bad_text_shows_an_example(text: str) -> None:
    with pytest.raises(ParseError, match=r"not a tensor type: '.*' \(expected for example"):
        parse_type(text)


def test_dtypes_follow_torch() -> None:
    for dtype in DType:
        assert dtype_of(dtype.to_torch()) == dtype
        assert dtype.itemsize == torch.empty(0, dtype=dtype.to_torch()).element_size()
        assert dtype.is_float == dtype.to_torch().is_floating_point
    assert widest(DType.BF16, DType.F32) == DType.F32
    assert widest(DType.BF16, DType.F16) == DType.F32


def test_local_shape_and_bytes() -> None:
    type_ = parse_type("bf16[M,96,128]@S(1)")
    assert type_.local_shape(16) == ("M", 6, 128)
    assert type_.local_numel(16, {"M": 2}) == 2 * 6 * 128
    assert type_.local_bytes(16, {"M": 2}) == 2 * 6 * 128 * 2
    assert type_.at(PARTIAL).local_shape(16) == ("M", 96, 128)


@pytest.mark.parametrize("text", ["bf16[M,96]@S(0)", "bf16[8,97]@S(1)"])
def test_a_shard_that_does_not_divide_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"dimension \d of .* does not divide by 16"):
        parse_type(text).local_shape(16)
