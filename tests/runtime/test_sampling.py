"""Drawing tokens: what may be drawn, how often, and that a seed repeats it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3fuse.errors import InputError
from k3fuse.runtime.generate import generate
from k3fuse.runtime.sampling import SampledExecutor, Sampling, sample
from tests.runtime.conftest import prompt, stock


def draws(logits: torch.Tensor, count: int, **options: float) -> torch.Tensor:
    sampling = Sampling(**options)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(sampling.seed)
    return sample(logits.expand(count, -1), sampling, generator)


def drawn(logits: torch.Tensor, count: int, **options: float) -> set[int]:
    return {int(token) for token in draws(logits, count, **options)}


def test_tokens_come_as_often_as_their_probability() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = torch.bincount(draws(logits, 40000, temperature=0.7), minlength=4) / 40000
    assert torch.allclose(counts.float(), torch.softmax(logits[0] / 0.7, -1), atol=0.01)


def test_top_k_keeps_the_lower_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]])
    assert drawn(logits, 2000, top_k=3) == {0, 1, 4}


def test_top_p_keeps_what_reaches_it() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert drawn(logits, 2000, top_p=0.79) == {0, 1}
    assert drawn(logits, 2000, top_p=0.81) == {0, 1, 2}
    assert drawn(logits, 2000, top_p=0.01) == {0}


def test_top_p_counts_what_top_k_has_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.3]]))
    assert drawn(logits, 2000, top_k=2, top_p=0.5) == {0}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}])
def test_greedy(options: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, torch.nan]])
    assert drawn(logits, 50, **options) == {1}


def test_nan_is_not_drawn() -> None:
    logits = torch.tensor([[torch.nan, 0.0, torch.nan, 0.0]])
    assert drawn(logits, 500) == {1, 3}


@given(st.integers(1, 6), st.integers(0, 8), st.floats(0.05, 1.0), st.integers(0, 1000))
def test_ids_are_in_range_and_repeat(rows: int, top_k: int, top_p: float, seed: int) -> None:
    logits = torch.randn(rows, 9, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(0.8, top_k, top_p, seed)
    first, again = (sample(logits, sampling, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert torch.equal(first, again)
    assert bool(((first >= 0) & (first < 9)).all())


def test_generation_repeats_with_its_seed() -> None:
    prompts = [prompt(4, 1), prompt(6, 2)]
    runs = [
        generate(
            SampledExecutor(stock(), Sampling(temperature=1.5, seed=seed)), prompts, 8, buckets=[2]
        ).tokens
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]
    greedy = SampledExecutor(stock(), Sampling(temperature=0))
    assert generate(greedy, prompts, 8, buckets=[2]).tokens == (
        generate(stock(), prompts, 8, buckets=[2]).tokens
    )


def test_drafts_are_not_verified() -> None:
    executor = SampledExecutor(stock(), Sampling())
    with pytest.raises(InputError, match="--rows-per-request 1"):
        generate(executor, [prompt(4, 1)], 4, buckets=[1], rows_per_request=2)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
    ],
)
def test_wrong_options_are_named(options: dict[str, float], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        Sampling(**options)  # pyright: ignore[reportArgumentType]
