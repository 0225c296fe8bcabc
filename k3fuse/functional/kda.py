"""Kimi delta attention: short convolution, gated delta rule, and the commit of verified rows.

Every function here runs rows through the same `_advance`, so serial decode, a chunk of rows and
verify followed by commit give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3fuse.functional.model_op import model_op
from k3fuse.functional.precision import ACCUMULATE, float32_or_wider
from k3fuse.functional.slots import live_requests, read_slots, write_slots

_L2_EPS = 1e-6


class _Weights(NamedTuple):
    conv: torch.Tensor  # [3, P, W]
    decay_rate: torch.Tensor  # [H, 1], exp(A_log)
    dt_bias: torch.Tensor  # [H, K]
    gate_lower_bound: float | None


@model_op
def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    q_conv: torch.Tensor,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    slots: torch.Tensor,
    *,
    head_dim: int,
    gate_lower_bound: float | None,
    rows_per_request: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the rows of each request in order and keep the state they lead to (K3 spec 2.4).

    q, k, v, f [M, P] and b [M, H] are projections before convolution, decay and sigmoid, with
    M = R * rows_per_request and the rows of a request contiguous. q_conv, k_conv, v_conv
    [P, 1, W], last tap for the current row; a_log [H]; dt_bias [P]. conv_state
    [slots, 3, P, W-1] holds past q, k, v inputs, oldest first; recurrent_state [slots, H, V, K]
    float32; slots [R] int32, -1 for padding. `gate_lower_bound` None means the softplus decay
    of Kimi-Linear.

    Returns o [M, P] float32 (float64 for float64 inputs) and the two states after all rows. A
    padding request gives o = 0 and touches no state.
    """
    inputs = _split_rows(q, k, v, f, b, rows_per_request)
    weights = _weights(q, q_conv, k_conv, v_conv, a_log, dt_bias, head_dim, gate_lower_bound)
    o, conv, recurrent = _run(inputs, weights, conv_state, recurrent_state, slots)
    return (
        o,
        write_slots(conv_state, slots, conv),
        write_slots(recurrent_state, slots, recurrent),
    )


@model_op
def kda_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    q_conv: torch.Tensor,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    slots: torch.Tensor,
    journal_qkv: torch.Tensor,
    journal_f: torch.Tensor,
    journal_b: torch.Tensor,
    *,
    head_dim: int,
    gate_lower_bound: float | None,
    rows_per_request: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same o as `kda_step`, with the states left alone and the inputs kept for `kda_commit`.

    Arguments as in `kda_step`, plus the journals of an earlier step: journal_qkv
    [slots, rows, 3, P], journal_f [slots, rows, P], journal_b [slots, rows, H], with rows at
    least rows_per_request. Returns o and the three journals with the rows of each live request
    written from row 0 (replay scheme, K3 spec 6.4 c).
    """
    inputs = _split_rows(q, k, v, f, b, rows_per_request)
    weights = _weights(q, q_conv, k_conv, v_conv, a_log, dt_bias, head_dim, gate_lower_bound)
    o, _, _ = _run(inputs, weights, conv_state, recurrent_state, slots)
    return (
        o,
        _write_journal(journal_qkv, slots, inputs.qkv),
        _write_journal(journal_f, slots, inputs.f),
        _write_journal(journal_b, slots, inputs.b),
    )


@model_op
def kda_commit(
    journal_qkv: torch.Tensor,
    journal_f: torch.Tensor,
    journal_b: torch.Tensor,
    q_conv: torch.Tensor,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    *,
    head_dim: int,
    gate_lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the states by the accepted rows of the last verify, as serial decode would have.

    Journals as `kda_verify` returns them; slots [R] int32, -1 for padding; accepted [R] int32,
    the number of leading rows to apply, 0 for none. Returns conv_state and recurrent_state, bit
    for bit what `kda_step` on those rows gives.
    """
    weights = _weights(
        journal_qkv, q_conv, k_conv, v_conv, a_log, dt_bias, head_dim, gate_lower_bound
    )
    inputs = _Rows(
        read_slots(journal_qkv, slots), read_slots(journal_f, slots), read_slots(journal_b, slots)
    )
    conv, recurrent = read_slots(conv_state, slots), read_slots(recurrent_state, slots)
    for row in range(journal_qkv.shape[1]):
        _, next_conv, next_recurrent = _advance(inputs, row, weights, conv, recurrent)
        take = (accepted > row).view(-1, 1, 1, 1)
        conv = torch.where(take, next_conv, conv)
        recurrent = torch.where(take, next_recurrent, recurrent)
    return write_slots(conv_state, slots, conv), write_slots(recurrent_state, slots, recurrent)


