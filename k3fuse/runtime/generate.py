"""Greedy generation on any executor: requests join, decode together, and leave one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.runtime.drafts import Draft, prompt_lookup
from k3fuse.runtime.executor import Executor, StepResult
from k3fuse.runtime.slots import Lease, SlotManager

OnStep = Callable[[Mapping[int, list[int]]], None]
"""Called after each step with the new tokens by prompt index."""


@dataclass(frozen=True)
class Generation:
    """What each prompt, in the order given, was continued with.

    tokens: the new ones, a stop token included. logits [n, V] and hidden [n, hidden]: the rows
    that the n new tokens were chosen from. accepted: of each decode step, the rows that counted,
    1 to rows_per_request; the first token comes from the prompt and has no step.
    """

    tokens: list[list[int]]
    logits: list[Tensor]
    hidden: list[Tensor]
    accepted: list[list[int]]

    @property
    def mean_accepted(self) -> float:
        """Tokens a request gains in a decode step; 0 when there was none."""
        steps = [count for counts in self.accepted for count in counts]
        return sum(steps) / len(steps) if steps else 0.0


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    buckets: Sequence[int],
    stop_token: int | None = None,
    rows_per_request: int = 1,
    draft: Draft = prompt_lookup,
    prefill_chunk: int = 64,
    on_step: OnStep | None = None,
) -> Generation:
    """Continue every prompt greedily, by up to `max_new_tokens` or until `stop_token`.

    Prompts join as slots and pages become free, run through `prefill` one by one in chunks, and
    then decode together in the smallest of `buckets` (requests of a step) that holds them; more
    than the largest bucket holds go in groups. With rows_per_request q > 1 each step verifies q - 1
    drafts and commits those that greedy decoding would have chosen, so the tokens are the same.

    Raises InputError, before anything runs, for an empty prompt, a token id outside the
    vocabulary, a request that the cache cannot hold, and for no tokens or buckets to run.
    """
    slots = SlotManager(executor.capacity)
    _check(executor, prompts, max_new_tokens, buckets, rows_per_request)
    # The last token is never fed back; a verify writes up to q - 1 rows past the accepted ones.
    extra = max_new_tokens + rows_per_request - 2
    for index, prompt in enumerate(prompts):
        slots.check_length(len(prompt) + extra, f"prompt {index}")
    run = _Run(executor, slots, sorted(buckets), rows_per_request, draft, on_step)
    requests = [
        _Request(i, list(p), len(p), max_new_tokens, stop_token) for i, p in enumerate(prompts)
    ]
    waiting, live = deque(requests), list[_Request]()
    while waiting or live:
        while waiting and (not live or slots.has_room(len(waiting[0].tokens) + extra)):
            request = waiting.popleft()
            request.lease = slots.join(len(request.tokens) + extra)
            run.prefill(request, prefill_chunk)
            live = run.still_live([*live, request])
        for start in range(0, len(live), run.largest):
            run.step(live[start : start + run.largest])
        live = run.still_live(live)
    return Generation(
        [r.tokens[r.prompt_length :] for r in requests],
        [torch.stack(r.logits) for r in requests],
        [torch.stack(r.hidden) for r in requests],
        [r.accepted for r in requests],
    )


@dataclass(eq=False)
class _Request:
    index: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    stop_token: int | None
    lease: Lease | None = None
    logits: list[Tensor] = field(default_factory=list[Tensor])
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    accepted: list[int] = field(default_factory=list[int])

    @property
    def finished(self) -> bool:
        new = len(self.tokens) - self.prompt_length
        return new >= self.max_new_tokens or (new > 0 and self.tokens[-1] == self.stop_token)

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    def take(self, result: StepResult, rows: range) -> list[int]:
        """Append the tokens that these rows chose, up to the end of the request."""
        new: list[int] = []
        for row in rows:
            if self.finished:
                break
            self.logits.append(result.logits[row].clone())
            self.hidden.append(result.hidden[row].clone())
            self.tokens.append(int(result.tokens[row]))
            new.append(self.tokens[-1])
        return new


@dataclass
class _Run:
    executor: Executor
    slots: SlotManager
    buckets: list[int]
    rows: int
    draft: Draft
    on_step: OnStep | None

    @property
    def largest(self) -> int:
        return self.buckets[-1]

    def prefill(self, request: _Request, chunk: int) -> None:
        self.executor.reset([request.held.slot])
        chunks = [request.tokens[i : i + chunk] for i in range(0, len(request.tokens), chunk)]
        for rows in chunks[:-1]:
            self._prefill_chunk(request.held, rows)
        result = self._prefill_chunk(request.held, chunks[-1])
        last = len(chunks[-1]) - 1
        self._report({request.index: request.take(result, range(last, last + 1))})

    def _prefill_chunk(self, lease: Lease, rows: list[int]) -> StepResult:
        result = self.executor.prefill(self.slots.inputs([lease], [rows], 1), len(rows))
        lease.length += len(rows)
        return result

    def step(self, group: list[_Request]) -> None:
        bucket = next(size for size in self.buckets if size >= len(group))
        rows = [[r.tokens[-1], *self._drafts(r)] for r in group]
        inputs = self.slots.inputs([r.held for r in group], rows, bucket)
        verify = self.rows > 1
        result = self.executor.step(inputs, self.rows, "verify" if verify else "commit")
        chosen = [int(token) for token in result.tokens]
        counts = [_accepted(row, chosen[i * self.rows :]) for i, row in enumerate(rows)]
        if verify:
            padded = counts + [0] * (bucket - len(group))
            self.executor.commit(inputs.slots, torch.tensor(padded, dtype=torch.int32))
        new: dict[int, list[int]] = {}
        for position, (request, count) in enumerate(zip(group, counts, strict=True)):
            request.held.length += count
            request.accepted.append(count)
            first = position * self.rows
            new[request.index] = request.take(result, range(first, first + count))
        self._report(new)

    def still_live(self, requests: list[_Request]) -> list[_Request]:
        """Those that go on; the others give back what they hold."""
        for request in requests:
            if request.finished:
                self.slots.leave(request.held)
        return [request for request in requests if not request.finished]

    def _drafts(self, request: _Request) -> list[int]:
        count = self.rows - 1
        drafts = self.draft(request.tokens, count) if count else []
        if len(drafts) != count:
            raise ValueError(f"the draft gave {len(drafts)} tokens, {count} were asked for")
        return drafts

    def _report(self, new: dict[int, list[int]]) -> None:
        if self.on_step is not None:
            self.on_step(new)


def _accepted(rows: list[int], chosen: list[int]) -> int:
    """How many leading rows are what greedy decoding feeds: row 0, then drafts it would choose."""
    count = 1
    while count < len(rows) and rows[count] == chosen[count - 1]:
        count += 1
    return count


def _check(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    buckets: Sequence[int],
    rows: int,
) -> None:
    if not prompts:
        raise InputError("there are no prompts: give at least one")
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens}: ask for at least one token")
    if not buckets or min(buckets) < 1:
        raise InputError(f"buckets {list(buckets)}: need at least one batch of 1 or more requests")
    if not 1 <= rows <= max(1, executor.capacity.rows):
        raise InputError(
            f"{rows} rows a request: this state holds 1 to {executor.capacity.rows} (--verify-rows)"
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {index} is empty: give at least one token (for example BOS)")
        for position, token in enumerate(prompt):
            if not 0 <= token < executor.vocab_size:
                raise InputError(
                    f"prompt {index}, position {position}: token id {token} is outside the "
                    f"vocabulary [0, {executor.vocab_size})"
                )
