"""The text of PTX kernels as lines with operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """An instruction; operands are texts, lists of texts where the PTX has braces."""

    text: str
    op: tuple[str, ...]
    operands: list[Any]
    guard: str | None
    negated: bool


@dataclass
class Code:
    """A kernel's text: its lines, the line that a label stands before, types of registers."""

    params: list[str]
    lines: list[Line] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


def parse(ptx: str) -> Code:
    """The text of the first entry. Names declared in an inner block get its number."""
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    code = Code(re.findall(r"\w+_param_\d+", head))
    found: list[tuple[str, list[int]]] = []
    names: dict[tuple[int, str], str] = {}
    blocks, count, held = [0], 0, ""
    for ch in re.sub(r"//[^\n]*", "", body):
        if ch in "{}" and not held.strip():
            count += ch == "{"
            blocks = [*blocks, count] if ch == "{" else blocks[:-1]
        elif ch == ":" and re.fullmatch(r"\s*[$\w]+", held):
            own = f"{held.strip()}@{blocks[-1]}"
            names[blocks[-1], held.strip()] = own
            code.labels[own] = len(found)
            held = ""
        elif ch == ";":
            words, held = held.split(), ""
            if words[0] == ".reg":
                for name in "".join(words[2:]).split(","):
                    plain = name.partition("<")[0]
                    own = f"{plain}@{blocks[-1]}" if plain == name else plain
                    names[blocks[-1], plain] = own
                    code.types[own] = words[1][1:]
            elif not words[0].startswith("."):
                found.append((" ".join(words), blocks))
        else:
            held += ch
        if not blocks:
            break
    for text, inside in found:

        def own_name(match: re.Match[str], inside: list[int] = inside) -> str:
            own = (names[b, match[0]] for b in reversed(inside) if (b, match[0]) in names)
            return next(own, match[0])

        code.lines.append(_line(text, own_name))
    return code


def _line(text: str, own_name: Callable[[re.Match[str]], str]) -> Line:
    match = re.fullmatch(r"(?:@(!?)(\S+) )?([\w.:]+) ?(.*)", text)
    assert match is not None, text
    parts = re.findall(r"\{[^}]*\}|[^,{}]+", re.sub(r"(?<![\w.])[$%\w]+", own_name, match[4]))
    operands: list[Any] = []
    for part in (p.strip() for p in parts if p.strip()):
        inner = [p.strip() for p in part[1:-1].split(",")]
        operands.append(inner if part[0] == "{" else part)
    guard = None if match[2] is None else re.sub(r"[$%\w]+", own_name, match[2])
    return Line(text, tuple(re.split(r"(?<!:)\.", match[3])), operands, guard, match[1] == "!")
