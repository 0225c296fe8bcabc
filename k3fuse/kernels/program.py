"""What one launch computes, as data: the fused body with the sizes and places of one rank.

A program holds nothing of the graph or the layer that it came from, so equal launches of
different layers are one kernel. Its meaning is that of its ops, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Place = Literal["weight", "activation", "state", "host", "mailbox", "pushed", "internal"]
"""Where a value lives. weight, activation, state, host: memory of the rank, one pointer each;
mailbox: a ring of the rank that peers write; pushed: the peers' rings; internal: only inside."""

Attribute = str | int | float | bool | None

ITEMSIZE = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8, "u8": 1}


@dataclass(frozen=True)
class Ring:
    """The mailbox of a value: bytes of a stage, stages, uses a step, and what to re-arm.

    channel tells rings of one program apart; two values with equal channels share a ring.
    first_reader: this launch is the first to read this use, so it re-arms.
    """

    channel: int
    stage_bytes: int
    stages: int
    uses: int
    rearm: int
    first_reader: bool = False


@dataclass(frozen=True)
class Held:
    """A value: its dtype and shape on one rank, contiguous. root: the value whose storage a new
    version of a state shares, itself for all others."""

    dtype: str
    shape: tuple[int, ...]
    place: Place
    root: int
    ring: Ring | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def rows(self) -> int:
        """Size of the first dimension."""
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements of a row: all dimensions but the first."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Step:
    """One op; operands and results are indices into the program's values."""

    op: str
    attributes: tuple[tuple[str, Attribute], ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def attribute(self, name: str, default: Attribute = None) -> Attribute:
        return dict(self.attributes).get(name, default)


@dataclass(frozen=True)
class Program:
    """A launch body. written: values of place "activation" that must be in memory at the end.

    trigger: where the next launch may start, "entry" or "last_tile".
    """

    tp: int
    values: tuple[Held, ...]
    steps: tuple[Step, ...]
    written: tuple[int, ...]
    trigger: str

    @property
    def label(self) -> str:
        """Ops in order, runs of one op counted."""
        parts: list[str] = []
        for step in self.steps:
            name, _, count = parts[-1].partition("*") if parts else ("", "", "")
            if parts and name == step.op:
                parts[-1] = f"{name}*{int(count or 1) + 1}"
            else:
                parts.append(step.op)
        return ".".join(parts)

    def producer(self, value: int) -> Step | None:
        """The step that makes a value; None for what comes from outside."""
        return next((step for step in self.steps if value in step.results), None)

    def consumers(self, value: int) -> list[Step]:
        """The steps that read a value."""
        return [step for step in self.steps if value in step.operands]
