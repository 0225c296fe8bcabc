"""Which slot and which cache pages each live request has, and the inputs of a step from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3fuse.errors import InputError
from k3fuse.models.kimi import StepInputs
from k3fuse.runtime.executor import Capacity


@dataclass(eq=False)
class Lease:
    """What one live request holds. `length` counts the tokens that its state already has."""

    slot: int
    pages: tuple[int, ...]
    length: int = 0


class SlotManager:
    """Gives slots and pages to requests and takes them back.

    A request gets the pages of its longest possible length when it joins, so that it never runs
    out on the way. The lowest free slot and pages are given first: the same requests always get
    the same ones.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._live: list[Lease] = []

    @property
    def live(self) -> tuple[Lease, ...]:
        """The leases in use, in order of joining."""
        return tuple(self._live)

    def check_length(self, tokens: int, what: str = "a request") -> None:
        """InputError when `tokens` positions would not fit even with no other request around."""
        capacity = self.capacity
        most = min(capacity.table, capacity.pages) * capacity.page_size
        if tokens > most:
            raise InputError(
                f"{what} needs {tokens} cache positions and a request can have {most}: raise "
                "--max-context or ask for fewer tokens"
            )

    def has_room(self, tokens: int) -> bool:
        """Whether a request of up to `tokens` positions can join now."""
        return bool(self._free_slots()) and self._pages(tokens) <= len(self._free_pages())

    def join(self, tokens: int) -> Lease:
        """A free slot and pages for `tokens` positions, length 0.

        The caller resets the slot's states before its first step. InputError when slots or pages
        run out, naming the option that raises them.
        """
        self.check_length(tokens)
        slots, pages, count = self._free_slots(), self._free_pages(), self._pages(tokens)
        if not slots:
            raise InputError(
                f"all {self.capacity.slots} slots are in use: compile with a larger --batch or let "
                "a request leave first"
            )
        if count > len(pages):
            raise InputError(
                f"a request of {tokens} positions needs {count} cache pages and {len(pages)} of "
                f"{self.capacity.pages} are free: raise --max-context or let a request leave first"
            )
        lease = Lease(slots[0], tuple(pages[:count]))
        self._live.append(lease)
        return lease

    def leave(self, lease: Lease) -> None:
        """Take the slot and the pages back; what they hold stays there as garbage."""
        self._live.remove(lease)

    def inputs(
        self, leases: Sequence[Lease], rows: Sequence[Sequence[int]], bucket: int
    ) -> StepInputs:
        """The step of `bucket` requests: one list of tokens, equally long, for each lease.

        The rest is padding: slot -1, length 0, tokens 0, no pages (-1). So is the unused end of a
        block table. InputError when rows reach past the pages of their request.
        """
        count = len(rows[0])
        padding = bucket - len(leases)
        table = torch.full((bucket, self.capacity.table), -1, dtype=torch.int32)
        for line, lease in zip(table, leases, strict=False):
            if lease.length + count > len(lease.pages) * self.capacity.page_size:
                raise InputError(
                    f"slot {lease.slot} has {len(lease.pages)} pages, {count} rows after "
                    f"{lease.length} tokens need more: join with a larger length"
                )
            line[: len(lease.pages)] = torch.tensor(lease.pages, dtype=torch.int32)
        tokens = [token for row in rows for token in row] + [0] * (padding * count)
        return StepInputs(
            torch.tensor(tokens, dtype=torch.int64),
            _ints([lease.length for lease in leases] + [0] * padding),
            table,
            _ints([lease.slot for lease in leases] + [-1] * padding),
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.capacity.page_size)

    def _free_slots(self) -> list[int]:
        used = {lease.slot for lease in self._live}
        return [slot for slot in range(self.capacity.slots) if slot not in used]

    def _free_pages(self) -> list[int]:
        used = {page for lease in self._live for page in lease.pages}
        return [page for page in range(self.capacity.pages) if page not in used]


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
