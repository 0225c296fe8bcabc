"""Norms, projections, gates, AttnRes, and how torch.fx sees them."""

# pyright: reportUnknownMemberType=false
# Tensor.tolist has no type in torch's stubs.

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import fx

from k3fuse import functional


def test_rms_norm_rounds_once() -> None:
    x = torch.randn(4, 64, generator=torch.default_generator.manual_seed(0)).bfloat16()
    weight = torch.randn(64).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = functional.rms_norm(x, weight, eps=1e-5)
    torch.testing.assert_close(y, (exact * weight.double()).bfloat16(), rtol=0, atol=0)


def test_gated_rms_norm_is_per_head() -> None:
    o, gate, weight = torch.randn(3, 8), torch.randn(3, 8).bfloat16(), torch.randn(4)
    y = functional.gated_rms_norm(o, gate, weight, eps=1e-5)
    assert y.dtype == torch.bfloat16
    for head in (slice(0, 4), slice(4, 8)):
        normed = functional.rms_norm(o[:, head], weight, eps=1e-5)
        expected = (normed * gate[:, head].float().sigmoid()).bfloat16()
        torch.testing.assert_close(y[:, head], expected, rtol=0, atol=0)


def test_router_logits_stay_float32() -> None:
    # Fault B36: 1 + 2^-9 rounds to 1 in bfloat16, and then the lower id wins.
    x = torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    weight = torch.zeros(16, 2).bfloat16()
    weight[5, 0] = weight[9, 0] = weight[9, 1] = 1.0
    logits = functional.linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert logits[0, 9] == 1.001953125
    assert functional.argmax(logits).tolist() == [9]
    assert functional.argmax(functional.linear(x, weight)).tolist() == [5]
    wide = functional.linear(x.double(), weight.double(), out_dtype=torch.float32)
    assert wide.dtype == torch.float64


def test_linear_slices() -> None:
    x, weight = torch.randn(3, 8).double(), torch.randn(6, 8).double()
    whole = functional.linear(x, weight)
    rows = [functional.linear(x, part) for part in weight.chunk(2)]
    torch.testing.assert_close(torch.cat(rows, dim=1), whole)
    columns = [
        functional.linear(a, b) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    ]
    torch.testing.assert_close(columns[0] + columns[1], whole)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([math.nan, 0.0, -1.0], 1),
        ([math.nan, -math.inf, -math.inf], 1),
        ([-1.0, math.nan, math.inf], 2),
        ([math.nan, math.nan, math.nan], 0),
    ],
)
def test_argmax(row: list[float], expected: int) -> None:
    assert functional.argmax(torch.tensor([row])).tolist() == [expected]


def test_situ_mul() -> None:
    gate, up = torch.tensor([[0.5, 300.0, -300.0]]), torch.tensor([[-2.0, 900.0, 1.0]])
    y = functional.situ_mul(gate, up, beta=4.0, linear_beta=25.0)
    first = 4 * math.tanh(0.125) / (1 + math.exp(-0.5)) * 25 * math.tanh(-0.08)
    torch.testing.assert_close(y, torch.tensor([[first, 100.0, 0.0]]))


def test_attn_res_mix() -> None:
    sources = [torch.randn(3, 8).double() for _ in range(4)]
    norm, proj = torch.randn(8).double(), torch.randn(1, 8).double()
    scores = torch.stack(
        [functional.linear(functional.rms_norm(s, norm, eps=1e-5), proj) for s in sources]
    )
    expected = (scores.softmax(0) * torch.stack(sources)).sum(0)
    torch.testing.assert_close(functional.attn_res_mix(sources, norm, proj, eps=1e-5), expected)


def test_attn_res_in_two_phases() -> None:
    sources = [torch.randn(3, 8).double() for _ in range(4)]
    norm, proj = torch.randn(8).double(), torch.randn(1, 8).double()
    whole = functional.attn_res_mix(sources, norm, proj, eps=1e-5)
    query = norm * proj[0]
    blocks = functional.attn_res_blocks(sources[:3], query, eps=1e-5)
    merged = functional.attn_res_merge(query, *blocks, sources[3], eps=1e-5)
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)


def test_padding_rows_do_not_reach_others() -> None:
    # Fault B45: three rows in a bucket of four.
    generator = torch.default_generator.manual_seed(1)
    clean = torch.randn(4, 32, generator=generator).bfloat16()
    clean[3] = 0
    weight = torch.randn(32, 32, generator=generator).bfloat16()
    ops: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: functional.rms_norm(x, weight[0], eps=1e-5),
        lambda x: functional.linear(x, weight),
        lambda x: functional.situ_mul(x, x, beta=4.0, linear_beta=25.0),
        lambda x: functional.attn_res_mix([x, x + 1], weight[0], weight[:1], eps=1e-5),
        lambda x: functional.argmax(functional.linear(x, weight)),
    ]
    for poison in (math.nan, math.inf):
        dirty = clean.clone()
        dirty[3] = poison
        for op in ops:
            assert torch.equal(op(dirty)[:3], op(clean)[:3])


def test_fx_keeps_ops_whole() -> None:
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, weight)
        return functional.attn_res_mix([y, x], weight[0], weight[:1], eps=1e-5)

    traced = fx.symbolic_trace(forward)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert functional.linear in targets
    assert targets[-1] is functional.attn_res_mix
    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    torch.testing.assert_close(traced(x, weight), forward(x, weight))
