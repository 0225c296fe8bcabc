"""The memory of one rank on its device, and the address of every argument in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3fuse.runtime.gpu.layout import BucketLayout, MemoryLayout, Place, RingPlace
from k3fuse.runtime.gpu.ranks import RankMode
from k3fuse.runtime.selection import CONTROL_BYTES, Argument, LaunchKernel
from k3fuse.tensor_type import DType

ERROR_BYTES = 256
"""The record that a debug build writes when it gives up waiting."""

_EMPTY = {DType.F32: (torch.int32, -(2**31)), DType.BF16: (torch.int16, -(2**15))}
"""-0.0 as a word, by dtype: what an empty mailbox of floats holds. One of integers holds -1."""


class RankMemory:
    """Everything that the launches of one rank read and write.

    Weights and states are uninitialised until they are loaded; mailboxes are armed, counters zero.
    `device` may be the CPU, where nothing can be launched but all places can be filled and read.
    """

    def __init__(
        self, layout: MemoryLayout, rank: int, rings: Tensor, mode: RankMode, device: torch.device
    ) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self._weights = _bytes(layout.weight_bytes, device)
        self._states = _bytes(layout.state_bytes, device)
        self._arena = _bytes(layout.arena_bytes, device)
        self._scratch = {name: _bytes(size, device) for name, size in layout.scratch.items()}
        self._rings = rings
        self._errors = torch.zeros(ERROR_BYTES, dtype=torch.uint8, device=device)
        self.weights = {name: _typed(self._weights, p) for name, p in layout.weights.items()}
        self.states = {name: _typed(self._states, p) for name, p in layout.states.items()}
        self.buckets = {
            bucket: BucketMemory(self, found, mode) for bucket, found in layout.buckets.items()
        }

    def arm(self) -> None:
        """Empty all mailboxes. No rank may have started a step, and none may start one before all
        have come back from here."""
        for bucket in self.layout.buckets.values():
            for ring in bucket.rings.values():
                _arm(self._rings, ring)

    @property
    def errors(self) -> Tensor:
        """The error record, [ERROR_BYTES] uint8: zeros, or what a launch gave up on."""
        return self._errors

    def address(self, name: str, offset: int) -> int:
        """Of a weight or a state by name, else of `offset` in the arena."""
        for held in (self.weights, self.states):
            if name in held:
                return held[name].data_ptr()
        return self._arena.data_ptr() + offset

    def scratch(self, stream: str) -> int:
        return self._scratch[stream].data_ptr() if stream in self._scratch else 0

    def ring(self, ring: RingPlace) -> int:
        return self._rings.data_ptr() + ring.offset

    def in_arena(self, place: Place) -> Tensor:
        return _typed(self._arena, place)


class BucketMemory:
    """What is one bucket's own on one rank: step inputs, counters of grid barriers, peer tables."""

    def __init__(self, memory: RankMemory, layout: BucketLayout, mode: RankMode) -> None:
        self._memory, self.layout = memory, layout
        device = memory.device
        self.input_bytes = torch.zeros(layout.input_bytes, dtype=torch.uint8, device=device)
        self.inputs = {name: _typed(self.input_bytes, p) for name, p in layout.inputs.items()}
        words = layout.selection.memory.control_words
        self._control = torch.zeros(words * CONTROL_BYTES, dtype=torch.uint8, device=device)
        self._tables = {
            name: torch.tensor(mode.peers(memory.rank, ring), dtype=torch.int64, device=device)
            for name, ring in layout.rings.items()
        }
        self.outputs = {name: memory.in_arena(p) for name, p in layout.outputs.items()}

    def arguments(self, item: LaunchKernel, stream: str) -> Mapping[str, int]:
        """The value of each parameter of a launch's kernel."""
        return {a.parameter: self._argument(a, item, stream) for a in item.arguments}

    def _argument(self, argument: Argument, item: LaunchKernel, stream: str) -> int:
        memory = self._memory
        match argument.role:
            case "memory" if argument.storage in self.inputs:
                return self.inputs[argument.storage].data_ptr()
            case "memory":
                return memory.address(argument.storage, argument.offset)
            case "mailbox":
                return memory.ring(self.layout.rings[argument.storage])
            case "peers":
                return self._tables[argument.storage].data_ptr()
            case "scratch":
                return memory.scratch(stream)
            case "control":
                return self._control.data_ptr() + CONTROL_BYTES * item.control
            case "step":
                return self.inputs["step"].data_ptr()
            case "errors":
                return memory.errors.data_ptr()
            case "rank":
                return memory.rank
            case "use" | "launch":
                return argument.use


def allocate(layout: MemoryLayout, mode: RankMode, device: torch.device) -> dict[int, RankMemory]:
    """The memory of each rank of this process, mailboxes armed."""
    rings = mode.allocate_rings(max(layout.ring_bytes, 1), device)
    found = {
        rank: RankMemory(layout, rank, ring, mode, device)
        for rank, ring in zip(mode.mine, rings, strict=True)
    }
    for memory in found.values():
        memory.arm()
    return found


def _arm(rings: Tensor, ring: RingPlace) -> None:
    part = rings[ring.offset : ring.offset + ring.bytes]
    if ring.mailbox.sentinel == "negative_zero":
        word, value = _EMPTY[ring.dtype]
        part.view(word).fill_(value)
    else:
        part.fill_(0xFF)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _typed(held: Tensor, place: Place) -> Tensor:
    part = held[place.offset : place.offset + place.bytes]
    return part.view(place.dtype.to_torch()).view(place.shape)
