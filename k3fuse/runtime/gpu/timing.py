"""How long steps take on this GPU, whether they may be timed, and how fast it reads and copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from k3fuse.errors import InputError, RefusedError
from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.gpu.engine import Engine
from k3fuse.runtime.gpu.ranks import Loopback

PROBE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class StepTime:
    """Times of one bucket in us. median, best and worst of `replays`, each a step of its own."""

    bucket: Bucket
    median_us: float
    best_us: float
    worst_us: float
    replays: int


def bandwidths(device: torch.device) -> tuple[float, float]:
    """Bytes/s of a plain read (a sum) and of a copy (read and written bytes together)."""
    size = min(PROBE_BYTES, torch.cuda.mem_get_info(device)[0] // 3)
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = _median(lambda: source.sum(), 10)
    copy = _median(lambda: target.copy_(source), 10)
    held = source.numel() * 4
    return held / read * 1e6, 2 * held / copy * 1e6


def step_inputs(engine: Engine, bucket: Bucket, context: int) -> dict[str, Tensor]:
    """Random tokens for a full batch of requests that have `context` tokens each.

    A rank in loopback holds a part of the embedding table and nobody adds the rest: its tokens are
    drawn from that part, or the rows of a step would be equal and choose the same experts.
    """
    capacity, requests = engine.capacity, bucket.batch
    generator = torch.Generator().manual_seed(1)
    if not 0 <= context <= capacity.table * capacity.page_size - bucket.rows_per_request:
        raise InputError(
            f"--context {context}: a request has {capacity.table * capacity.page_size} positions "
            "(compile with a larger --max-context)"
        )
    first, last = 0, engine.vocab_size
    if isinstance(engine.mode, Loopback):
        share = engine.vocab_size // engine.mode.tp
        first, last = engine.mode.rank * share, (engine.mode.rank + 1) * share
    pages = torch.arange(requests * capacity.table, dtype=torch.int32)
    return {
        "tokens": torch.randint(
            first, last, (requests * bucket.rows_per_request,), generator=generator
        ),
        "lengths": torch.full((requests,), context, dtype=torch.int32),
        "block_table": pages.view(requests, capacity.table),
        "slots": torch.arange(requests, dtype=torch.int32),
    }


def check_graph(engine: Engine, bucket: Bucket, inputs: dict[str, Tensor]) -> None:
    """RefusedError unless the graph gives the bits of single launches, and finite logits."""
    seen: list[Tensor] = []
    for eager in (True, False):
        engine.reset(range(engine.capacity.slots))
        engine.run(bucket, inputs, eager=eager)
        engine.wait()
        seen.append(engine.outputs(bucket)["logits"].clone())
    if not bool(torch.isfinite(seen[0]).all()):
        raise RefusedError(f"{bucket}: logits are not finite: nothing is timed")
    if not torch.equal(seen[0].view(torch.int32), seen[1].view(torch.int32)):
        raise RefusedError(f"{bucket}: the graph gives other bits than its launches: not timed")


def time_step(
    engine: Engine, bucket: Bucket, inputs: dict[str, Tensor], replays: int, warm: int = 10
) -> StepTime:
    """Replay a bucket with these inputs; the time of each replay is taken by itself, from the copy
    of the inputs to the end of the last launch."""
    for _ in range(warm):
        engine.run(bucket, inputs)
    engine.wait()
    times = _times(lambda: engine.run(bucket, inputs), replays)
    engine.wait()
    return StepTime(bucket, statistics.median(times), min(times), max(times), replays)


def _median(work: Callable[[], object], repeats: int) -> float:
    work()
    return statistics.median(_times(work, repeats))


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """us of each call on the GPU, all put behind one another."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
