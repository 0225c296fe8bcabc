"""Read one kernel of a PTX text: parameters, shared memory, instructions and control flow.

As much of the language as ptxas takes from the CuTe DSL: inline assembly in braces with registers
and labels of its own, vector operands, guards, and branch tables. Follows the PTX ISA manual
(sections 4, 5, 9 and 10). Lines are those of the text given.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from k3fuse.errors import ParseError

REGISTER = re.compile(r"[%$A-Za-z_][\w$]*(?:#\d+)?(?:\.[xyzw]\b)?")
"""A register, special register or symbol inside an operand; `#n` marks one of an inner scope."""

_SIZE = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


@dataclass(frozen=True)
class Parameter:
    """One entry parameter; bytes is its size, pointer says that PTX calls it one."""

    index: int
    name: str
    type: str
    bytes: int
    pointer: bool


@dataclass(frozen=True)
class Variable:
    """A shared variable; bytes 0 with `external` for dynamic shared memory."""

    name: str
    bytes: int
    align: int
    external: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard opcode operands;`, negated for `@!guard`."""

    line: int
    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()


@dataclass
class Block:
    """Instructions with one way in at the top; successors are indices of blocks."""

    index: int
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    successors: list[int] = field(default_factory=list[int])
    taken: int = -1  # successor when the final conditional branch is taken


