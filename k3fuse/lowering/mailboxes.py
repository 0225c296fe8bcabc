"""Mailboxes: one ring of stages for all exchanges of one protocol and type.

Pushes of one launch that are alike use rings of their own: on a shared ring the reader of the
second would re-arm the stage that the first is still read from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import cast

from k3fuse.errors import RefusedError
from k3fuse.ir import Graph, Value
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.runtime.plan import Mailbox, Protocol
from k3fuse.tensor_type import TensorType

STAGES = 3
"""One stage being read, one being filled by a peer that is ahead, one being re-armed."""

REARM = 2
"""A peer may already fill the stage of the next use, so a reader re-arms the one behind it."""

_ALIGNMENT = 256


_Key = tuple[str, TensorType, int]
"""Push op, type of what it pushes, and which of the alike pushes of its launch it is."""


@dataclass(frozen=True)
class Place:
    """Where a pushed value travels: the ring, and which use of it in the step."""

    mailbox: str
    use: int


def assign_mailboxes(graph: Graph) -> tuple[tuple[Mailbox, ...], dict[int, Place]]:
    """The rings of a graph, and for each pushed value (by id) its place.

    Uses are numbered in order of the pushes. Raises RefusedError when the graph returns a pushed
    value, since a later use overwrites it.
    """
    places: dict[int, Place] = {}
    uses: dict[_Key, int] = {}
    for launch in graph.nodes:
        alike: Counter[tuple[str, TensorType]] = Counter()
        for leaf in launch.leaves:
            if leaf.op in PUSHES:
                kind = (leaf.op, leaf.result.type)
                key = (*kind, alike[kind])
                alike[kind] += 1
                uses[key] = uses.get(key, 0) + 1
                places[id(leaf.result)] = Place(_name(*key), uses[key] - 1)
    for value in graph.outputs:
        if id(value) in places:
            raise RefusedError(
                f"the step returns %{value.name} from mailbox {places[id(value)].mailbox}, which a "
                "later exchange overwrites: return a copy"
            )
    return tuple(_ring(graph, key, count) for key, count in uses.items()), places


def is_pushed(value: Value) -> bool:
    """Whether a value lives in a mailbox."""
    return value.producer is not None and value.producer.op in PUSHES


def _ring(graph: Graph, key: _Key, uses: int) -> Mailbox:
    op, type_, _ = key
    size = type_.local_bytes(graph.tp, graph.dims)
    return Mailbox(
        name=_name(*key),
        protocol=cast(Protocol, op),
        type=str(type_),
        stage_bytes=-(-size // _ALIGNMENT) * _ALIGNMENT,
        stages=STAGES,
        rearm=REARM,
        uses=uses,
        sentinel="negative_zero" if type_.dtype.is_float else "minus_one",
    )


def _name(op: str, type_: TensorType, channel: int) -> str:
    return f"{op}:{type_}" if channel == 0 else f"{op}:{type_}:{channel + 1}"
