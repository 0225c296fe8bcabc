"""MXFP4 experts: every code, the extremes of scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3fuse.alone.launching import Case, Kernel, Sketch
from k3fuse.alone.trials.trial import Kernels, Trial
from k3fuse.functional import mxfp4

SIDE, FEW = 64, 4  # both widths of an expert; experts
ONE_HALF, ONE, FOUR = 1, 2, 6  # codes


def _experts() -> Case:
    s = Sketch()
    s.value("z", "bf16", SIDE, SIDE)
    s.value("ids", "i32", SIDE, 1)
    s.value("weights", "f32", SIDE, 1)
    matrices = ["w1", "w3", "w2"]
    for name in matrices:
        s.value(name, "u8", FEW, SIDE, SIDE // 2, place="weight")
    for name in matrices:
        s.value(f"{name}_scale", "u8", FEW, SIDE, SIDE // mxfp4.GROUP, place="weight")
    s.value("y", "f32", SIDE, SIDE)
    operands = ["z", "ids", "weights", *matrices, *(f"{name}_scale" for name in matrices)]
    s.step("moe_experts", operands, ["y"], activation="silu", beta=0.0, linear_beta=0.0, out="f32")
    return s.case()


class _Packed:
    """An MXFP4 weight of all experts: codes [E, N, K], and scale bytes [E, N, K/32]."""

    def __init__(self, codes: Tensor, scales: Tensor | int) -> None:
        self.codes = codes.expand(FEW, SIDE, SIDE).to(torch.uint8)
        groups = torch.as_tensor(scales, dtype=torch.uint8)
        self.scales = groups.expand(FEW, SIDE, SIDE // mxfp4.GROUP)

    def bytes(self) -> Tensor:
        return self.codes[..., 0::2] | (self.codes[..., 1::2] << 4)

    def numbers(self) -> Tensor:
        """What codes and scales are worth, in float64 by definition and not by library."""
        size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
        value = torch.cat([size, -size])[self.codes.int()]
        power = torch.ldexp(torch.ones(self.scales.shape).double(), self.scales.int() - 127)
        power = power.masked_fill(self.scales == 255, torch.nan)
        return value * power.repeat_interleave(mxfp4.GROUP, -1)


def _diagonal(code: int) -> Tensor:
    return torch.eye(SIDE) * code


def _all(code: int) -> Tensor:
    return torch.full((1, SIDE, SIDE), code)


_TOKEN_EXPERT = torch.arange(SIDE).view(SIDE, 1) % FEW


def _expert(kernel: Kernel, z: Tensor, w1: _Packed, w3: _Packed, w2: _Packed) -> Tensor:
    """One expert a token with weight 1; in float64 on the CPU."""
    given: dict[str, Tensor] = {"z": z, "ids": _TOKEN_EXPERT, "weights": torch.ones(SIDE, 1)}
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        given |= {name: weight.bytes(), f"{name}_scale": weight.scales}
    return kernel(given)["y"].double().cpu()


def _of_tokens(weight: _Packed) -> Tensor:
    """[token, row]: the column of the token's own number in the weight of its expert."""
    numbers = weight.numbers()
    return torch.stack([numbers[t % FEW, :, t] for t in range(SIDE)])


