"""Where the values of a running plan live: arena, mailboxes and states of every simulated rank.

The bytes are those that the plan assigns, and everything that the plan says nobody needs any more
is overwritten at once, so that a wrong plan gives a wrong number or an error, never luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.errors import VerifyError
from k3fuse.ir import Graph, Value, op_named
from k3fuse.ir.interpreter import Environment, Ranks
from k3fuse.ir.state import state_roots
from k3fuse.runtime.plan import Buffer, Mailbox, Plan
from k3fuse.runtime.states import ShardedState
from k3fuse.tensor_type import DType, parse_type

WIDEN = 2
"""Bytes here for each byte of the plan: unrounded f32 terms are kept in float64 (Op.wide)."""

POISON = 0xFF
"""Byte of dead storage: NaN in every float type, -1 in every integer type."""


class ValueStorage(Environment):
    """Weights by name, states in their storages; other values as they come, in float64."""

    exact = True

    def __init__(self, graph: Graph, weights: Mapping[str, Ranks], states: ShardedState) -> None:
        super().__init__()
        self._weights = weights
        self._roots = {id_: root.binding for id_, root in state_roots(graph).items()}
        self._states = states
        self._inputs: dict[int, Ranks] = {}

    def begin_step(self, inputs: Mapping[int, Ranks]) -> None:
        """Set the step inputs by the id of their value."""
        self._inputs = dict(inputs)

    def end_launch(self, position: int) -> None:
        """Called after all leaves of the launch at `position`."""

    def end_step(self) -> None:
        self._values.clear()

    def read(self, value: Value) -> Ranks:
        """What each rank holds; VerifyError when nothing has stored it where it could be found."""
        if (root := self._roots.get(id(value))) is not None:
            return self._states.ranks(root)
        if (given := self._inputs.get(id(value))) is not None:
            return given
        if id(value) in self._values:
            return self._values[id(value)]
        if value.name in self._weights:
            return self._weights[value.name]
        raise VerifyError(f"%{value.name} has no storage that outlives the launch that made it")

    def write(self, value: Value, ranks: Ranks) -> None:
        """A new version of a state overwrites the old one."""
        if (root := self._roots.get(id(value))) is not None:
            _copy(self._states.ranks(root), ranks)
        else:
            super().write(value, ranks)


class PlannedStorage(ValueStorage):
    """Values between launches lie in the plan's arena and mailboxes, as bytes."""

    exact = False

    def __init__(
        self, graph: Graph, plan: Plan, weights: Mapping[str, Ranks], states: ShardedState
    ) -> None:
        super().__init__(graph, weights, states)
        self._dims, self._tp, self._last = graph.dims, plan.tp, len(plan.launches) - 1
        self._buffers = {buffer.value: buffer for buffer in plan.arena}
        size = WIDEN * max((buffer.offset + buffer.bytes for buffer in plan.arena), default=0)
        self._arena = [torch.full((size,), POISON, dtype=torch.uint8) for _ in range(plan.tp)]
        self._rings = {box.name: _Ring(box, plan.tp) for box in plan.mailboxes}
        self._uses = _mailbox_uses(plan)
        self._first_reads = _first_reads(plan)
        self._step = 0

    def begin_step(self, inputs: Mapping[int, Ranks]) -> None:
        super().begin_step(inputs)
        for arena in self._arena:
            arena.fill_(POISON)

    def end_launch(self, position: int) -> None:
        """Drop what lived inside the launch, re-arm for what it read, poison what is dead now."""
        self._values.clear()
        for name in self._first_reads[position]:
            mailbox, use = self._uses[name]
            self._rings[mailbox].rearm(self._step, use)
        for buffer in self._buffers.values():
            if buffer.last == position != self._last:  # outputs are read after the last launch
                for dead in self._bytes(buffer):
                    dead.fill_(POISON)

    def end_step(self) -> None:
        super().end_step()
        self._step += 1

    def read(self, value: Value) -> Ranks:
        if (buffer := self._buffers.get(value.name)) is not None:
            return [self._typed(held, value) for held in self._bytes(buffer)]
        if value.name in self._uses:
            mailbox, use = self._uses[value.name]
            stage = self._rings[mailbox].stage(self._step, use)
            ranks = [self._typed(held, value) for held in stage]
            for rank, held in enumerate(ranks):
                if bool(_is_sentinel(held).any()):
                    raise VerifyError(f"%{value.name}: words have not arrived at rank {rank}")
            return ranks
        return super().read(value)

    def write(self, value: Value, ranks: Ranks) -> None:
        if (buffer := self._buffers.get(value.name)) is not None:
            _copy([self._typed(held, value) for held in self._bytes(buffer)], ranks)
        elif value.name in self._uses:
            mailbox, use = self._uses[value.name]
            stage = self._rings[mailbox].stage(self._step, use)
            _push(value.name, [self._typed(held, value) for held in stage], ranks)
        else:
            super().write(value, ranks)

    def _bytes(self, buffer: Buffer) -> list[Tensor]:
        first, last = WIDEN * buffer.offset, WIDEN * (buffer.offset + buffer.bytes)
        return [arena[first:last] for arena in self._arena]

    def _typed(self, held: Tensor, value: Value) -> Tensor:
        """The value's place at the start of these bytes."""
        shape = [
            self._dims[d] if isinstance(d, str) else d for d in value.type.local_shape(self._tp)
        ]
        need = math.prod(shape) * value.type.dtype.itemsize
        if WIDEN * need > held.numel():
            have = held.numel() // WIDEN
            raise VerifyError(f"%{value.name} has {have} bytes of storage, needs {need}")
        producer = value.producer
        dtype = _kept(value.type.dtype, wide=producer is not None and op_named(producer.op).wide)
        return held[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@dataclass
class _Ring:
    """One mailbox of every rank."""

    box: Mailbox
    tp: int

    def __post_init__(self) -> None:
        dtype = _kept(parse_type(self.box.type).dtype, wide=op_named(self.box.protocol).wide)
        empty = -0.0 if dtype.is_floating_point else -1
        words = (self.box.stages, WIDEN * self.box.stage_bytes // dtype.itemsize)
        self.empty = torch.full(words[1:], empty, dtype=dtype).view(torch.uint8)
        self.stages = [self.empty.repeat(self.box.stages, 1) for _ in range(self.tp)]

    def stage(self, step: int, use: int) -> list[Tensor]:
        """The bytes that a use of a step works on, on each rank."""
        return [stages[self._index(step, use)] for stages in self.stages]

    def rearm(self, step: int, use: int) -> None:
        for stage in self.stage(step, use + self.box.rearm):
            stage.copy_(self.empty)

    def _index(self, step: int, use: int) -> int:
        return (step * self.box.uses + use) % self.box.stages


def _kept(dtype: DType, *, wide: bool) -> torch.dtype:
    """The dtype that storage holds a value in."""
    return torch.float64 if wide and dtype == DType.F32 else dtype.to_torch()


def _mailbox_uses(plan: Plan) -> dict[str, tuple[str, int]]:
    """Value that a push makes -> its mailbox, and which of the mailbox's uses in a step it is."""
    uses: dict[str, tuple[str, int]] = {}
    counts = {box.name: 0 for box in plan.mailboxes}
    for launch in plan.launches:
        for operand in launch.operands:
            if operand.access == "mailbox" and operand.mode == "write":
                uses[operand.value] = (operand.storage, counts[operand.storage])
                counts[operand.storage] += 1
    for box in plan.mailboxes:
        if counts[box.name] != box.uses:
            raise VerifyError(
                f"mailbox {box.name}: {box.uses} uses planned, {counts[box.name]} made"
            )
    return uses


def _first_reads(plan: Plan) -> list[list[str]]:
    """By launch, the mailbox values that it is the first to read: it re-arms for them."""
    seen: set[str] = set()
    reads: list[list[str]] = []
    for launch in plan.launches:
        read = [o.value for o in launch.operands if o.access == "mailbox" and o.mode == "read"]
        reads.append([value for value in read if value not in seen])
        seen.update(read)
    return reads


def _push(name: str, places: list[Tensor], ranks: Ranks) -> None:
    """What the peers write. -0.0 means empty, so it travels as +0.0."""
    for rank, (place, sent) in enumerate(zip(places, ranks, strict=True)):
        if not bool(_is_sentinel(place).all()):
            raise VerifyError(f"%{name}: its mailbox stage on rank {rank} was not re-armed")
        place.copy_(sent + 0.0 if sent.is_floating_point() else sent)
        if bool(_is_sentinel(place).any()):
            raise VerifyError(f"%{name}: a word for rank {rank} looks like an empty one")


def _is_sentinel(words: Tensor) -> Tensor:
    if words.is_floating_point():
        return (words == 0) & torch.signbit(words)
    return words == -1


def _copy(places: Ranks, ranks: Ranks) -> None:
    for place, tensor in zip(places, ranks, strict=True):
        place.copy_(tensor)
