"""What is known of the predicates of a PTX kernel: constants, thread numbers, equal conditions.

A register defined once from special registers, parameters and constants has the same value wherever
it is read, so conditions on it can be compared across branches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from k3fuse.schedule.ptx import Instruction, Kernel
from k3fuse.schedule.ptx_access import access_of, destinations

Expression = tuple[object, ...]
"""("const", value), ("name", special register or parameter), or (opcode, operand expressions)."""

_FIXED = re.compile(r"%(?:tid|ntid|ctaid|nctaid|laneid|cluster_\w+)(?:\.[xyz])?")
_DEPTH = 24
"""Definitions followed behind one predicate; beyond it, it counts as unknown."""

_NEGATED = {"ne": "eq", "ge": "lt", "gt": "le"}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> min(b, 64),
    "rem": lambda a, b: a % b if b else 0,
    "div": lambda a, b: a // b if b else 0,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@dataclass(frozen=True)
class Condition:
    """A predicate as a key that equal predicates share, and whether it is the key's negation.

    register: set when the key is only the present value of that register.
    """

    key: Expression
    negated: bool = False
    register: str = ""


class Conditions:
    """Conditions of one kernel's predicates."""

    def __init__(self, kernel: Kernel) -> None:
        self._definitions: dict[str, list[Instruction]] = {}
        for item in kernel.instructions():
            for name in destinations(item):
                self._definitions.setdefault(name, []).append(item)
        self._parameters = {p.name for p in kernel.parameters}
        self._threads = 0
        if kernel.block is not None and kernel.block[1:] == (1, 1):
            self._threads = kernel.block[0]
        self._expressions: dict[str, Expression | None] = {}
        self._known: dict[str, Condition] = {}
        self._masks: dict[Expression, int | None] = {}

    @property
    def all_threads(self) -> int:
        """A bit for each thread of a one-dimensional block; one bit when its size is not known."""
        return (1 << max(self._threads, 1)) - 1

    def of(self, register: str) -> Condition:
        """The condition that a predicate register stands for."""
        if register not in self._known:
            self._known[register] = self._condition(register)
        return self._known[register]

    def threads(self, condition: Condition) -> int | None:
        """Threads for which the condition holds; None when more than thread numbers decide it."""
        if condition.key not in self._masks:
            self._masks[condition.key] = self._mask(condition.key)
        mask = self._masks[condition.key]
        if mask is None:
            return None
        return self.all_threads & ~mask if condition.negated else mask

    def _mask(self, key: Expression) -> int | None:
        mask = 0
        for thread in range(max(self._threads, 1)):
            value = _value(key, thread if self._threads else None)
            if value is None:
                return None
            mask |= int(bool(value)) << thread
        return mask

    def _condition(self, register: str) -> Condition:
        expression = self._expression(register, 0)
        negated = False
        while expression is not None and expression[0] == "not.pred":
            expression, negated = cast("Expression", expression[1]), not negated
        if expression is None:
            return Condition(("register", register), register=register)
        parts = str(expression[0]).split(".")
        if parts[0] == "setp" and len(parts) == 3 and parts[2][0] in "bsu":
            compare = _UNSIGNED.get(parts[1], parts[1])
            if compare in _NEGATED:
                compare, negated = _NEGATED[compare], not negated
            expression = (f"setp.{compare}.{parts[2]}", *expression[1:])
        return Condition(expression, negated)

    def _expression(self, text: str, depth: int) -> Expression | None:
        if text not in self._expressions:
            self._expressions[text] = None  # while it is being computed: a cycle is unknown
            self._expressions[text] = self._compute(text.strip(), depth)
        return self._expressions[text]

    def _compute(self, text: str, depth: int) -> Expression | None:
        if re.fullmatch(r"-?\d+U?|-?0[xX][0-9a-fA-F]+U?", text):
            return ("const", int(text.rstrip("U"), 0))
        if _FIXED.fullmatch(text):
            return ("name", text)
        made = self._definitions.get(text, [])
        if len(made) != 1 or depth > _DEPTH:
            return None
        item = made[0]
        if item.guard or len(destinations(item)) != 1:
            return None
        access = access_of(item)
        if item.parts[0] == "ld" and access is not None and access.space == "param":
            symbol = re.match(r"\[\s*([\w$]+)", access.address)
            named = symbol is not None and symbol.group(1) in self._parameters
            return ("name", f"{item.opcode} {access.address}") if named else None
        if access is not None or item.parts[0] not in _PURE or "cc" in item.parts:
            return None
        inner = [self._expression(text, depth + 1) for text in item.operands[1:]]
        if any(part is None for part in inner):
            return None
        return (item.opcode, *inner)


_PURE = frozenset({*_ARITHMETIC, "mov", "cvt", "setp", "not", "selp", "mul", "mad", "min", "max"})


def _value(expression: Expression, thread: int | None) -> int | None:
    """Value of an expression in one thread, or None when it is not known."""
    kind = str(expression[0])
    if kind == "const":
        return cast("int", expression[1])
    if kind == "name":
        if expression[1] == "%tid.x":
            return thread
        return 0 if expression[1] in ("%tid.y", "%tid.z") and thread is not None else None
    if kind == "register":
        return None
    parts = kind.split(".")
    values = [_value(cast("Expression", part), thread) for part in expression[1:]]
    if parts[0] in ("and", "or") and parts[1] == "pred":
        decisive = int(parts[0] == "or")
        if decisive in values:
            return decisive
    if any(value is None for value in values):
        return None
    return _apply(parts, cast("list[int]", values))


def _apply(parts: list[str], values: list[int]) -> int | None:
    family, kind = parts[0], parts[-1]
    if kind == "pred":
        if family == "not":
            return int(not values[0])
        return int(_ARITHMETIC[family](*values) != 0) if family in ("and", "or", "xor") else None
    if kind[0] not in "bsu" or not kind[1:].isdigit():
        return None
    values = [_fit(value, kind) for value in values]
    if family == "setp":
        compare = _UNSIGNED.get(parts[1], parts[1])
        negated = compare in _NEGATED
        test = _COMPARE.get(_NEGATED.get(compare, compare))
        return None if test is None or len(values) != 2 else int(test(*values) != negated)
    if family == "mov" or (family == "cvt" and len(parts) == 3):
        return _fit(values[0], parts[1])
    if family == "not":
        return _fit(~values[0], kind)
    if family == "mul" and parts[1] in ("lo", "wide"):
        return values[0] * values[1] if parts[1] == "wide" else _fit(values[0] * values[1], kind)
    if family in _ARITHMETIC and len(parts) == 2:
        if family in ("rem", "div") and min(values) < 0:
            return None
        return _fit(_ARITHMETIC[family](*values), kind)
    return None


def _fit(value: int, kind: str) -> int:
    """The value of the low bits of a type; untyped bits count as unsigned."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value
