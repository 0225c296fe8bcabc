"""L2 prefetch: weights that a later launch streams are asked for early; a hint, no results."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

CTAS = 2
"""The launch stands beside the main stream, so it takes as few SMs as keep the memory busy."""

THREADS = 128
GRAIN = 16
"""Bytes that the size of a bulk prefetch is a multiple of."""


@dataclass(frozen=True)
class PrefetchOptions:
    """ranges: value and bytes of it, in order. piece: bytes of one instruction."""

    ranges: tuple[tuple[int, int], ...]
    piece: int = 8 * 1024


def plan_prefetch(program: Program, stage: Stage, target: Target) -> StagePlan:
    """The first `bytes` of the weights in order, in pieces spread over all threads.

    A thread gets a bulk prefetch out only every 100 ns or so: many threads, few pieces each.
    """
    ranges: list[tuple[int, int]] = []
    for i in stage.steps:
        step = program.steps[i]
        left = int(step.attribute("bytes") or 0)
        for value in step.operands:
            held = program.values[value]
            require(held.place == "weight", f"prefetch of a value in {held.place} memory")
            size = min(left, held.bytes)
            left -= size
            if size >= GRAIN:
                ranges.append((value, size // GRAIN * GRAIN))
    require(all(size < 2**31 for _, size in ranges), "counts bytes in 32 bits")
    return StagePlan(items=CTAS, threads=THREADS, options=PrefetchOptions(tuple(ranges)))
