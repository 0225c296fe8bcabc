"""The stock forward as an executor: what every other one is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3fuse.models.kimi import DecodeState, KimiModel, Mode, StepInputs
from k3fuse.runtime.executor import Capacity, StepResult


class StockExecutor:
    """Runs `model` as it stands, unsharded, on a state of `capacity`.

    `state` is the current state; it may be read and replaced between calls.
    """

    def __init__(
        self, model: KimiModel, capacity: Capacity, state: DecodeState | None = None
    ) -> None:
        self.model, self._capacity = model, capacity
        if state is None:
            state = model.new_state(
                capacity.slots, capacity.pages, capacity.page_size, capacity.rows
            )
        self.state = state

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def prefill(self, inputs: StepInputs, rows_per_request: int) -> StepResult:
        """As `Executor.prefill`: a step like any other."""
        return self.step(inputs, rows_per_request, "commit")

    @torch.no_grad()
    def step(self, inputs: StepInputs, rows_per_request: int, mode: Mode) -> StepResult:
        """As `Executor.step`, for any batch and any number of rows."""
        out = self.model(inputs, self.state, rows_per_request=rows_per_request, mode=mode)
        self.state = out.state
        return StepResult(out.logits, out.tokens, out.hidden)

    @torch.no_grad()
    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """As `Executor.commit`."""
        self.state = self.model.commit(self.state, slots, accepted)

    def reset(self, slots: Sequence[int]) -> None:
        """As `Executor.reset`."""
        self.state = self.model.reset(self.state, torch.tensor(slots, dtype=torch.int32))
