"""What spin loops of a PTX kernel compare flags with.

Only what lies in memory advances when a captured graph is replayed. A flag compared with a grid
number, a parameter or a literal matches the value that the last replay left behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from k3fuse.schedule.finding import Finding
from k3fuse.schedule.ptx import Instruction, Kernel, registers
from k3fuse.schedule.ptx_access import access_of, destinations, sources
from k3fuse.schedule.ptx_origins import KernelOperand, OriginMap
from k3fuse.schedule.ptx_paths import Reached, loops

SENTINELS = (0x80000000, 0xFFFFFFFF)
"""Words that mean "not arrived": float -0.0 and integer -1."""

_LITERAL = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?|0[fF][0-9a-fA-F]{8}")


def flag_findings(
    kernel: Kernel, origins: OriginMap, reached: Reached, sentinels: Sequence[int]
) -> list[Finding]:
    """Stale-flag findings of every loop that leaves on a value loaded from a mailbox."""
    definitions = _Definitions(kernel)
    polled = {i: o for i in kernel.instructions() if (o := _mailbox(origins, i)) is not None}
    found: dict[tuple[int, str], Finding] = {}
    for loop in loops(kernel):
        inside = {i for index in loop.blocks for i in kernel.blocks[index].instructions}
        spun = {i for i in inside if i in reached and i in polled}
        if not spun:
            continue
        for leave in loop.exits:
            for compare in _compares(leave, definitions):
                sources_behind = _leaves(compare, definitions)
                for load in spun & {i for i in sources_behind if isinstance(i, Instruction)}:
                    operand = polled[load]
                    # A first load above the loop is the same flag, not what it is compared with.
                    rest = sources_behind - spun - {i for i, o in polled.items() if o is operand}
                    why = _stale(compare, rest, sentinels)
                    if why:
                        kind, text = why
                        found[compare.line, operand.name] = Finding(
                            kind,
                            f"{kernel.name} line {compare.line}: {compare} compares {operand}, "
                            f"loaded at line {load.line}, with {text}",
                        )
    return list(found.values())


def _mailbox(origins: OriginMap, item: Instruction) -> KernelOperand | None:
    """The mailbox that a load reads, by pointer or through a loaded pointer."""
    access = access_of(item)
    if access is None or access.kind not in ("read", "update") or access.into_shared:
        return None
    if access.space not in ("global", "generic"):
        return None
    direct, loaded, _ = origins.pointers(access.address)
    for index in sorted(direct | loaded):
        if origins.operands[index].access == "mailbox":
            return origins.operands[index]
    return None


class _Definitions:
    """Which instructions may have set a register, as seen from one that reads it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._before: list[list[int]] = [[] for _ in kernel.blocks]
        self._place: dict[Instruction, tuple[int, int]] = {}
        for block in kernel.blocks:
            for successor in block.successors:
                self._before[successor].append(block.index)
            for at, item in enumerate(block.instructions):
                self._place.setdefault(item, (block.index, at))

    def reaching(self, item: Instruction, name: str) -> list[Instruction]:
        """Definitions that may reach `item`, found by walking back from it."""
        found: list[Instruction] = []
        seen: set[int] = set()
        pending = [self._place[item]]
        while pending:
            index, stop = pending.pop()
            for earlier in reversed(self.kernel.blocks[index].instructions[:stop]):
                if name in destinations(earlier):
                    found.append(earlier)
                    if not earlier.guard:
                        break
            else:
                for previous in self._before[index]:
                    if previous not in seen:
                        seen.add(previous)
                        size = len(self.kernel.blocks[previous].instructions)
                        pending.append((previous, size))
        return found


def _compares(leave: Instruction, definitions: _Definitions) -> Iterator[Instruction]:
    """Comparisons behind the guard of a branch, through logic on predicates."""
    seen: set[Instruction] = set()
    pending = definitions.reaching(leave, leave.guard)
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        if item.parts[0] in ("setp", "set", "testp"):
            yield item
        combined = sources(item)[2:] if item.parts[0] == "setp" else sources(item)
        for text in combined:
            for name in registers(text):
                pending += definitions.reaching(item, name)


def _leaves(compare: Instruction, definitions: _Definitions) -> frozenset[Instruction | str]:
    """What a comparison depends on: loads, literals, and registers that nothing computes."""
    found: set[Instruction | str] = set()
    seen: set[tuple[Instruction, str]] = set()
    pending = [(compare, text) for text in sources(compare)[:2]]
    while pending:
        item, text = pending.pop()
        if _LITERAL.fullmatch(text.strip()):
            found.add(text.strip())
            continue
        for name in registers(text):
            if (item, name) in seen:
                continue
            seen.add((item, name))
            made = definitions.reaching(item, name)
            if not made:
                found.add(name)
            for earlier in made:
                if access_of(earlier) is not None:
                    found.add(earlier)
                else:
                    pending += [(earlier, inner) for inner in sources(earlier)]
    return frozenset(found)


def _stale(
    compare: Instruction, rest: frozenset[Instruction | str], sentinels: Sequence[int]
) -> tuple[str, str] | None:
    """Why the other side of a comparison does not advance at replay: finding kind and text."""
    names = sorted(x for x in rest if isinstance(x, str) and not _LITERAL.fullmatch(x))
    if any(name.startswith("%gridid") for name in names):
        return "stale flag", "%gridid, which repeats at replay"
    loads = [x for x in rest if isinstance(x, Instruction)]
    memory = [x for x in loads if (a := access_of(x)) is not None and a.space != "param"]
    if memory:
        return None
    literals = sorted(x for x in rest if isinstance(x, str) and _LITERAL.fullmatch(x))
    if not loads and not names and any(_is_sentinel(compare, x, sentinels) for x in literals):
        return None
    if loads:
        return "stale flag", f"a parameter ({loads[0]}), which a captured launch repeats"
    if names:
        return "not proven", f"{', '.join(names)}"
    return "stale flag", f"{', '.join(literals) or 'itself'}, which is no sentinel"


_HALF_RANGES = {("gt", 0x8000FFFF), ("le", 0x8000FFFF), ("lt", 0x80010000), ("ge", 0x80010000)}
"""Signed comparisons of a word that say whether its upper half is 0x8000, the least there is."""


def _is_sentinel(compare: Instruction, literal: str, sentinels: Sequence[int]) -> bool:
    """Whether a comparison with this literal asks for a word, or half of one, that means empty."""
    word, halves = _word(literal), {value >> 16 & 0xFFFF for value in sentinels}
    kind = compare.parts[-1]
    if kind in ("b16", "s16", "u16"):
        return word & 0xFFFF in halves
    if kind == "s32" and 0x8000 in halves and (compare.parts[1], word) in _HALF_RANGES:
        return True
    return word in {value & 0xFFFFFFFF for value in sentinels} | halves


def _word(literal: str) -> int:
    if literal[:2] in ("0f", "0F"):
        return int(literal[2:], 16)
    return int(literal.rstrip("U"), 0) & 0xFFFFFFFF