@model_op
def kda_reset(
    conv_state: torch.Tensor, recurrent_state: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero the states of `slots` [R] int32 (-1: none), whatever a former request left there."""
    conv = torch.zeros_like(read_slots(conv_state, slots))
    recurrent = torch.zeros_like(read_slots(recurrent_state, slots))
    return write_slots(conv_state, slots, conv), write_slots(recurrent_state, slots, recurrent)


class _Rows(NamedTuple):
    qkv: torch.Tensor  # [R, rows, 3, P]
    f: torch.Tensor  # [R, rows, P]
    b: torch.Tensor  # [R, rows, H]


def _split_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, f: torch.Tensor, b: torch.Tensor, rows: int
) -> _Rows:
    return _Rows(
        torch.unflatten(torch.stack([q, k, v], dim=1), 0, (-1, rows)),
        torch.unflatten(f, 0, (-1, rows)),
        torch.unflatten(b, 0, (-1, rows)),
    )


def _weights(
    x: torch.Tensor,
    q_conv: torch.Tensor,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    head_dim: int,
    gate_lower_bound: float | None,
) -> _Weights:
    return _Weights(
        torch.stack([q_conv, k_conv, v_conv]).squeeze(2).to(ACCUMULATE),
        torch.exp(a_log.to(ACCUMULATE)).unsqueeze(-1),
        dt_bias.to(ACCUMULATE).view(-1, head_dim),
        gate_lower_bound,
    )


def _run(
    inputs: _Rows,
    weights: _Weights,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All rows of every request: o [M, P], and the states [R, ...] that they lead to."""
    conv, recurrent = read_slots(conv_state, slots), read_slots(recurrent_state, slots)
    outputs: list[torch.Tensor] = []
    for row in range(inputs.qkv.shape[1]):
        o, conv, recurrent = _advance(inputs, row, weights, conv, recurrent)
        outputs.append(o)
    o = torch.stack(outputs, dim=1)
    o = torch.where(live_requests(slots).view(-1, 1, 1), o, 0)
    return o.flatten(0, 1).to(float32_or_wider(inputs.f.dtype)), conv, recurrent


def _advance(
    inputs: _Rows,
    row: int,
    weights: _Weights,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of every request: o [R, P] and the next conv and recurrent states [R, ...]."""
    heads, head_dim = weights.dt_bias.shape

    window = torch.cat(
        [conv.to(ACCUMULATE), inputs.qkv[:, row].to(ACCUMULATE).unsqueeze(-1)], dim=-1
    )
    qkv = torch.nn.functional.silu((window * weights.conv).sum(-1))
    q, k, v = torch.unflatten(qkv, -1, (heads, head_dim)).unbind(1)
    q, k = _l2_norm(q) * head_dim**-0.5, _l2_norm(k)

    logits = (
        torch.unflatten(inputs.f[:, row].to(ACCUMULATE), -1, (heads, head_dim)) + weights.dt_bias
    )
    decay = torch.exp(_log_decay(logits, weights))
    beta = torch.sigmoid(inputs.b[:, row].to(ACCUMULATE)).unsqueeze(-1)

    # Products and sums instead of matmul: a row's bits must not depend on how many run with it.
    state = recurrent.to(ACCUMULATE) * decay.unsqueeze(-2)
    delta = beta * (v - (state * k.unsqueeze(-2)).sum(-1))
    state = state + delta.unsqueeze(-1) * k.unsqueeze(-2)
    o = (state * q.unsqueeze(-2)).sum(-1)
    return o.flatten(1), window[..., 1:].to(conv.dtype), state.to(recurrent.dtype)


def _log_decay(logits: torch.Tensor, weights: _Weights) -> torch.Tensor:
    if weights.gate_lower_bound is None:
        softplus = torch.logaddexp(logits, torch.zeros_like(logits))
        return -weights.decay_rate * softplus
    return weights.gate_lower_bound * torch.sigmoid(weights.decay_rate * logits)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _write_journal(
    journal: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    rows = values.shape[1]
    kept = read_slots(journal, slots)[:, rows:]
    return write_slots(journal, slots, torch.cat([values.to(journal.dtype), kept], dim=1))
