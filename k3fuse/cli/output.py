"""What commands print: tables for people, one JSON object for programs, progress on terminals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_WIDE = 160  # columns where there is no terminal to ask: tables in pipes and logs keep their rows


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, soft_wrap=True, width=None if stream.isatty() else _WIDE)


console = _console(stderr=False)
err_console = _console(stderr=True)


def emit_json(data: object) -> None:
    """One object on stdout and nothing else."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def text_output(json_output: bool) -> Callable[[str], None]:
    """Where IR and diffs go: stdout, or stderr where stdout is for one JSON object."""
    return lambda text: print(text, end="", file=sys.stderr if json_output else sys.stdout)


class Task:
    """One bar of a progress display; does nothing where there is no terminal."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None)

    def total(self, count: int) -> None:
        self._progress.update(self._task, total=count)

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def label(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def show(self, stage: str, done: int, total: int) -> None:
        """All at once: what is going on, how much of it is done, and how much there is."""
        self._progress.update(self._task, description=stage, completed=done, total=total)


@contextmanager
def progress(label: str) -> Generator[Task]:
    """A progress bar on stderr while the block runs, if stderr is a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err_console,
        transient=True,
        disable=not err_console.is_terminal,
    )
    with bar:
        yield Task(bar, label)