@dataclass(frozen=True)
class Kernel:
    """One entry. block: threads (x, y, z) when the text fixes them."""

    name: str
    line: int
    parameters: tuple[Parameter, ...]
    block: tuple[int, int, int] | None
    shared: tuple[Variable, ...]
    globals: frozenset[str]
    blocks: tuple[Block, ...]

    def instructions(self) -> Iterator[Instruction]:
        """All instructions in the order of the text."""
        for block in self.blocks:
            yield from block.instructions

    @property
    def static_shared(self) -> int:
        """Bytes of shared variables with a size, each at its alignment."""
        end = 0
        for item in self.shared:
            if not item.external:
                end = -(-end // item.align) * item.align + item.bytes
        return end


def registers(operand: str) -> list[str]:
    """Registers and symbols that an operand names, in order."""
    return REGISTER.findall(operand)


def read_kernel(text: str, entry: str) -> Kernel:
    """Parse the entry named `entry`; ParseError names what is missing or not understood."""
    text = _without_comments(text)
    lines = [0, *(m.end() for m in re.finditer("\n", text))]
    head = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\(([^()]*)\))?([^{{;]*)\{{", text)
    if head is None:
        names = ", ".join(re.findall(r"\.entry\s+([\w$]+)", text)) or "none"
        raise ParseError(f"PTX: no entry {entry} (entries: {names})")
    end = _closing(text, head.end(), entry)
    reader = _Body(entry, text, lines, head.end(), end)
    reader.read()
    outside = _outside_functions(text)
    own = {v.name: v for v in (*_shared(outside), *_shared(text[head.end() : end]))}
    block = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head.group(2))
    shape = tuple(int(x or 1) for x in block.groups()) if block else None
    used = {name for _, item in reader.items for o in item.operands for name in registers(o)}
    return Kernel(
        name=entry,
        line=bisect_right(lines, head.start()),
        parameters=tuple(_parameters(head.group(1) or "", entry)),
        block=(shape[0], shape[1], shape[2]) if shape else None,
        shared=tuple(v for v in own.values() if v.name in used),
        globals=frozenset(re.findall(r"\.global\b[^;={\[]*?([\w$]+)\s*[;=\[]", outside)),
        blocks=tuple(_blocks(reader)),
    )


def _without_comments(text: str) -> str:
    """Blank comments and debug lines out, so that positions and lines stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    text = re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.DOTALL)
    return re.sub(r"^[ \t]*\.(?:loc|file)\b[^\n]*", blank, text, flags=re.MULTILINE)


def _closing(text: str, start: int, entry: str) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise ParseError(f"PTX: entry {entry} has no closing brace")


def _outside_functions(text: str) -> str:
    """Module-level text: bodies and initialisers cut out."""
    kept: list[str] = []
    depth, last = 0, 0
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            if depth == 0:
                kept.append(text[last : match.start()])
            depth += 1
        else:
            depth -= 1
            last = match.end()
    return "".join([*kept, text[last:]])


def _parameters(text: str, entry: str) -> Iterator[Parameter]:
    for index, item in enumerate(part.strip() for part in text.split(",") if part.strip()):
        match = re.fullmatch(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)\s*(\.ptr\b)?.*?([\w$]+)(?:\[(\d+)\])?",
            item,
            flags=re.DOTALL,
        )
        if match is None:
            raise ParseError(f"PTX: entry {entry}: parameter {index} is not understood: {item}")
        kind, width, pointer, name, count = match.groups()
        size = _SIZE[width] * int(count or 1)
        yield Parameter(index, name, f"{kind}{width}", size, pointer is not None)


def _shared(text: str) -> Iterator[Variable]:
    pattern = (
        r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+([\w$]+)"
        r"((?:\[\d*\])*)\s*[;=]"
    )
    for match in re.finditer(pattern, text):
        extern, align, width, name, shape = match.groups()
        size = _SIZE[width]
        for count in re.findall(r"\[(\d*)\]", shape):
            size *= int(count or 0)
        yield Variable(name, size, int(align or _SIZE[width]), extern is not None)


class _Body:
    """Statements of a body; items are (scope, instruction) in the order of the text."""

    def __init__(self, entry: str, text: str, lines: list[int], start: int, end: int) -> None:
        self.entry, self.text, self.lines = entry, text, lines
        self.start, self.end = start, end
        self.items: list[tuple[int, Instruction]] = []
        self.labels: dict[tuple[int, str], int] = {}  # (scope, name) -> next item
        self.tables: dict[tuple[int, str], list[str]] = {}
        self.parents: dict[int, int] = {0: -1}
        self.local: dict[int, set[str]] = {0: set()}

    def read(self) -> None:
        scope, at = 0, self.start
        label = re.compile(r"([%$A-Za-z_][\w$]*)\s*:(?!:)")
        table = re.compile(r"\s*\.branchtargets\s+([^;]*);")
        while True:
            while at < self.end and self.text[at].isspace():
                at += 1
            if at >= self.end:
                return
            if self.text[at] == "{":
                inner = len(self.parents)
                self.parents[inner], self.local[inner], scope = scope, set(), inner
                at += 1
            elif self.text[at] == "}":
                scope = self.parents[scope]
                at += 1
            elif match := label.match(self.text, at, self.end):
                name, at = match.group(1), match.end()
                if listed := table.match(self.text, at):
                    self.tables[scope, name] = re.split(r"[\s,]+", listed.group(1).strip())
                    at = listed.end()
                else:
                    self.labels[scope, name] = len(self.items)
            else:
                stop = self.text.find(";", at, self.end)
                if stop < 0:
                    raise ParseError(
                        f"PTX: {self.entry} line {self.line(at)}: a statement does not end"
                    )
                self._statement(scope, at, self.text[at:stop].strip())
                at = stop + 1

    def line(self, at: int) -> int:
        return bisect_right(self.lines, at)

    def _statement(self, scope: int, at: int, text: str) -> None:
        if not text:
            return
        if text.startswith("."):
            if scope and text.startswith(".reg"):
                self.local[scope].update(re.findall(r"[%$A-Za-z_][\w$]*", text.split(None, 2)[2]))
            return
        match = re.fullmatch(r"(?:@(!?)\s*([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
        if match is None:
            raise ParseError(f"PTX: {self.entry} line {self.line(at)}: not understood: {text}")
        negated, guard, opcode, rest = match.groups()
        instruction = Instruction(
            line=self.line(at),
            opcode=opcode,
            operands=tuple(self._rename(scope, o) for o in _split(rest)),
            guard=self._rename(scope, guard or ""),
            negated=bool(negated),
        )
        self.items.append((scope, instruction))

    def _rename(self, scope: int, operand: str) -> str:
        """Give registers of inner scopes names of their own."""

        def name(match: re.Match[str]) -> str:
            here = scope
            while here > 0:
                if match.group() in self.local[here]:
                    return f"{match.group()}#{here}"
                here = self.parents[here]
            return match.group()

        return REGISTER.sub(name, operand)

    def targets(self, scope: int, instruction: Instruction) -> list[int]:
        """Items that a branch may go to."""
        name = instruction.operands[-1]
        here = scope
        while here >= 0:
            if (here, name) in self.labels and not instruction.opcode.startswith("brx"):
                return [self.labels[here, name]]
            if (here, name) in self.tables:
                return [self.labels[here, target] for target in self.tables[here, name]]
            here = self.parents[here]
        raise ParseError(f"PTX: {self.entry} line {instruction.line}: no label {name}")


def _split(text: str) -> list[str]:
    """Operands between the commas outside of braces, brackets and parentheses."""
    found: list[str] = []
    depth, last = 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            found.append(text[last:at].strip())
            last = at + 1
    return [*found, text[last:].strip()] if text.strip() else []


def _blocks(body: _Body) -> list[Block]:
    items = body.items
    targets: dict[int, list[int]] = {}
    starts = {0, *body.labels.values()}
    for at, (scope, item) in enumerate(items):
        if item.parts[0] in ("bra", "brx"):
            targets[at] = body.targets(scope, item)
            starts.update(targets[at])
        if item.parts[0] in ("bra", "brx", "ret", "exit", "trap"):
            starts.add(at + 1)
    order = sorted(start for start in starts if start <= len(items))
    if order[-1] != len(items):
        order.append(len(items))
    index = {start: i for i, start in enumerate(order)}
    blocks = [Block(i) for i in range(len(order))]  # the last one is empty: the end of the text
    for i, (first, stop) in enumerate(pairwise(order)):
        block = blocks[i]
        block.instructions = [item for _, item in items[first:stop]]
        last = block.instructions[-1] if block.instructions else None
        kind = last.parts[0] if last else ""
        if kind in ("bra", "brx"):
            block.successors = [index[t] for t in targets[stop - 1]]
            if kind == "bra" and last and last.guard:
                block.taken = block.successors[0]
        if kind not in ("bra", "brx", "ret", "exit", "trap") or (last and last.guard):
            block.successors.append(i + 1)
    return blocks
