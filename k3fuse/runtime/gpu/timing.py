"""How long steps take on this GPU, and how fast it reads and copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.gpu.engine import Engine

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
