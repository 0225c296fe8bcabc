"""Tokens drawn from logits: temperature, top-k, top-p, from a seeded generator.

Everything has fixed shapes and stays on the logits' device, so that it can follow a step there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse import functional
from k3fuse.errors import InputError
from k3fuse.models.kimi import Mode, StepInputs
from k3fuse.runtime.executor import Capacity, Executor, StepResult


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    temperature: logits are divided by it; 0 is greedy. top_k: only so many of the best tokens (0:
    all). top_p: only the best tokens that together reach this probability. seed: of the generator.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature {self.temperature}: a number from 0 (greedy) on")
        if self.top_k < 0:
            raise InputError(f"--top-k {self.top_k}: how many of the best tokens; 0 for all")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p {self.top_p}: a probability above 0, at most 1")

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0 or self.top_k == 1


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token a row: logits [M, V] float32 -> [M] int64.

    Of equal logits the lower id counts as the better one; NaN is never drawn while anything else
    is left. Top-k applies before top-p, and the best token always stays. Draws by the Gumbel trick.
    """
    if sampling.greedy:
        return functional.argmax(logits)
    real = torch.where(torch.isnan(logits), -torch.inf, logits.double())
    scores, ids = torch.sort(real / sampling.temperature, dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[-1], device=scores.device)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if sampling.top_k:
        keep &= place < sampling.top_k
    if sampling.top_p < 1:
        chances = torch.softmax(torch.where(keep, scores, -torch.inf), -1)
        keep &= (chances.cumsum(-1) - chances < sampling.top_p) | (place == 0)
    uniform = torch.rand(
        scores.shape, generator=generator, device=scores.device, dtype=scores.dtype
    )
    noise = -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
    drawn = torch.where(keep, scores + noise, -torch.inf).argmax(-1, keepdim=True)
    return ids.gather(-1, drawn).squeeze(-1)


class SampledExecutor:
    """An executor whose tokens are drawn instead of chosen greedily; plain steps and prefill only.

    Equal seeds give equal tokens for the same calls in the same order.
    """

    def __init__(self, executor: Executor, sampling: Sampling) -> None:
        self._executor, self._sampling = executor, sampling
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def vocab_size(self) -> int:
        return self._executor.vocab_size

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    def prefill(self, inputs: StepInputs, rows_per_request: int) -> StepResult:
        """As `Executor.prefill`."""
        return self._drawn(self._executor.prefill(inputs, rows_per_request))

    def step(self, inputs: StepInputs, rows_per_request: int, mode: Mode) -> StepResult:
        """As `Executor.step`. InputError for a verify: its drafts are judged by greedy choice."""
        if mode == "verify":
            raise InputError("sampling verifies no drafts: use --rows-per-request 1")
        return self._drawn(self._executor.step(inputs, rows_per_request, mode))

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """As `Executor.commit`."""
        self._executor.commit(slots, accepted)

    def reset(self, slots: Sequence[int]) -> None:
        """As `Executor.reset`."""
        self._executor.reset(slots)

    def _drawn(self, result: StepResult) -> StepResult:
        device = result.logits.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._sampling.seed)
        tokens = sample(result.logits, self._sampling, self._generators[device])
        return result._replace(tokens=tokens)
