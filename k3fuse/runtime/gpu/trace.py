"""When each launch of a step ran, from the GPU's own clock (CUPTI, through torch.profiler)."""

from __future__ import annotations

import importlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k3fuse.errors import InputError, K3FuseError
from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.gpu.engine import Engine


@dataclass(frozen=True)
class LaunchTime:
    """One launch in one replay. start_us: since the first launch of the step began."""

    launch: str
    stream: str
    kernel: str
    start_us: float
    duration_us: float
    predicted_us: float


def trace_step(engine: Engine, bucket: Bucket, inputs: Mapping[str, Tensor]) -> list[LaunchTime]:
    """Times of every launch in the second of two replays, by start. One rank a process.

    Raises InputError for several ranks on one GPU, whose kernels have the same names, and
    K3FuseError where the profiler sees no kernels.
    """
    if len(engine.mode.mine) > 1:
        raise InputError(
            f"launches are not told apart by rank ({engine.mode.label}): trace one rank"
        )
    engine.run(bucket, inputs)
    engine.wait()
    profiler = importlib.import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            engine.run(bucket, inputs)
        engine.wait()
    events = [
        (event.time_range.start, event.time_range.elapsed_us(), str(event.name))
        for event in found.events()
        if str(event.device_type).endswith("CUDA")
    ]
    return match(engine, bucket, sorted(events))


def match(
    engine: Engine, bucket: Bucket, events: Sequence[tuple[float, float, str]]
) -> list[LaunchTime]:
    """Give the kernels seen, (start us, duration us, symbol) by start, to the launches: launches of
    one symbol run in the plan's order."""
    layout = engine.layout.buckets[bucket]
    records = engine.records
    expected: dict[str, deque[int]] = defaultdict(deque)
    for position, item in enumerate(layout.selection.launches):
        expected[records[item.kernel].symbol].append(position)
    steps = 2
    by_symbol: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for start, duration, symbol in events:
        if symbol in expected:
            by_symbol[symbol].append((start, duration))
    times: list[tuple[float, float, int]] = []
    for symbol, positions in expected.items():
        seen = by_symbol[symbol]
        if len(seen) != steps * len(positions):
            raise K3FuseError(
                f"the profiler saw {len(seen)} launches of {symbol}, {steps * len(positions)} were "
                "made: CUPTI may be missing or in use by another tool"
            )
        times += [(*t, p) for t, p in zip(seen[-len(positions) :], positions, strict=True)]
    times.sort()
    first = times[0][0]
    found: list[LaunchTime] = []
    for start, duration, position in times:
        launch, item = layout.plan.launches[position], layout.selection.launches[position]
        found.append(
            LaunchTime(
                launch.name,
                launch.stream,
                item.kernel,
                start - first,
                duration,
                launch.predicted_us,
            )
        )
    return found


def perfetto(times: Sequence[LaunchTime]) -> dict[str, Any]:
    """Trace events for ui.perfetto.dev: a track a stream."""
    tracks = {"main": 1, "aux": 2, "prefetch": 3}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for name, tid in tracks.items()
    ]
    events += [
        {
            "ph": "X",
            "pid": 1,
            "tid": tracks[time.stream],
            "name": time.launch,
            "ts": time.start_us,
            "dur": time.duration_us,
            "args": {"kernel": time.kernel, "predicted us": time.predicted_us},
        }
        for time in times
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}
