"""What every executor offers to generation: stock torch, simulated ranks, a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from k3fuse.models.kimi import Mode, StepInputs
from k3fuse.options import CompileOptions


@dataclass(frozen=True)
class Capacity:
    """Sizes of the state that requests share.

    slots: requests at once; pages of page_size positions in each MLA cache; table: pages of one
    request; rows: rows of one verify that the journals hold.
    """

    slots: int
    pages: int
    page_size: int
    table: int
    rows: int = 1

    @classmethod
    def of(cls, options: CompileOptions) -> Capacity:
        """The state that a bundle compiled with these options is made for."""
        return cls(
            slots=options.slots,
            pages=options.pages,
            page_size=options.page_size,
            table=options.max_pages,
            rows=max(1, options.verify_rows),
        )


class StepResult(NamedTuple):
    """What the M rows of a step give."""

    logits: Tensor  # [M, V] float32
    tokens: Tensor  # [M] int64, greedy
    hidden: Tensor  # [M, hidden], the rows that enter the LM head


class Executor(Protocol):
    """A model with the state of its requests. Every method runs on all of them together."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def capacity(self) -> Capacity: ...

    def prefill(self, inputs: StepInputs, rows_per_request: int) -> StepResult:
        """Run a chunk of prompt rows of each request and commit them; any number of rows."""
        ...

    def step(self, inputs: StepInputs, rows_per_request: int, mode: Mode) -> StepResult:
        """Run the rows of a decode step (mode commit) or of drafts (mode verify)."""
        ...

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """Advance the states by the first accepted[r] rows of the last verify; both [R] int32."""
        ...

    def reset(self, slots: Sequence[int]) -> None:
        """Empty the states of these slots, before new requests enter them."""
        ...
