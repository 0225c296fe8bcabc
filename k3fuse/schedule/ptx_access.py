"""What a PTX instruction does to memory and which registers it defines (PTX ISA, section 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3fuse.schedule.ptx import Instruction, registers

AccessKind = Literal["read", "write", "update", "prefetch", "unknown"]
"""update: a read-modify-write. unknown: this table does not say what the instruction touches."""

_SPACES = ("global", "shared", "local", "param", "const")
_NO_GLOBAL = (
    *("mbarrier", "ldmatrix", "stmatrix", "tcgen05", "wgmma", "mapa", "createpolicy", "isspacep"),
    *("cvta", "getctarank", "clusterlaunchcontrol", "bra", "brx", "ret", "mov"),
)
"""Instructions with brackets (or none) that never touch global memory."""

_NO_RESULT = (
    *("bra", "brx", "ret", "exit", "trap"),
    *("fence", "membar", "griddepcontrol", "nanosleep"),
)


@dataclass(frozen=True)
class MemoryAccess:
    """One access outside of registers. space: a state space of PTX, or "generic".

    into_shared: a copy whose other side is shared memory. multimem: by a multimem instruction.
    """

    kind: AccessKind
    space: str
    address: str
    into_shared: bool = False
    multimem: bool = False


def destinations(item: Instruction) -> list[str]:
    """Registers that an instruction writes."""
    family = item.parts[0]
    if not item.operands or family in _NO_RESULT or item.operands[0].startswith("["):
        return []
    if family in ("bar", "barrier") and "red" not in item.parts:
        return []
    if family == "call" and not item.operands[0].startswith("("):
        return []
    return registers(item.operands[0])


def sources(item: Instruction) -> list[str]:
    """Operands that an instruction reads, brackets included."""
    return list(item.operands[1:] if destinations(item) else item.operands)


def access_of(item: Instruction) -> MemoryAccess | None:
    """The access to global, shared, local or parameter memory, if there is one."""
    parts, operands = item.parts, item.operands
    family = parts[0]
    multimem = family == "multimem"
    space = _spaces(parts)[0] if _spaces(parts) else "generic"
    if multimem:
        family, space = parts[1], "global"
    if family == "ld" or family in ("ldu", "ld_reduce"):
        return MemoryAccess("read", "global" if family == "ldu" else space, operands[1], False)
    if family == "cp":
        return _copy(item, multimem)
    if family == "st":
        return MemoryAccess("write", _async(parts, space), operands[0], multimem=multimem)
    if family == "red":
        return MemoryAccess("update", _async(parts, space), operands[0], multimem=multimem)
    if family == "atom":
        return MemoryAccess("update", space, operands[1])
    if family in ("prefetch", "prefetchu", "applypriority"):
        descriptor = "tensormap" in parts  # of the descriptor itself, a parameter
        return None if descriptor else MemoryAccess("prefetch", space, operands[0])
    if family in ("discard", "tensormap"):
        return MemoryAccess("write", space, operands[0])
    if family == "call":
        known = any("vprintf" in operand for operand in operands)
        return None if known else MemoryAccess("unknown", "generic", "")
    if family in ("tex", "tld4", "suld", "sust", "sured"):
        return MemoryAccess("unknown", "generic", "")
    if family in _NO_GLOBAL:
        return None
    address = next((o for o in operands if "[" in o), "")
    return MemoryAccess("unknown", space, address) if address else None


def _async(parts: list[str], space: str) -> str:
    """st.async and red.async without a space write the shared memory of a cluster."""
    return "shared" if "async" in parts and space == "generic" else space


def _spaces(parts: list[str]) -> list[str]:
    return [name for p in parts[1:] if (name := p.split("::")[0]) in _SPACES]


def _copy(item: Instruction, multimem: bool) -> MemoryAccess | None:
    """cp.async, cp.async.bulk, their tensor and reducing forms; None for groups and barriers."""
    if not any("[" in operand for operand in item.operands) or "mbarrier" in item.parts:
        return None
    spaces = _spaces(item.parts)
    if "prefetch" in item.parts:
        return MemoryAccess("prefetch", "global", item.operands[0])
    if "global" not in spaces:
        return None
    if spaces[0] == "global":
        kind = "update" if "reduce" in item.parts else "write"
        return MemoryAccess(kind, "global", item.operands[0], multimem=multimem)
    return MemoryAccess("read", "global", item.operands[1], into_shared=True)
