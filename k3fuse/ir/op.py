"""What an op is: name, attributes, result-type rule, torch reference, effects. Declared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from k3fuse.errors import K3FuseError
from k3fuse.ir.graph import Attr
from k3fuse.tensor_type import TensorType


class TypeRuleError(K3FuseError):
    """Operand types, placements or attributes that an op does not accept."""


@dataclass(frozen=True)
class Context:
    """What a rule or a reference may know of its surroundings.

    References also get `shape`, what this rank holds of the first result, the operand `types`, and
    `exact`: whether everything is computed in float64 and nothing is rounded.
    """

    tp: int = 1
    rank: int = 0
    shape: tuple[int, ...] = ()
    types: tuple[TensorType, ...] = ()
    exact: bool = False


Attrs = Mapping[str, Attr]
Infer = Callable[[list[TensorType], Attrs, Context], list[TensorType]]
LocalReference = Callable[[list[Tensor], Attrs, Context], tuple[Tensor, ...]]
GroupReference = Callable[[list[list[Tensor]], Attrs, Context], list[tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Op:
    """An op schema.

    `reference` computes one rank's results from its local operands. A collective has
    `group_reference` instead: it sees the operands of all ranks in rank order. `updates` maps a
    state operand to the result that is its next version. An op with `effect` has no results and
    is kept by dead-code elimination (an L2 prefetch). The f32 results of a `wide` op are parts of a
    sum that is not rounded yet: the reference keeps them in float64, as it accumulated them.
    """

    name: str
    infer: Infer
    reference: LocalReference | None = None
    group_reference: GroupReference | None = None
    attrs: frozenset[str] = frozenset()
    updates: Mapping[int, int] = field(default_factory=dict[int, int])
    commutative: bool = False
    effect: bool = False
    wide: bool = False
    doc: str = ""

    @property
    def is_collective(self) -> bool:
        return self.group_reference is not None


_OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an op to the registry; a second op of one name is a defect."""
    if op.name in _OPS:
        raise ValueError(f"op '{op.name}' is declared twice")
    _OPS[op.name] = op
    return op


def op_named(name: str) -> Op:
    """The op of that name; TypeRuleError lists near names when there is none."""
    try:
        return _OPS[name]
    except KeyError:
        near = ", ".join(sorted(n for n in _OPS if n[:3] == name[:3])) or "none similar"
        raise TypeRuleError(f"unknown op '{name}' (similar: {near})") from None


def all_ops() -> Mapping[str, Op]:
    """The registry, by name."""
    return _OPS


def require(condition: bool, message: str) -> None:
    """Raise TypeRuleError unless the condition of a type rule holds."""
    if not condition:
        raise TypeRuleError(message)
