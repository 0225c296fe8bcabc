"""Memory of emulated kernels: that of this process, in regions, and shared memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.ptx_arithmetic import DTYPES


class Fault(Exception):  # noqa: N818 (what a kernel did)
    """The kernel did something that it must not do; the message names the instruction."""


class Region(NamedTuple):
    """Memory of the process that a kernel may access."""

    name: str
    start: int
    size: int


class Bytes:
    """Memory as words of 1, 2, 4 and 8 bytes, by their index from a common start."""

    def __init__(self, raw: Any) -> None:
        self.words = {size: raw.view(DTYPES[f"b{8 * size}"]) for size in (1, 2, 4, 8)}


class GlobalMemory(Bytes):
    """Regions of the memory of this process; nothing else may be touched."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted(set(regions), key=lambda r: r.start)
        self.starts = [r.start for r in self.regions]
        self.ends = np.array([r.start + r.size for r in self.regions])
        self.low = self.starts[0] & -16
        span = (int(self.ends.max()) - self.low + 15) & -16
        super().__init__(np.frombuffer((ctypes.c_uint8 * span).from_address(self.low), np.uint8))

    def place(self, address: Any, size: int) -> Any:
        """Offsets from the start of `size` bytes at each address."""
        first = bisect_right(self.starts, int(address.min())) - 1
        if first < 0 or int(address.max()) + size > self.ends[first]:
            region = np.searchsorted(self.starts, address, "right") - 1
            wrong = (region < 0) | (address + size > self.ends[region])
            if wrong.any():
                at, near = int(address[wrong][0]), self.regions[max(0, int(region[wrong][0]))]
                raise Fault(f"out of bounds: {near.name} + {at - near.start} of {near.size}")
        return address - self.low
