"""Memory of one launch: every value between guards, and the mailboxes of all ranks as buffers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3fuse.ir.ops.collective import PUSHES
from k3fuse.kernels.program import Held, Program, Ring, Step
from k3fuse.tensor_type import DType

GUARD = 1024  # bytes on each side that must keep their pattern
PATTERN = 0xA5
POISON = 0xFF  # NaN in every float type
SENTINEL = {"f32": (torch.int32, -(2**31)), "bf16": (torch.int16, -(2**15))}
"""Word of an empty mailbox by dtype, -0.0; for integers it is -1."""


class Region:
    """`size` bytes on the device between two guards."""

    def __init__(self, size: int, device: str, fill: int = POISON) -> None:
        total = GUARD + -(-size // 8) * 8 + GUARD
        self.size = size
        self.raw = torch.full((total,), PATTERN, dtype=torch.uint8, device=device)
        self.bytes = self.raw[GUARD : GUARD + size]
        self.bytes.fill_(fill)
        self.address = self.raw.data_ptr() + GUARD

    def view(self, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Tensor:
        """Bytes from `offset` on as a tensor."""
        torch_dtype = DType(dtype).to_torch()
        size = math.prod(shape) * torch_dtype.itemsize
        return self.bytes[offset : offset + size].view(torch_dtype).view(shape)

    def intact(self) -> bool:
        """Whether both guards hold their pattern."""
        outside = (self.raw[:GUARD], self.raw[GUARD + self.size :])
        return all(bool((part == PATTERN).all()) for part in outside)

    def checksum(self) -> tuple[int, int]:
        """Equal for equal bytes, guards too."""
        words = self.raw.view(torch.int64)
        return int(words.sum()), int((words ^ (words >> 23)).sum())


def holding(tensor: Tensor, device: str) -> Region:
    """A region with the bytes of a tensor."""
    held = tensor.contiguous().flatten().view(torch.uint8)
    region = Region(held.numel(), device)
    region.bytes.copy_(held)
    return region


def sentinel_fill(part: Tensor, dtype: str) -> None:
    """Make bytes of a ring look empty."""
    word, value = SENTINEL.get(dtype, (torch.int32, -1))
    part.view(word).fill_(value)


def looks_empty(payload: Tensor, dtype: str) -> bool:
    """Whether an element of a payload is the sentinel: it would never arrive."""
    word, value = SENTINEL.get(dtype, (payload.dtype, -1))
    return bool((payload.contiguous().view(word) == value).any())


@dataclass(frozen=True)
class Place:
    """Where in time and among the ranks a launch runs."""

    step: int
    rank: int
    uses: Mapping[int, int]  # of each value in a ring

    def stage(self, value: int, ring: Ring, ahead: int = 0) -> int:
        """Offset in bytes of the stage that this step uses, or one `ahead` of it."""
        use = self.step * ring.uses + self.uses[value] + ahead
        return use % ring.stages * ring.stage_bytes


def place_of(program: Program, source: random.Random) -> Place:
    """A random step, rank and use. Values of one ring have different uses."""
    used: dict[int, list[int]] = {}
    uses: dict[int, int] = {}
    for value, ring in rings_of(program).items():
        taken = used.setdefault(ring.channel, [])
        uses[value] = source.choice([u for u in range(ring.uses) if u not in taken])
        taken.append(uses[value])
    return Place(source.randrange(1, 5000), source.randrange(program.tp), uses)


def rings_of(program: Program) -> dict[int, Ring]:
    """Value -> its ring."""
    return {i: v.ring for i, v in enumerate(program.values) if v.ring is not None}


def pushes_of(program: Program) -> list[Step]:
    """The steps that send to peers."""
    return [step for step in program.steps if step.op in PUSHES]


class Memory:
    """All that one launch reads and writes, and its arguments.

    Written values start as NaN, scratch too. Own rings hold what peers have sent in the stage of
    this step, and a pattern elsewhere; peers' rings are empty. `shared`, `peer_rings`: regions
    taken from another memory, by parameter and by channel.
    """

    def __init__(
        self,
        program: Program,
        facts: Mapping[str, Any],
        inputs: Mapping[int, Tensor],
        place: Place,
        device: str,
        shared: Mapping[str, Region] | None = None,
        peer_rings: Mapping[int, list[Region]] | None = None,
    ) -> None:
        self.program, self.place, self.device = program, place, device
        self.inputs: dict[str, Region] = {}
        self.states: dict[str, Region] = {}
        self.outputs: dict[str, Region] = {}
        self.own_rings: dict[int, Region] = {}  # by channel
        self.peer_rings: dict[int, list[Region]] = dict(peer_rings or {})
        self.others: dict[str, Region] = {}
        self.arguments: dict[str, int] = {}
        self._shared = shared or {}
        for parameter in facts["params"]:
            self.arguments[parameter["name"]] = self._argument(parameter["name"], facts, inputs)

    def _argument(self, name: str, facts: Mapping[str, Any], inputs: Mapping[int, Tensor]) -> int:
        if name == "rank":
            return self.place.rank
        if name.startswith("use"):
            return self.place.uses[int(name[3:])]
        if name == "launch":
            return 0
        if name in self._shared:
            self.others[name] = self._shared[name]
            return self._shared[name].address
        if name in ("scratch", "control", "errors", "step"):
            size = {"scratch": facts["scratch"], "step": 8}.get(name, 256)
            region = Region(size, self.device, POISON if name == "scratch" else 0)
            if name == "step":
                region.view("i64", (1,)).fill_(self.place.step)
            self.others[name] = region
            return region.address
        value = int(name[1:])
        held = self.program.values[value]
        if value in inputs and inputs[value].nbytes != held.bytes:
            raise ValueError(f"{name} is {held.dtype} {held.shape}, not {inputs[value].shape}")
        if held.place == "mailbox":
            return self._own_ring(value, held, inputs[value])
        if held.place == "pushed":
            return self._peer_table(name, held)
        if held.place == "state":
            self.states[name] = holding(inputs[value], self.device)
            return self.states[name].address
        if value in inputs:
            self.inputs[name] = holding(inputs[value], self.device)
            return self.inputs[name].address
        self.outputs[name] = Region(held.bytes, self.device)
        return self.outputs[name].address

    def _own_ring(self, value: int, held: Held, sent: Tensor) -> int:
        ring = held.ring
        assert ring is not None
        if ring.channel not in self.own_rings:
            size = ring.stages * ring.stage_bytes
            self.own_rings[ring.channel] = Region(size, self.device, PATTERN)
        region = self.own_rings[ring.channel]
        region.view(held.dtype, held.shape, self.place.stage(value, ring)).copy_(sent)
        return region.address

    def _peer_table(self, name: str, held: Held) -> int:
        ring = held.ring
        assert ring is not None
        if ring.channel not in self.peer_rings:
            size = ring.stages * ring.stage_bytes
            rings = [Region(size, self.device) for _ in range(self.program.tp)]
            for region in rings:
                sentinel_fill(region.bytes, held.dtype)
            self.peer_rings[ring.channel] = rings
        table = Region(8 * self.program.tp, self.device)
        addresses = [region.address for region in self.peer_rings[ring.channel]]
        table.view("i64", (self.program.tp,)).copy_(torch.tensor(addresses))
        self.inputs[name] = table
        return table.address

    def changing(self) -> dict[str, Region]:
        """Regions that a launch may write, but for scratch and the barrier's counter."""
        found = {**self.states, **self.outputs}
        found |= {f"own ring {c}": region for c, region in self.own_rings.items()}
        for channel, rings in self.peer_rings.items():
            found |= {f"ring {channel} of peer {p}": region for p, region in enumerate(rings)}
        return found

    def everything(self) -> dict[str, Region]:
        """All regions by name."""
        return {**self.inputs, **self.others, **self.changing()}

    def landed(self, step: Step, peer: int) -> Tensor:
        """What this rank has stored at a peer by a push."""
        ring = self.program.values[step.results[0]].ring
        assert ring is not None
        return self.landed_in(self.peer_rings[ring.channel][peer].bytes, step)

    def landed_in(self, ring_bytes: Tensor, step: Step) -> Tensor:
        """The part of a peer's ring that a push of this rank writes."""
        (value,) = step.results
        held = self.program.values[value]
        assert held.ring is not None
        at = self.place.stage(value, held.ring)
        stage = ring_bytes[at : at + held.bytes].view(DType(held.dtype).to_torch())
        return slot_of(stage.view(held.shape), step, self.place.rank, self.program)


def slot_of(stage: Tensor, step: Step, rank: int, program: Program) -> Tensor:
    """The part of a stage that one rank writes."""
    if step.op != "push_gather":
        return stage[rank]
    width = program.values[step.operands[0]].shape[1]
    return stage[:, rank * width : (rank + 1) * width]


def sent_to(step: Step, payload: Tensor, peer: int, tp: int) -> Tensor:
    """What a peer should get of the operand of a push."""
    return payload.chunk(tp, 1)[peer] if step.op == "push_chunks" else payload


def captured(put: Callable[[int], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `put(stream)` puts on a stream; `torch.cuda.graph` would also empty the
    allocator's cache each time."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            put(stream.cuda_stream)
        finally:
            graph.capture_end()
    return graph
