"""`k3fuse diff`: whether two graphs, plans or bundles are the same, and what differs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from k3fuse.cli.output import emit_json
from k3fuse.report.compare import compare


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("diff")(diff)


def diff(
    a: Annotated[Path, typer.Argument(help="IR text, a plan's JSON file, or a bundle.")],
    b: Annotated[Path, typer.Argument(help="The same kind of thing.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print how B differs from A. Exit code 0 when they are equal, 1 when not."""
    found = compare(a, b)
    if json_output:
        emit_json(dataclasses.asdict(found))
    else:
        sys.stdout.writelines(f"{line}\n" for line in found.lines)
    if not found.equal:
        raise typer.Exit(1)
