"""What the pass slider shows: a layer's IR after each pass, marked against the pass before.

Most lines stay the same from pass to pass and from layer to layer, so a page carries each distinct
line once, and every slide is a list of numbers into that table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from k3fuse.report.contents import BucketReport
from k3fuse.report.layers import lines_by_layer

SAME, ADDED, REMOVED = 0, 1, 2


@dataclass
class Slides:
    """lines: the distinct lines. slides: layer -> pass -> marked lines, each 3 * line + mark.

    marks: 0 as before the pass, 1 added by it, 2 removed by it.
    """

    passes: list[str]
    lines: list[str] = field(default_factory=list[str])
    slides: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])


def make_slides(report: BucketReport, layers: Iterable[int]) -> Slides:
    """The slides of some layers after every pass."""
    found = Slides(report.passes, slides={layer: [] for layer in layers})
    numbers: dict[str, int] = {}
    before: dict[int, list[str]] = {}
    for position, text in enumerate(report.dumps.values()):
        now = lines_by_layer(text)
        for layer, slides in found.slides.items():
            lines = now.get(layer, [])
            marked = _marked(before.get(layer, []) if position else lines, lines)
            slides.append([3 * _number(line, numbers, found.lines) + mark for line, mark in marked])
            before[layer] = lines
    return found


def _marked(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, int]]:
    marked: list[tuple[str, int]] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, a1, a2, b1, b2 in matcher.get_opcodes():
        if tag == "equal":
            marked += [(line, SAME) for line in after[b1:b2]]
        else:
            marked += [(line, REMOVED) for line in before[a1:a2]]
            marked += [(line, ADDED) for line in after[b1:b2]]
    return marked


def _number(line: str, numbers: dict[str, int], lines: list[str]) -> int:
    if line not in numbers:
        numbers[line] = len(lines)
        lines.append(line)
    return numbers[line]
