from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from k3fuse import functional

HEADS, DIM, SLOTS = 2, 8, 5
WIDTH = HEADS * DIM
BOUNDS = (-5.0, None)


class Rows(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    f: torch.Tensor
    b: torch.Tensor


class Weights(NamedTuple):
    q_conv: torch.Tensor
    k_conv: torch.Tensor
    v_conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


class State(NamedTuple):
    conv: torch.Tensor
    recurrent: torch.Tensor


class Journal(NamedTuple):
    qkv: torch.Tensor
    f: torch.Tensor
    b: torch.Tensor


def make_weights(dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.default_generator.manual_seed(0)
    convs = [torch.randn(WIDTH, 1, 4, generator=generator, dtype=dtype) for _ in range(3)]
    a_log = torch.randn(HEADS, generator=generator, dtype=dtype) / 2
    return Weights._make([*convs, a_log, torch.randn(WIDTH, generator=generator, dtype=dtype)])


def make_rows(count: int, dtype: torch.dtype = torch.bfloat16) -> Rows:
    generator = torch.default_generator.manual_seed(1)
    widths = (WIDTH, WIDTH, WIDTH, WIDTH, HEADS)
    return Rows._make(torch.randn(count, w, generator=generator).to(dtype) for w in widths)


def make_state(dtype: torch.dtype = torch.bfloat16) -> State:
    generator = torch.default_generator.manual_seed(2)
    exact = torch.promote_types(dtype, torch.float32)
    return State(
        torch.randn(SLOTS, 3, WIDTH, 3, generator=generator).to(dtype),
        torch.randn(SLOTS, HEADS, DIM, DIM, generator=generator).to(exact),
    )


def make_journal(rows: int, dtype: torch.dtype = torch.bfloat16) -> Journal:
    return Journal(
        torch.full((SLOTS, rows, 3, WIDTH), math.nan, dtype=dtype),
        torch.full((SLOTS, rows, WIDTH), math.nan, dtype=dtype),
        torch.full((SLOTS, rows, HEADS), math.nan, dtype=dtype),
    )


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(
    rows: Rows,
    weights: Weights,
    state: State,
    where: torch.Tensor,
    bound: float | None,
) -> tuple[torch.Tensor, State]:
    o, conv, recurrent = functional.kda_step(
        *rows, *weights, *state, where,
        head_dim=DIM, gate_lower_bound=bound, rows_per_request=len(rows[0]) // len(where),
    )  # fmt: skip
    return o, State(conv, recurrent)


def verify(
    rows: Rows,
    weights: Weights,
    state: State,
    where: torch.Tensor,
    journal: Journal,
    bound: float | None,
) -> tuple[torch.Tensor, Journal]:
    o, qkv, f, b = functional.kda_verify(
        *rows, *weights, *state, where, *journal,
        head_dim=DIM, gate_lower_bound=bound, rows_per_request=len(rows[0]) // len(where),
    )  # fmt: skip
    return o, Journal(qkv, f, b)


def commit(
    journal: Journal,
    weights: Weights,
    state: State,
    where: torch.Tensor,
    accepted: torch.Tensor,
    bound: float | None,
) -> State:
    new = functional.kda_commit(
        *journal, *weights, *state, where, accepted, head_dim=DIM, gate_lower_bound=bound
    )
    return State(*new)


def pick(rows: Rows, requests: int, start: int, stop: int) -> Rows:
    """Rows start..stop of every request."""
    return Rows._make(r.view(requests, -1, r.shape[1])[:, start:stop].flatten(0, 1) for r in rows)


def same(a: State, b: State) -> bool:
    return torch.equal(a.conv, b.conv) and torch.equal(a.recurrent, b.recurrent)


def serial(
    rows: Rows,
    weights: Weights,
    state: State,
    where: torch.Tensor,
    count: int,
    bound: float | None,
) -> tuple[list[torch.Tensor], State]:
    outputs: list[torch.Tensor] = []
    for row in range(count):
        o, state = step(pick(rows, len(where), row, row + 1), weights, state, where, bound)
        outputs.append(o)
    return outputs, state


@pytest.mark.parametrize("bound", BOUNDS)
def test_follows_the_equations(bound: float | None) -> None:
    weights, state = make_weights(torch.float64), make_state(torch.float64)
    q, k, v, f, b = make_rows(3, torch.float64)
    o, new = step(Rows(q, k, v, f, b), weights, state, slots(4), bound)
    assert o.dtype == new.recurrent.dtype == new.conv.dtype == torch.float64

    history = state.conv[4]
    matrix = state.recurrent[4].clone()
    for row in range(3):
        window = torch.cat([history, torch.stack([q[row], k[row], v[row]])[..., None]], dim=-1)
        taps = torch.stack([w[:, 0] for w in weights[:3]])
        channels = torch.nn.functional.silu((window * taps).sum(-1))
        history = window[..., 1:]
        for head in range(HEADS):
            at = slice(head * DIM, (head + 1) * DIM)
            qh, kh, vh = channels[0, at], channels[1, at], channels[2, at]
            qh = qh / (qh @ qh + 1e-6).sqrt() * DIM**-0.5
            kh = kh / (kh @ kh + 1e-6).sqrt()
            logits, rate = f[row, at] + weights.dt_bias[at], weights.a_log[head].exp()
            if bound is None:
                decay = torch.exp(-rate * torch.nn.functional.softplus(logits))
            else:
                decay = torch.exp(bound * torch.sigmoid(rate * logits))
            matrix[head] = matrix[head] * decay
            delta = torch.sigmoid(b[row, head]) * (vh - matrix[head] @ kh)
            matrix[head] = matrix[head] + torch.outer(delta, kh)
            torch.testing.assert_close(o[row, at], matrix[head] @ qh, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new.recurrent[4], matrix, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new.conv[4], history, rtol=0, atol=0)
    untouched = [0, 1, 2, 3]
    assert torch.equal(new.recurrent[untouched], state.recurrent[untouched])


@pytest.mark.parametrize("bound", BOUNDS)
def test_serial_equals_chunks(bound: float | None) -> None:
    # Fault B52: one chunk of 4 rows, two of 2 and four of 1.
    weights, state, rows, where = make_weights(), make_state(), make_rows(8), slots(3, 1)
    whole, end = step(rows, weights, state, where, bound)
    first, middle = step(pick(rows, 2, 0, 2), weights, state, where, bound)
    second, halves_end = step(pick(rows, 2, 2, 4), weights, middle, where, bound)
    assert same(end, halves_end)
    halves = torch.cat([first.view(2, 2, -1), second.view(2, 2, -1)], dim=1)
    assert torch.equal(halves, whole.view(2, 4, -1))
    singles, singles_end = serial(rows, weights, state, where, 4, bound)
    assert same(end, singles_end)
    assert torch.equal(torch.stack(singles, dim=1), whole.view(2, 4, -1))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("accepted", range(5))
def test_verify_and_commit_equal_serial(accepted: int, bound: float | None) -> None:
    weights, state, rows, where = make_weights(), make_state(), make_rows(8), slots(3, 1)
    o, journal = verify(rows, weights, state, where, make_journal(6), bound)
    assert torch.equal(o, step(rows, weights, state, where, bound)[0])
    end = commit(journal, weights, state, where, slots(accepted, accepted), bound)
    assert same(end, serial(rows, weights, state, where, accepted, bound)[1])
    # Fault B47: a plain row after the commit goes on from the committed state.
    plain = pick(make_rows(10), 2, 4, 5)
    _, expected = serial(rows, weights, state, where, accepted, bound)
    o_plain, after = step(plain, weights, end, where, bound)
    o_serial, after_serial = step(plain, weights, expected, where, bound)
    assert torch.equal(o_plain, o_serial)
    assert same(after, after_serial)


def test_each_request_accepts_its_own_count() -> None:
    # Fault B46: nothing accepted keeps the committed state and touches no neighbour.
    weights, rows, where = make_weights(), make_rows(6), slots(0, 1, 2)
    state = make_state()
    for slot, value in enumerate((10.0, 20.0, 30.0)):
        state.recurrent[slot] = value
    _, journal = verify(rows, weights, state, where, make_journal(2), -5.0)
    end = commit(journal, weights, state, where, slots(1, 0, 2), -5.0)
    assert torch.equal(end.recurrent[1], torch.full((HEADS, DIM, DIM), 20.0))
    assert torch.equal(end.conv[1], state.conv[1])
    for slot, count in ((0, 1), (2, 2)):
        expected = serial(rows, weights, state, where, count, -5.0)[1]
        assert torch.equal(end.recurrent[slot], expected.recurrent[slot])
        assert torch.equal(end.conv[slot], expected.conv[slot])
    assert torch.equal(end.recurrent[3:], state.recurrent[3:])


def test_decay_runs_along_k() -> None:
    # Fault B52: six distinct numbers tell [V, K] from [K, V].
    numbers = torch.arange(1.0, 1 + DIM * DIM).view(DIM, DIM)
    state = State(torch.zeros(SLOTS, 3, WIDTH, 3), numbers.repeat(SLOTS, HEADS, 1, 1))
    conv = torch.zeros(WIDTH, 1, 4)
    zeros = Weights(conv, conv, conv, torch.zeros(HEADS), torch.zeros(WIDTH))
    f = torch.randn(1, WIDTH, generator=torch.default_generator.manual_seed(5))
    empty = torch.zeros(1, WIDTH)
    rows = Rows(empty, empty, empty, f, torch.zeros(1, HEADS))
    _, end = step(rows, zeros, state, slots(0), -5.0)
    decay = torch.exp(-5 * torch.sigmoid(f)).view(HEADS, 1, DIM)
    torch.testing.assert_close(end.recurrent[0], numbers * decay)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding(poison: float) -> None:
    # Fault B45, and a NaN state behind the padding slot.
    weights, state, rows = make_weights(), make_state(), make_rows(4)
    state.recurrent[0] = math.nan
    clean, clean_end = step(Rows._make(r[:3] for r in rows), weights, state, slots(2, 4, 1), -5.0)
    for r in rows:
        r[3] = poison
    where = slots(2, 4, 1, -1)
    o, end = step(rows, weights, state, where, -5.0)
    assert torch.equal(o[:3], clean)
    assert torch.equal(o[3], torch.zeros(WIDTH))
    assert torch.equal(end.recurrent[1:], clean_end.recurrent[1:])
    assert torch.equal(end.recurrent[3], state.recurrent[3])
    o, journal = verify(rows, weights, state, where, make_journal(1), -5.0)
    assert torch.equal(o[:3], clean)
    assert torch.isnan(journal.f[[0, 3]]).all()
    after = commit(journal, weights, state, where, slots(1, 1, 1, 1), -5.0)
    assert torch.equal(after.recurrent[1:], clean_end.recurrent[1:])
    assert torch.equal(after.conv, clean_end.conv)


def test_a_reset_slot_is_a_fresh_slot() -> None:
    # Fault B53.
    weights, state, rows = make_weights(), make_state(), make_rows(1)
    state.conv[3], state.recurrent[3] = math.nan, math.nan
    fresh = State(torch.zeros_like(state.conv), torch.zeros_like(state.recurrent))
    expected, _ = step(rows, weights, fresh, slots(3), -5.0)
    reset = State(*functional.kda_reset(state.conv, state.recurrent, slots(3, -1)))
    assert torch.equal(step(rows, weights, reset, slots(3), -5.0)[0], expected)
    assert torch.equal(reset.recurrent[:3], state.recurrent[:3])


def test_heads_can_be_split() -> None:
    weights, state = make_weights(torch.float64), make_state(torch.float64)
    rows, where = make_rows(4, torch.float64), slots(1, 2)
    o, end = step(rows, weights, state, where, -5.0)
    for head in range(HEADS):
        at = slice(head * DIM, (head + 1) * DIM)
        one = slice(head, head + 1)
        part = Weights._make(
            [*(w[at] for w in weights[:3]), weights.a_log[one], weights.dt_bias[at]]
        )
        part_state = State(state.conv[:, :, at], state.recurrent[:, one])
        part_rows = Rows._make([*(r[:, at] for r in rows[:4]), rows.b[:, one]])
        part_o, part_end = step(part_rows, part, part_state, where, -5.0)
        torch.testing.assert_close(part_o, o[:, at], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part_end.recurrent, end.recurrent[:, one])


def test_inputs_are_not_written() -> None:
    weights, state, rows, where = make_weights(), make_state(), make_rows(4), slots(3, 1)
    journal = make_journal(2)
    before = [t.clone() for t in (*rows, *weights, *state)]
    _, written = verify(rows, weights, state, where, journal, -5.0)
    step(rows, weights, state, where, -5.0)
    commit(written, weights, state, where, slots(1, 2), -5.0)
    for old, new in zip(before, (*rows, *weights, *state), strict=True):
        assert torch.equal(old, new)
    assert all(torch.isnan(j).all() for j in journal)
