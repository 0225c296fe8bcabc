# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# Tensor.tolist has no type in torch's stubs.

from __future__ import annotations

import math

import pytest
import torch

from k3fuse import functional
from k3fuse.functional import moe, mxfp4


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    bias = torch.zeros(logits.shape[1])
    return functional.route_topk(logits, bias, top_k=top_k, renormalize=True, scale=1.0)


def test_ties_go_to_the_lower_id() -> None:
    # Fault B32.
    ids, weights = route(torch.zeros(1, 896), 16)
    assert ids.tolist() == [list(range(16))]
    assert ids.dtype == torch.int32
    assert weights.tolist() == [[0.0625] * 16]
    logits = torch.zeros(1, 896)
    logits[:, 800:816] = 1
    assert route(logits, 16)[0].tolist() == [list(range(800, 816))]


def test_nan_scores() -> None:
    # Fault B34.
    logits = torch.randn(3, 896, generator=torch.default_generator.manual_seed(0))
    clean_ids, clean_weights = route(logits, 16)
    dirty = logits.clone()
    dirty[1] = math.nan
    ids, weights = route(dirty, 16)
    assert len(set(ids[1].tolist())) == 16
    assert ids.min() >= 0
    assert ids.max() < 896
    assert torch.isfinite(weights).all()
    for row in (0, 2):
        assert torch.equal(ids[row], clean_ids[row])
        assert torch.equal(weights[row], clean_weights[row])
    dirty = logits.clone()
    dirty[0, 7] = math.nan
    assert 7 not in route(dirty, 16)[0][0].tolist()


def test_precise_logits_choose() -> None:
    # Fault B36.
    logits = torch.zeros(1, 16)
    logits[0, 5], logits[0, 9] = 1.0, 1.001953125
    assert route(logits, 1)[0].tolist() == [[9]]
    assert route(logits.bfloat16().float(), 1)[0].tolist() == [[5]]


def test_bias_only_selects() -> None:
    bias = torch.tensor([0.0, 10.0, 0.0, 5.0])
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.5]])
    ids, weights = functional.route_topk(logits, bias, top_k=2, renormalize=True, scale=2.446)
    assert ids.tolist() == [[1, 3]]
    scores = torch.tensor([-1.0, 0.5]).sigmoid()
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.446)
    plain = functional.route_topk(logits, bias, top_k=2, renormalize=False, scale=1.0)[1]
    torch.testing.assert_close(plain[0], scores)


def experts(packed: bool) -> list[torch.Tensor]:
    generator = torch.default_generator.manual_seed(2)
    shapes = [(6, 64, 32), (6, 64, 32), (6, 32, 64)]
    weights = [torch.randn(shape, generator=generator).double() / 4 for shape in shapes]
    if not packed:
        return weights
    pairs = [mxfp4.quantize(w) for w in weights]
    return [p for p, _ in pairs] + [s for _, s in pairs]


def by_hand(z: torch.Tensor, ids: torch.Tensor, p: torch.Tensor, w: list[torch.Tensor]):
    if len(w) == 6:
        w = [mxfp4.dequantize(w[i], w[i + 3], torch.float64) for i in range(3)]
    rows: list[torch.Tensor] = []
    for x, chosen, weights in zip(z, ids.tolist(), p, strict=True):
        y = torch.zeros_like(x)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = w[0][expert] @ x, w[1][expert] @ x
            y += weight * (w[2][expert] @ functional.situ_mul(gate, up, beta=4, linear_beta=25))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True])
def test_moe_experts(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(5, 32, generator=torch.default_generator.manual_seed(3)).double()
    ids, p = route(torch.randn(5, 6).double(), 3)
    weights = experts(packed)
    y = functional.moe_experts(z, ids, p, *weights, activation="situ", beta=4.0, linear_beta=25.0)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, by_hand(z, ids, p, weights), rtol=1e-12, atol=1e-12)

    halves: list[torch.Tensor] = []
    for rank in range(2):
        dims = (1, 1, 2, 1, 1, 2)
        part = [w.chunk(2, dim=d)[rank] for w, d in zip(weights, dims, strict=False)]
        halves.append(
            functional.moe_experts(z, ids, p, *part, activation="situ", beta=4.0, linear_beta=25.0)
        )
    torch.testing.assert_close(halves[0] + halves[1], y, rtol=1e-12, atol=1e-12)

    monkeypatch.setattr(moe, "_CHUNK_ELEMENTS", 2 * 64 * 32)
    chunked = functional.moe_experts(
        z, ids, p, *weights, activation="situ", beta=4.0, linear_beta=25.0
    )
    torch.testing.assert_close(chunked, y, rtol=1e-12, atol=1e-12)


def test_padding_row_does_not_reach_others() -> None:
    # Fault B45.
    weights = [w.bfloat16() for w in experts(packed=False)]
    logits = torch.randn(4, 6, generator=torch.default_generator.manual_seed(4))
    z = torch.randn(4, 32).bfloat16()
    z[3], logits[3] = 0, 0
    ids, p = route(logits, 3)
    clean = functional.moe_experts(z, ids, p, *weights, activation="silu")
    for poison in (math.nan, math.inf):
        z[3], logits[3] = poison, poison
        ids, p = route(logits, 3)
        dirty = functional.moe_experts(z, ids, p, *weights, activation="silu")
        assert torch.equal(dirty[:3], clean[:3])
