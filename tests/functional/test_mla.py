from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from k3fuse import functional

HEADS, NOPE, ROPE, V, RANK = 2, 8, 4, 6, 16
PAGES, PAGE = 8, 4


class Case(NamedTuple):
    """Two requests of three rows each, after 5 and 2 cached positions."""

    q: torch.Tensor
    c: torch.Tensor
    k_pe: torch.Tensor
    kv_b: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor


ROWS = 3


def make(dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.default_generator.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Case(
        draw(2 * ROWS, HEADS * (NOPE + ROPE)),
        draw(2 * ROWS, RANK),
        draw(2 * ROWS, ROPE),
        draw(HEADS * (NOPE + V), RANK),
        draw(PAGES, PAGE, RANK + ROPE),
        ints([6, 2, 5], [1, 7, 0]),
        ints(5, 2),
        ints(0, 1),
    )


def ints(*values: int | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def append(case: Case) -> torch.Tensor:
    rows = case.q.shape[0] // len(case.slots)
    return functional.mla_append(
        case.cache, case.c, case.k_pe, case.block_table, case.lengths, case.slots,
        rows_per_request=rows,
    )  # fmt: skip


def attend(case: Case, cache: torch.Tensor) -> torch.Tensor:
    rows = case.q.shape[0] // len(case.slots)
    return functional.mla_attend(
        case.q, cache, case.kv_b, case.block_table, case.lengths, case.slots,
        nope_dim=NOPE, rope_dim=ROPE, v_dim=V,
        rows_per_request=rows,
    )  # fmt: skip


def by_hand(case: Case, cache: torch.Tensor) -> torch.Tensor:
    flat = cache.flatten(0, 1)
    weight = case.kv_b.view(HEADS, NOPE + V, RANK)
    outputs: list[torch.Tensor] = []
    for request in range(2):
        for row in range(ROWS):
            seen = int(case.lengths[request]) + row + 1
            at = [int(case.block_table[request, t // PAGE]) * PAGE + t % PAGE for t in range(seen)]
            c, k_pe = flat[at, :RANK], flat[at, RANK:]
            query = case.q[request * ROWS + row].view(HEADS, NOPE + ROPE)
            for head in range(HEADS):
                kv = c @ weight[head].T
                key = torch.cat([kv[:, :NOPE], k_pe], dim=1)
                p = torch.softmax(key @ query[head] * (NOPE + ROPE) ** -0.5, dim=0)
                outputs.append(p @ kv[:, NOPE:])
    return torch.stack(outputs).view(2 * ROWS, HEADS * V)


def test_append() -> None:
    case = make()
    before = case.cache.clone()
    cache = append(case)
    assert torch.equal(case.cache, before)
    rows = torch.cat([case.c, case.k_pe], dim=1)
    # Positions 5, 6, 7 of request 0 lie in its page 2; 2, 3, 4 of request 1 in pages 1 and 7.
    written = [(2, 1), (2, 2), (2, 3), (1, 2), (1, 3), (7, 0)]
    for row, (page, offset) in zip(rows, written, strict=True):
        assert torch.equal(cache[page, offset], row)
        before[page, offset] = row
    assert torch.equal(cache, before)


def test_attend() -> None:
    case = make()
    cache = append(case)
    o = attend(case, cache)
    assert o.dtype == torch.float64
    torch.testing.assert_close(o, by_hand(case, cache), rtol=1e-12, atol=1e-12)


def test_absorbed_equals_expanded() -> None:
    case = make()
    cache = append(case)
    weight = case.kv_b.view(HEADS, NOPE + V, RANK)
    q = functional.mla_absorb_query(case.q, weight[:, :NOPE], nope_dim=NOPE, rope_dim=ROPE)
    latent = functional.mla_attend_latent(
        q, cache, case.block_table, case.lengths, case.slots,
        kv_lora=RANK, rope_dim=ROPE, softmax_scale=(NOPE + ROPE) ** -0.5, rows_per_request=ROWS,
    )  # fmt: skip
    o = functional.mla_value(latent, weight[:, NOPE:])
    torch.testing.assert_close(o, attend(case, cache), rtol=1e-12, atol=1e-12)


def test_heads_can_be_split() -> None:
    case = make()
    cache = append(case)
    halves = [
        attend(case._replace(q=q, kv_b=kv_b), cache)
        for q, kv_b in zip(case.q.chunk(2, 1), case.kv_b.chunk(2, 0), strict=True)
    ]
    whole = attend(case, cache)
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, rtol=1e-12, atol=1e-12)


def test_pages_in_any_order() -> None:
    case = make()
    in_order = case._replace(cache=torch.zeros_like(case.cache), block_table=ints([0, 1], [2, 3]))
    shuffled = in_order._replace(
        cache=torch.full_like(case.cache, math.nan), block_table=ints([6, 1], [3, 0])
    )
    for request in range(2):
        for page in range(2):
            source = torch.randn(PAGE, RANK + ROPE).double()
            in_order.cache[in_order.block_table[request, page]] = source
            shuffled.cache[shuffled.block_table[request, page]] = source
    assert torch.equal(attend(in_order, append(in_order)), attend(shuffled, append(shuffled)))


def test_chunks_equal_single_rows() -> None:
    case = make(torch.bfloat16)
    cache = append(case)
    whole = attend(case, cache).view(2, ROWS, -1)
    serial = case.cache
    for row in range(ROWS):
        one = case._replace(
            q=case.q.view(2, ROWS, -1)[:, row],
            c=case.c.view(2, ROWS, -1)[:, row],
            k_pe=case.k_pe.view(2, ROWS, -1)[:, row],
            cache=serial,
            lengths=case.lengths + row,
        )
        serial = append(one)
        assert torch.equal(attend(one, serial), whole[:, row])
    assert torch.equal(serial, cache)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_and_garbage_stay_out(poison: float) -> None:
    # Fault B45: a padding request, garbage in unused positions and in a later row.
    case = make(torch.bfloat16)
    clean = attend(case, append(case))
    dirty = case._replace(cache=case.cache.clone())
    dirty.cache[5], dirty.cache[4] = poison, poison
    dirty.cache[2, 1:], dirty.cache[0] = poison, poison
    assert torch.equal(attend(dirty, append(dirty)), clean)

    padded = dirty._replace(
        q=torch.cat([case.q, torch.full_like(case.q[:ROWS], poison)]),
        c=torch.cat([case.c, torch.full_like(case.c[:ROWS], poison)]),
        k_pe=torch.cat([case.k_pe, torch.full_like(case.k_pe[:ROWS], poison)]),
        block_table=torch.cat([case.block_table, ints([-1, -1, -1])]),
        lengths=ints(5, 2, 999),
        slots=ints(0, 1, -1),
    )
    cache = append(padded)
    assert torch.equal(cache.nan_to_num(), append(dirty).nan_to_num())
    o = attend(padded, cache)
    assert torch.equal(o[: 2 * ROWS], clean)
    assert torch.equal(o[2 * ROWS :], torch.zeros(ROWS, HEADS * V).bfloat16())

    # A draft row of garbage does not reach the rows before it.
    last = case._replace(c=case.c.clone(), q=case.q.clone())
    last.c[2], last.q[2] = poison, poison
    o = attend(last, append(last))
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(o[kept], clean[kept])


@pytest.mark.parametrize("table", [ints([6, -1, 5], [1, 7, 0]), ints([6], [1])])
def test_a_position_without_a_page_is_refused(table: torch.Tensor) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
        append(make()._replace(block_table=table))
