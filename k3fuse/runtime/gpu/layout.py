"""What one rank allocates for all buckets of a bundle: sizes and places, no GPU, no tensors.

Weights, states, the arena and scratch are shared by all buckets, since no two run at once. Each
bucket has its own mailboxes and counts its own steps: what a step leaves armed is then as the
proof of that bucket has it, whichever bucket ran in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3fuse.errors import InputError
from k3fuse.options import CompileOptions
from k3fuse.runtime.bundle import Bucket, Bundle
from k3fuse.runtime.plan import Mailbox, Plan
from k3fuse.runtime.selection import CONTROL_BYTES, STEP_BYTES, Selection
from k3fuse.tensor_type import DType, TensorType, parse_type

ALIGNMENT = 256
"""Bytes; every part of the memory starts at a multiple."""


@dataclass(frozen=True)
class Place:
    """A tensor of one rank inside a part of its memory. offset, bytes: in that part."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RingPlace:
    """A mailbox of one bucket in the rings' part. slot: bytes that one sender's data is away from
    the next one's, which is how a rank can play its peers (loopback)."""

    offset: int
    mailbox: Mailbox
    dtype: DType
    slot: int

    @property
    def bytes(self) -> int:
        return self.mailbox.stages * self.mailbox.stage_bytes


@dataclass(frozen=True)
class BucketLayout:
    """What is one bucket's own. inputs: places in `input_bytes` bytes by the name that the plan
    gives them, and "step", the step counter. outputs: places in the arena, output_types: global
    types, by name."""

    bucket: Bucket
    plan: Plan
    selection: Selection
    rings: Mapping[str, RingPlace]
    inputs: Mapping[str, Place]
    input_bytes: int
    outputs: Mapping[str, Place]
    output_types: Mapping[str, TensorType]


@dataclass(frozen=True)
class MemoryLayout:
    """Memory of one rank. Weights and states by the names that launches use; slotted: states that
    have a part for each slot."""

    tp: int
    weights: Mapping[str, Place]
    weight_bytes: int
    states: Mapping[str, Place]
    slotted: tuple[str, ...]
    state_bytes: int
    arena_bytes: int
    ring_bytes: int
    scratch: Mapping[str, int]
    buckets: Mapping[Bucket, BucketLayout]

    @property
    def control_bytes(self) -> int:
        """Counters of grid barriers, peer tables and step inputs of all buckets."""
        return sum(
            CONTROL_BYTES * b.selection.memory.control_words
            + 8 * self.tp * len(b.rings)
            + b.input_bytes
            for b in self.buckets.values()
        )

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {
            "weights": self.weight_bytes,
            "states": self.state_bytes,
            "arena": self.arena_bytes,
            "mailboxes": self.ring_bytes,
            "scratch": sum(self.scratch.values()),
            "control": self.control_bytes,
        }

    @property
    def total(self) -> int:
        """Bytes of one rank."""
        return sum(self.parts().values())


def layout_of(bundle: Bundle) -> MemoryLayout:
    """The memory that a rank needs for all buckets of a bundle.

    Raises InputError for a bundle without kernels, or with launches that have none.
    """
    parts: list[tuple[Bucket, Plan, Selection]] = []
    for bucket in bundle.buckets:
        selection = bundle.selection(bucket)
        if selection is None:
            raise InputError(
                f"{bundle.directory} has no kernels: compile it with nvidia-cutlass-dsl installed "
                "(pip install 'k3fuse[compile]'), without --no-kernels"
            )
        if selection.without:
            first = selection.without[0]
            raise InputError(
                f"{bundle.directory}: {len(selection.without)} launches of {bucket} have no kernel "
                f"for {selection.target} (@{first.launch}: {first.reason}): use --device cpu"
            )
        parts.append((bucket, bundle.plan(bucket), selection))
    return make_layout(bundle.options, parts)


def make_layout(
    options: CompileOptions, parts: Sequence[tuple[Bucket, Plan, Selection]]
) -> MemoryLayout:
    """The memory of one rank for these buckets."""
    tp = options.tp
    weights: dict[str, TensorType] = {}
    states: dict[str, TensorType] = {}
    found: dict[Bucket, BucketLayout] = {}
    scratch: dict[str, int] = {}
    arena, ring_end = 0, 0
    for bucket, plan, selection in parts:
        weights |= {w.value: parse_type(w.type) for w in plan.weights}
        states |= {s.name: parse_type(s.type) for s in plan.states}
        arena = max(arena, plan.memory.arena)
        for stream, size in selection.memory.scratch:
            scratch[stream] = max(scratch.get(stream, 0), size)
        dims = bucket.dims(options)
        rings: dict[str, RingPlace] = {}
        for box in plan.mailboxes:
            rings[box.name] = _ring(box, ring_end, dims, tp)
            ring_end = _aligned(ring_end + rings[box.name].bytes)
        inputs, input_bytes = _inputs(plan, dims, tp)
        types = {o.value: o.type for launch in plan.launches for o in launch.operands}
        output_types = {name: parse_type(types[value]) for name, value in plan.outputs}
        buffers = {buffer.value: buffer.offset for buffer in plan.arena}
        outputs = {
            name: local_place(output_types[name], buffers[value], dims, tp)
            for name, value in plan.outputs
        }
        found[bucket] = BucketLayout(
            bucket, plan, selection, rings, inputs, input_bytes, outputs, output_types
        )
    dims = parts[0][0].dims(options)
    placed_weights, weight_bytes = _pack(weights, dims, tp)
    placed_states, state_bytes = _pack(states, dims, tp)
    return MemoryLayout(
        tp=tp,
        weights=placed_weights,
        weight_bytes=weight_bytes,
        states=placed_states,
        slotted=tuple(name for name, type_ in states.items() if type_.shape[0] == "slots"),
        state_bytes=state_bytes,
        arena_bytes=arena,
        ring_bytes=ring_end,
        scratch=scratch,
        buckets=found,
    )


def local_place(type_: TensorType, offset: int, dims: Mapping[str, int], tp: int) -> Place:
    """Where a rank's part of a value lies."""
    shape = tuple(dims[d] if isinstance(d, str) else d for d in type_.local_shape(tp))
    return Place(offset, shape, type_.dtype)


def _pack(
    types: Mapping[str, TensorType], dims: Mapping[str, int], tp: int
) -> tuple[dict[str, Place], int]:
    """Places one behind the other, and the bytes of all."""
    places: dict[str, Place] = {}
    end = 0
    for name, type_ in types.items():
        places[name] = local_place(type_, end, dims, tp)
        end = _aligned(end + places[name].bytes)
    return places, end


def _ring(box: Mailbox, offset: int, dims: Mapping[str, int], tp: int) -> RingPlace:
    type_ = parse_type(box.type)
    whole = local_place(type_, 0, dims, tp)
    if box.protocol == "push_gather":  # shards lie side by side in each row
        slot = whole.shape[1] // tp * type_.dtype.itemsize
    else:
        slot = whole.bytes // tp
    return RingPlace(offset, box, type_.dtype, slot)


def _inputs(plan: Plan, dims: Mapping[str, int], tp: int) -> tuple[dict[str, Place], int]:
    places = {"step": Place(0, (1,), DType.I64)}
    end = _aligned(STEP_BYTES)
    for launch in plan.launches:
        for operand in launch.operands:
            if operand.access == "host" and operand.storage not in places:
                place = local_place(parse_type(operand.type), end, dims, tp)
                places[operand.storage] = place
                end = _aligned(end + place.bytes)
    return places, end


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
