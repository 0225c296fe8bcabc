"""The plan: everything a runtime needs to know of a step, as pure data.

No tensors, no callables, no GPU: a plan prints, compares, hashes and travels as JSON. All ranks
run the same plan; sizes are those of one rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import TypeAdapter, ValidationError

from k3fuse.errors import ParseError

PLAN_VERSION = 1
"""Raised whenever the meaning of a field changes; a bundle of another version is refused."""

Access = Literal["weight", "activation", "state", "mailbox", "host"]
"""What an operand is to the proofs: weights are static; host values are step inputs."""


Protocol = Literal["push_partial", "push_chunks", "push_gather"]
"""What a mailbox receives: terms of a sum, blocks of terms at their owner, shards of a whole."""


@dataclass(frozen=True)
class Operand:
    """One value that a launch reads or writes."""

    value: str
    access: Access
    mode: Literal["read", "write", "update"]
    type: str  # global type in IR text, with its placement
    bytes: int  # what one rank holds of it
    storage: str  # name of the Buffer, Mailbox, State, Weight or step input that it lives in
    offset: int = 0  # in the arena
    use: int = 0  # which use of its mailbox in the step


@dataclass(frozen=True)
class Launch:
    """One kernel launch: where, after what, with which operands."""

    name: str
    ops: tuple[str, ...]  # the fused body, in order of execution
    stream: Literal["main", "aux", "prefetch"]
    after: tuple[str, ...]  # edges: kind:launch (schedule.edges)
    wait: int  # index of the first op that must not run before the wait
    trigger: str  # entry | last_tile: when the next launch may start
    layer: int  # decoder layer, -1 for what lies before and after the layers
    operands: tuple[Operand, ...]
    weight_bytes: int  # read from memory by one rank: distinct experts only, no reuse
    state_bytes: int  # read and written
    activation_bytes: int
    predicted_us: float


@dataclass(frozen=True)
class Buffer:
    """A value's place in the arena; its bytes may be reused outside [first, last]."""

    value: str
    offset: int
    bytes: int
    first: int  # position of the first launch that may write it
    last: int  # position of the last launch that may still read it


@dataclass(frozen=True)
class Mailbox:
    """A ring of stages that peers write: one for all exchanges of one protocol and type.

    Use k of step s works on stage (s * uses + k) mod stages, and re-arms stage
    (s * uses + k + rearm) mod stages once it has read its own. A word equal to the sentinel has not
    arrived; producers never send one (they turn -0.0 into +0.0).
    """

    name: str
    protocol: Protocol
    type: str
    stage_bytes: int
    stages: int
    rearm: int
    uses: int
    sentinel: Literal["negative_zero", "minus_one"]


@dataclass(frozen=True)
class State:
    """A state whose versions all live in one storage, updated in place."""

    name: str
    binding: str
    type: str
    bytes: int


@dataclass(frozen=True)
class Weight:
    """A static value that launches read: a parameter as stored, or a result of the recipe."""

    value: str
    binding: str  # parameter path; empty when the recipe computes it
    type: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    state: int
    arena: int
    mailboxes: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.arena + self.mailboxes


@dataclass(frozen=True)
class Plan:
    """One bucket: the launches of a step for a batch of requests with a fixed row count each."""

    model: str
    target: str
    tp: int
    batch: int  # requests R
    rows_per_request: int  # q
    launches: tuple[Launch, ...]
    arena: tuple[Buffer, ...]
    mailboxes: tuple[Mailbox, ...]
    states: tuple[State, ...]
    weights: tuple[Weight, ...]
    outputs: tuple[tuple[str, str], ...]  # (name, value)
    memory: Memory
    stock_launches: tuple[tuple[int, int], ...]  # (layer, launches with one launch an op)
    stock_bytes: int  # weight and state bytes of one rank when run as the stock engines do
    stock_padding_bytes: int  # part of stock_bytes that is zero padding
    version: int = PLAN_VERSION

    @property
    def rows(self) -> int:
        return self.batch * self.rows_per_request

    @property
    def planned_bytes(self) -> int:
        """Weight and state bytes that one rank moves in a step."""
        return sum(launch.weight_bytes + launch.state_bytes for launch in self.launches)

    @property
    def predicted_us(self) -> float:
        """Time of the main stream: side streams run beside it."""
        return sum(launch.predicted_us for launch in self.launches if launch.stream == "main")

    def to_json(self) -> str:
        """Deterministic text: equal plans give equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    def hash(self) -> str:
        """SHA-256 of the text: what all ranks must agree on before the first exchange."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def read_plan(text: str, where: str) -> Plan:
    """Read what `Plan.to_json` writes; ParseError names `where` and what is wrong."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ParseError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ParseError(f"{where}: a plan is a JSON object")
    data = cast("dict[str, object]", raw)
    if data.get("version") != PLAN_VERSION:
        raise ParseError(
            f"{where}: plan version {data.get('version')!r}, this k3fuse reads {PLAN_VERSION}: "
            "compile the bundle again"
        )
    try:
        return _PLAN.validate_python(data)
    except ValidationError as error:
        raise ParseError(f"{where}: not a plan ({error.error_count()} errors: {error})") from None


_PLAN = TypeAdapter(Plan)
