from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import pytest
import torch

from k3fuse.errors import InputError
from k3fuse.models.kimi import DecodeState, KdaState
from k3fuse.runtime.drafts import Draft, prompt_lookup
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.generate import Generation, generate
from k3fuse.runtime.stock import StockExecutor
from tests.runtime.conftest import fused, prompt, stock, tiny_model

PROMPTS = [prompt(5, 1), prompt(9, 2), prompt(17, 3)]
NEW = 12


@functools.cache
def greedy(*, exact: bool = True) -> Generation:
    """Every prompt alone, one row at a time, by the stock model."""
    runs = [generate(stock(exact=exact), [p], NEW, buckets=[1]) for p in PROMPTS]
    return Generation(
        [run.tokens[0] for run in runs],
        [run.logits[0] for run in runs],
        [run.hidden[0] for run in runs],
        [run.accepted[0] for run in runs],
    )


def oracle(wrong_every: int) -> Draft:
    """Drafts what greedy decoding will choose, with every n-th guess of a text wrong."""
    texts = [p + t for p, t in zip(PROMPTS, greedy().tokens, strict=True)]

    def draft(tokens: Sequence[int], count: int) -> list[int]:
        known = list(tokens)
        text = next(t for t in texts if t[: len(known)] == known)
        guesses = [*text[len(known) :], *[0] * count][:count]
        return [
            (guess + 1) % 512 if (len(known) + i) % wrong_every == 0 else guess
            for i, guess in enumerate(guesses)
        ]

    return draft


def same(a: Generation, b: Generation) -> None:
    assert a.tokens == b.tokens
    for x, y in zip([*a.logits, *a.hidden], [*b.logits, *b.hidden], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tp", [1, 4])
def test_fused_decode_equals_stock_exactly(tp: int) -> None:
    executor = fused(tp, (4, 1), exact=True)
    same(generate(executor, PROMPTS, NEW, buckets=[4]), greedy())


@pytest.mark.parametrize("tp", [1, 4])
def test_fused_verify_equals_plain_greedy(tp: int) -> None:
    executor = fused(tp, (4, 4), commit=True, exact=True)
    draft = oracle(wrong_every=5)
    run = generate(executor, PROMPTS, NEW, buckets=[4], rows_per_request=4, draft=draft)
    same(run, greedy())
    counts = [count for counts in run.accepted for count in counts]
    assert min(counts) < 4
    assert max(counts) == 4
    assert run.mean_accepted > 2


@pytest.mark.parametrize("draft", [prompt_lookup, oracle])
def test_stock_verify_equals_plain_greedy(draft: object) -> None:
    guess = oracle(3) if draft is oracle else prompt_lookup
    run = generate(stock(exact=True), PROMPTS, NEW, buckets=[4], rows_per_request=3, draft=guess)
    same(run, greedy())


def test_requests_join_and_leave() -> None:
    """More prompts than slots, buckets smaller than the slots, requests of different lengths."""
    first = {index: tokens[4] for index, tokens in enumerate(greedy().tokens)}
    seen: dict[int, list[int]] = {}

    def on_step(new: Mapping[int, list[int]]) -> None:
        assert len(new) <= 2
        for index, tokens in new.items():
            seen.setdefault(index, []).extend(tokens)

    capacity = Capacity(slots=3, pages=12, page_size=8, table=6)
    executor = StockExecutor(tiny_model(exact=True), capacity)
    prompts = [*PROMPTS, *PROMPTS]
    stop = first[1]
    run = generate(executor, prompts, NEW, buckets=[1, 2], stop_token=stop, on_step=on_step)
    for index, tokens in enumerate(run.tokens):
        whole = greedy().tokens[index % 3]
        end = whole.index(stop) + 1 if stop in whole else NEW
        assert tokens == whole[:end]
        assert seen[index] == tokens
    assert len(run.tokens[1]) <= 5


@pytest.mark.parametrize("kind", ["stock", "fused"])
def test_a_poisoned_slot_is_as_good_as_a_fresh_one(kind: str) -> None:
    executor = stock(exact=True) if kind == "stock" else fused(4, (4, 1), exact=True)
    state = executor.state if isinstance(executor, StockExecutor) else executor.read_state()
    poisoned: DecodeState = [
        type(layer)(*(torch.full_like(t, torch.nan) for t in layer)) for layer in state
    ]
    if isinstance(executor, StockExecutor):
        executor.state = poisoned
    else:
        executor.load_state(poisoned)
    run = generate(executor, PROMPTS[:2], 4, buckets=[4])
    assert run.tokens == [tokens[:4] for tokens in greedy().tokens[:2]]
    after = executor.state if isinstance(executor, StockExecutor) else executor.read_state()
    unused = next(layer for layer in after if isinstance(layer, KdaState)).recurrent[2:]
    assert bool(unused.isnan().all())


def test_one_new_token_needs_no_step() -> None:
    run = generate(stock(exact=True), PROMPTS[:1], 1, buckets=[1])
    assert run.tokens == [greedy().tokens[0][:1]]
    assert run.accepted == [[]]
    assert run.mean_accepted == 0


@pytest.mark.parametrize(
    ("prompts", "new", "buckets", "rows", "message"),
    [
        ([], 1, [1], 1, "there are no prompts"),
        ([[1], []], 1, [1], 1, "prompt 1 is empty"),
        ([[1, 2], [3, 512]], 1, [1], 1, r"prompt 1, position 1: token id 512 .* \[0, 512\)"),
        ([[-1]], 1, [1], 1, "prompt 0, position 0: token id -1"),
        ([[1]], 0, [1], 1, "--max-new-tokens 0"),
        ([[1]], 1, [], 1, r"buckets \[\]"),
        ([[1]], 1, [1], 5, "5 rows a request: this state holds 1 to 4"),
        (
            [[1], [2] * 40],
            10,
            [1],
            1,
            "prompt 1 needs 49 cache positions and a request can have 48",
        ),
    ],
)
def test_bad_input_is_named(
    prompts: list[list[int]], new: int, buckets: list[int], rows: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        generate(stock(), prompts, new, buckets=buckets, rows_per_request=rows)


def test_a_batch_that_was_not_compiled_is_named() -> None:
    with pytest.raises(InputError, match=r"no bucket for 2 requests of 1 rows.*--batch"):
        generate(fused(1, (4, 1)), PROMPTS[:2], 2, buckets=[2])


def test_prompt_lookup_prefers_the_longest_and_latest_match() -> None:
    assert prompt_lookup([1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], 3) == [9, 8, 2]
    assert prompt_lookup([5, 3, 6, 4, 3], 2) == [6, 4]
    assert prompt_lookup([1, 2, 1], 4) == [2, 1, 1, 1]
    assert prompt_lookup([1, 2, 3], 2) == [3, 3]
    assert prompt_lookup([4], 2) == [4, 4]
