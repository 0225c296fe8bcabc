"""What can be watched around passes: text, diffs, dumps, time. Passes know nothing of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from pathlib import Path

from k3fuse.ir import Graph
from k3fuse.passes.base import Pass, PassResult

Emit = Callable[[str], object]


class Instrument:
    """Called around a pipeline; the base does nothing."""

    def start(self, graph: Graph, text: str) -> None:
        """Called once with the graph as the first pass will see it."""

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        """Called when a pass has run and been verified, with the text on each side of it."""


class PrintAfterAll(Instrument):
    """The whole graph after each pass."""

    def __init__(self, emit: Emit, only: Collection[str] = ()) -> None:
        self._emit, self._only = emit, only

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        if not self._only or item.name in self._only:
            self._emit(f"// after {item.name} ({result.changes} changes)\n{text}")


class PrintChanged(Instrument):
    """What a pass changed: a unified diff, or only the fact (`quiet`)."""

    def __init__(self, emit: Emit, style: str = "diff", only: Collection[str] = ()) -> None:
        self._emit, self._style, self._only = emit, style, only

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        if self._only and item.name not in self._only:
            return
        if text == before:
            self._emit(f"// {item.name}: no change\n")
        elif self._style == "quiet":
            self._emit(f"// {item.name}: {result.changes} changes\n")
        else:
            self._emit("\n".join(diff_lines(before, text, "before", item.name)) + "\n")


class Dumps(Instrument):
    """The text after every pass, in order; `000_trace.ir` is the start.

    With a directory, one file a pass: 003_absorb-mla.ir.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.texts: dict[str, str] = {}
        self._directory = directory

    def start(self, graph: Graph, text: str) -> None:
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._add("trace", text)

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        self._add(item.name, text)

    def after_pass(self, name: str) -> str:
        """The text after the pass of that name (the last one, if it ran twice)."""
        return next(t for f, t in reversed(self.texts.items()) if f.endswith(f"_{name}.ir"))

    def _add(self, name: str, text: str) -> None:
        file = f"{len(self.texts):03d}_{name}.ir"
        self.texts[file] = text
        if self._directory is not None:
            (self._directory / file).write_text(text)


def diff_lines(before: str, after: str, name_before: str, name_after: str) -> list[str]:
    """A unified diff of two texts, three lines of context."""
    return list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), name_before, name_after, lineterm=""
        )
    )
