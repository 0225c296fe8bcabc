"""Where addresses come from: the kernel operands behind each register of a PTX kernel.

A flow-insensitive data flow: whatever a register may hold anywhere counts. Shared and local memory
are one cell each, so a pointer that passes through them keeps its origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from k3fuse.schedule.model import Access
from k3fuse.schedule.ptx import Instruction, Kernel, registers
from k3fuse.schedule.ptx_access import MemoryAccess, access_of, destinations, sources


@dataclass(frozen=True)
class KernelOperand:
    """What a parameter (or a pointer inside a by-value struct or descriptor) stands for.

    offset: bytes into the parameter; an operand reaches to the next one of the same parameter.
    multicast: an address that only multimem instructions may write. A table of peer pointers is
    one operand with the access class of what its pointers lead to.
    """

    name: str
    access: Access
    parameter: int
    offset: int = 0
    multicast: bool = False

    def __str__(self) -> str:
        place = f"+{self.offset}" if self.offset else ""
        return f"parameter {self.parameter}{place} ({self.access} {self.name})"


@dataclass(frozen=True)
class Origin:
    """One source of a value. loaded: read from memory behind it, not an address inside it.

    space: "operand" (index into the operands), "parameter" (the address of parameter `index`
    itself), "shared", "local" or "global" (a variable of the module).
    """

    space: Literal["operand", "parameter", "shared", "local", "global"]
    index: int = 0
    loaded: bool = False


Origins = frozenset[Origin]
_NONE: Origins = frozenset()


class OriginMap:
    """The fixed point over one kernel."""

    def __init__(self, kernel: Kernel, operands: Sequence[KernelOperand]) -> None:
        self.kernel = kernel
        self.operands = operands
        self._parameters = {p.name: p.index for p in kernel.parameters}
        self._shared = {v.name for v in kernel.shared}
        self._held: dict[str, Origins] = {}
        self._cells: dict[str, Origins] = {"shared": _NONE, "local": _NONE}
        self._changed = True
        code = list(kernel.instructions())
        while self._changed:
            self._changed = False
            for item in code:
                self._transfer(item)

    def of(self, operand: str) -> Origins:
        """Origins of a register, symbol, vector or address (coordinates do not count)."""
        base = operand.split(",")[0] if operand.startswith("[") else operand
        return frozenset(o for name in registers(base) for o in self._name(name))

    def pointers(self, operand: str) -> tuple[set[int], set[int], Origins]:
        """Operands that an address may lie in: held as pointers, loaded, and what else it is."""
        direct: set[int] = set()
        loaded: set[int] = set()
        other: set[Origin] = set()
        for origin in self.of(operand):
            if origin.space == "operand":
                (loaded if origin.loaded else direct).add(origin.index)
            elif origin.space == "parameter":
                direct.update(self._behind(origin.index))
            else:
                other.add(origin)
        return direct, loaded, frozenset(other)

    def _behind(self, parameter: int, offset: int | None = None) -> Iterator[int]:
        """Operands of a parameter; the one at an offset when it is known. Host values have none."""
        found = [(o.offset, i) for i, o in enumerate(self.operands) if o.parameter == parameter]
        if offset is not None:
            found = sorted(pair for pair in found if pair[0] <= offset)[-1:]
        for _, index in found:
            if self.operands[index].access != "host":
                yield index

    def _name(self, name: str) -> Origins:
        if name in self._parameters:
            return frozenset({Origin("parameter", self._parameters[name])})
        if name in self._shared:
            return frozenset({Origin("shared")})
        if name.startswith("__local_depot"):
            return frozenset({Origin("local")})
        if name in self.kernel.globals:
            return frozenset({Origin("global")})
        return self._held.get(name, _NONE)

    def _add(self, table: dict[str, Origins], name: str, origins: Origins) -> None:
        if not origins <= table.get(name, _NONE):
            table[name] = table.get(name, _NONE) | origins
            self._changed = True

    def _transfer(self, item: Instruction) -> None:
        access = access_of(item)
        if item.parts[0] == "ld" and access is not None and access.space == "param":
            self._load_parameter(item, access)
            return
        results = destinations(item)
        if access is not None and access.kind != "unknown":
            if access.kind in ("read", "update"):
                value = self._behind_address(access)
                if access.into_shared:
                    self._add(self._cells, "shared", value)
                for name in results:
                    self._add(self._held, name, value)
            if access.kind in ("write", "update"):
                stored = frozenset(
                    o for text in sources(item) if text != access.address for o in self.of(text)
                )
                for cell in self._cells_at(access):
                    self._add(self._cells, cell, stored)
            return
        if results and not item.opcode.startswith("setp"):
            value = self._computed(item)
            for name in results:
                self._add(self._held, name, value)

    def _load_parameter(self, item: Instruction, access: MemoryAccess) -> None:
        inside = access.address.strip("[] ")
        symbol, _, rest = inside.partition("+")
        step = 8 if item.opcode.endswith("64") else 4
        known = symbol.strip() in self._parameters and (not rest or rest.strip().isdigit())
        for at, name in enumerate(registers(item.operands[0])):
            found: set[Origin] = set()
            for origin in self.of(access.address):
                if origin.space == "parameter":
                    offset = int(rest or 0) + at * step if known else None
                    found.update(Origin("operand", i) for i in self._behind(origin.index, offset))
            self._add(self._held, name, frozenset(found))

    def _behind_address(self, access: MemoryAccess) -> Origins:
        """What a load may yield."""
        found: set[Origin] = set()
        for cell in self._cells_at(access):
            found |= self._cells[cell]
        if access.space not in ("shared", "local"):
            for origin in self.of(access.address):
                if origin.space == "operand":
                    found.add(Origin("operand", origin.index, loaded=True))
                elif origin.space == "parameter":
                    copied = access.into_shared  # a tensor copy through a descriptor
                    for i in self._behind(origin.index):
                        found.add(Origin("operand", i, loaded=copied))
        return frozenset(found)

    def _cells_at(self, access: MemoryAccess) -> list[str]:
        if access.space in ("shared", "local"):
            return [access.space]
        if access.space != "generic":
            return []
        spaces = {o.space for o in self.of(access.address)}
        named = [cell for cell in ("shared", "local") if cell in spaces]
        return named if named or spaces else ["shared", "local"]

    def _computed(self, item: Instruction) -> Origins:
        """Sums keep the pointer's origin and drop the index's; all else may pass on any source."""
        texts = sources(item)
        if item.parts[0] == "selp":
            texts = texts[:2]
        values = [self.of(text) for text in texts]
        if item.parts[0] in ("add", "sub", "mad"):
            held = [v for v in values if any(not o.loaded for o in v)]
            values = held or values
        return frozenset(o for value in values for o in value)