def _same(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(
        got.nan_to_num(nan=0.0), wanted.float().double().nan_to_num(nan=0.0)
    )


def _random_packed(low: int, high: int) -> _Packed:
    codes = torch.randint(0, 16, (FEW, SIDE, SIDE))
    return _Packed(codes, torch.randint(low, high, (FEW, SIDE, SIDE // mxfp4.GROUP)))


def _codes(kernels: Kernels) -> Iterator[str]:
    """Every element of each weight alone: the others stand so that it passes as it is.

    silu(32) is 32 in float32, so with gate 32 an up of 2^-5 makes h = 1.
    """
    kernel, identity = kernels["experts"], torch.eye(SIDE)
    torch.manual_seed(1)  # pyright: ignore[reportUnknownMemberType]
    down = _random_packed(120, 135)
    down.codes[:, 0, :4] = torch.tensor([0x1, 0x2, 0x7, 0xF], dtype=torch.uint8)
    down.scales[:, 0, 0] = 127
    y = _expert(
        kernel,
        identity,
        _Packed(_diagonal(FOUR), 127 + 3),
        _Packed(_diagonal(ONE_HALF), 127 - 4),
        down,
    )
    if [y[t, 0].item() for t in range(4)] != [0.5, 1.0, 6.0, -6.0]:
        yield f"bytes 0x21, 0xF7 of w2 give {[y[t, 0].item() for t in range(4)]}"
    if not _same(y, _of_tokens(down)):
        yield "w2: codes or scales read wrong"
    up = _random_packed(120, 135)
    up.codes[:, 0, :4] = torch.tensor([0x1, 0x2, 0x7, 0xF], dtype=torch.uint8)
    up.scales[:, 0, 0] = 127
    y = _expert(
        kernel, identity, _Packed(_all(FOUR), 127 + 3), up, _Packed(_diagonal(ONE), 127 - 5)
    )
    if [y[t, 0].item() for t in range(4)] != [0.5, 1.0, 6.0, -6.0]:
        yield f"bytes 0x21, 0xF7 of w3 give {[y[t, 0].item() for t in range(4)]}"
    if not _same(y, _of_tokens(up)):
        yield "w3: codes or scales read wrong"
    gate, last = _random_packed(127, 132), SIDE - 1  # column `last` makes up = 1 for all tokens
    gate.codes[:, :, last] = 0
    ones = torch.zeros(1, SIDE, SIDE)
    ones[..., last] = ONE
    signs: list[Tensor] = []
    for sign in (1, -1):  # silu lets positive gates pass
        z = sign * 64 * identity
        z[:, last] = 1
        signs.append(_expert(kernel, z, gate, _Packed(ones, 127), _Packed(_diagonal(ONE), 127 - 6)))
    if not _same((signs[0] - signs[1]).float().double(), _of_tokens(gate)):
        yield "w1: codes or scales read wrong"


def _scales(kernels: Kernels) -> Iterator[str]:
    kernel, identity = kernels["experts"], torch.eye(SIDE)
    torch.manual_seed(2)  # pyright: ignore[reportUnknownMemberType]
    codes = torch.randint(0, 4, (FEW, SIDE, SIDE)) + 8 * torch.randint(0, 2, (FEW, SIDE, SIDE))
    extremes = torch.tensor([0, 1, 127, 254, 255]).repeat(SIDE)[:SIDE]
    scales = torch.full((SIDE, SIDE // mxfp4.GROUP), 127)
    scales[:, 0] = extremes
    first = torch.arange(SIDE) < mxfp4.GROUP  # tokens of the group with extreme scales
    for power in (0, 20):
        down = _Packed(codes, scales)
        y = _expert(
            kernel,
            identity,
            _Packed(_diagonal(FOUR), 127 + 3),
            _Packed(_diagonal(ONE_HALF), 127 - 4 + power),
            down,
        )
        wanted = _of_tokens(down) * 2.0**power
        wanted[:, extremes == 255] = torch.nan  # 0 times NaN too
        for scale in (0, 1, 127, 254, 255):
            here = extremes == scale
            if not _same(y[:, here], wanted[:, here]):
                a, b = y[first][:, here].flatten(), wanted[first][:, here].flatten()
                at = int((a != b.float().double()).nonzero()[0])
                yield (
                    f"w2, scale byte {scale}, h = 2^{power}: "
                    f"{a[at].item():.9e} instead of {b[at].item():.9e}"
                )
    # Up: z is 2^100, so that byte 0 gives 2^-27 times a code, and gate 32 there.
    scales[:, 0] = extremes.masked_fill(extremes == 254, 100)
    up = _Packed(codes, scales)
    gate, back = _Packed(_all(FOUR), 127 + 3 - 100), _Packed(_diagonal(ONE), 127 - 5 - 20)
    y = _expert(kernel, identity * 2.0**100, gate, up, back)
    wanted = _of_tokens(up) * 2.0**80
    bad = (extremes == 255)[None, :].expand(SIDE, -1)
    wanted[bad] = torch.nan
    wanted[bad.any(1)] = torch.nan  # h holds a NaN, which meets every row of w2
    if not _same(y, wanted):
        yield "w3: NaN of a scale byte 255 does not reach every column of its expert"
    scales = scales.masked_fill(scales == 255, 127)
    up = _Packed(codes, scales)
    y = _expert(kernel, identity * 2.0**100, gate, up, back)
    if not _same(y, _of_tokens(up) * 2.0**80):
        yield "w3: scale bytes 0 and 1 read wrong"
    gate.scales = gate.scales.clone()
    gate.scales[1, 3, 0] = 255
    y = _expert(kernel, identity * 2.0**100, gate, up, back)
    mine = _TOKEN_EXPERT.flatten() == 1
    if not bool(y[mine].isnan().all()) or bool(y[~mine].isnan().any()):
        yield "w1: NaN of a scale byte 255 is not in all columns of its expert, and there alone"


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    experts = {"experts": _experts()}
    return (
        Trial("B41", "MXFP4 codes", "0x21 is 0.5, 1; 0xF7 is 6, -6; all exact", experts, _codes),
        Trial("B42", "MXFP4 scales", "0 is 2^-127, 254 2^127, 255 NaN", experts, _scales),
    )
