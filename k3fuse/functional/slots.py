"""Reading and writing the rows of a state that belong to live requests."""

from __future__ import annotations

import torch


def live_requests(slots: torch.Tensor) -> torch.Tensor:
    """Which requests are real: slots [R] int32 -> [R] bool, false for padding (slot -1)."""
    return slots >= 0


def read_slots(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """state [slots, ...] -> [R, ...]; what a padding request reads has no meaning."""
    return state[slots.clamp(min=0).long()]


def write_slots(state: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of `state` with `values` [R, ...] in the slots of live requests.

    Padding writes go to a spare row that is cut off again: a fixed shape, no index below 0.
    """
    count = state.shape[0]
    index = torch.where(slots < 0, count, slots).long()
    with_spare = torch.cat([state, state[:1]])
    with_spare[index] = values.to(state.dtype)
    return with_spare[:count]
