from __future__ import annotations

import pytest
import torch

from k3fuse.errors import InputError
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.slots import SlotManager

CAPACITY = Capacity(slots=3, pages=6, page_size=4, table=4)


def test_no_page_or_slot_has_two_live_owners() -> None:
    manager = SlotManager(CAPACITY)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens = int(torch.randint(1, 17, (), generator=generator))
        if manager.has_room(tokens):
            lease = manager.join(tokens)
            assert len(lease.pages) * 4 >= tokens
        elif manager.live:
            manager.leave(manager.live[tokens % len(manager.live)])
        pages = [page for lease in manager.live for page in lease.pages]
        slots = [lease.slot for lease in manager.live]
        assert len(set(pages)) == len(pages)
        assert len(set(slots)) == len(slots)


def test_what_a_request_leaves_the_next_one_gets() -> None:
    manager = SlotManager(CAPACITY)
    first, second = manager.join(9), manager.join(4)
    assert (first.slot, first.pages, second.slot, second.pages) == (0, (0, 1, 2), 1, (3,))
    manager.leave(first)
    third = manager.join(16)
    assert (third.slot, third.pages, third.length) == (0, (0, 1, 2, 4), 0)


def test_running_out_names_the_option() -> None:
    manager = SlotManager(CAPACITY)
    for _ in range(3):
        manager.join(4)
    assert not manager.has_room(1)
    with pytest.raises(InputError, match=r"all 3 slots are in use.*--batch"):
        manager.join(4)
    manager = SlotManager(CAPACITY)
    manager.join(16)
    assert not manager.has_room(12)
    with pytest.raises(InputError, match="3 cache pages and 2 of 6 are free: raise --max-context"):
        manager.join(12)
    with pytest.raises(InputError, match=r"needs 17 cache positions.*16: raise --max-context"):
        manager.join(17)


def test_inputs_pad_the_bucket() -> None:
    manager = SlotManager(CAPACITY)
    a, b = manager.join(4), manager.join(8)
    manager.leave(a)
    b.length = 5
    inputs = manager.inputs([b], [[7, 8]], 3)
    expected = [[7, 8, 0, 0, 0, 0], [5, 0, 0], [[1, 2, -1, -1], [-1] * 4, [-1] * 4], [1, -1, -1]]
    for tensor, values in zip(inputs, expected, strict=True):
        assert torch.equal(tensor, torch.tensor(values, dtype=tensor.dtype))
    assert [t.dtype for t in inputs] == [torch.int64, torch.int32, torch.int32, torch.int32]


def test_rows_past_the_pages_are_refused() -> None:
    manager = SlotManager(CAPACITY)
    lease = manager.join(4)
    lease.length = 3
    with pytest.raises(InputError, match="slot 0 has 1 pages, 2 rows after 3 tokens need more"):
        manager.inputs([lease], [[1, 2]], 1)
