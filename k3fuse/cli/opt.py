"""`k3fuse opt`: run passes on IR text, from a dump, a reproducer or a file written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from k3fuse.cli.output import emit_json, text_output
from k3fuse.errors import InputError
from k3fuse.ir import parse_graph, print_graph, verify
from k3fuse.passes.instruments import PrintChanged
from k3fuse.passes.manager import run_passes
from k3fuse.passes.pipeline import PIPELINE, pass_named


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("opt")(opt)


def opt(
    file: Annotated[Path | None, typer.Argument(help="IR text, or - for standard input.")] = None,
    passes: Annotated[
        list[str] | None, typer.Option("-p", "--pass", help="Pass to run; may be given again.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Run every pass of the pipeline that comes after this one.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")] = None,
    print_changed: Annotated[
        bool, typer.Option("--print-changed", help="Print diffs instead of the graph.")
    ] = False,
    list_passes: Annotated[bool, typer.Option("--list", help="List the passes and stop.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Read a graph, verify it, run passes on it, and print the result."""
    if list_passes:
        for item in PIPELINE:
            print(f"{item.name:22s} {(item.__doc__ or '').splitlines()[0]}")
        return
    if file is None:
        raise InputError("name a file of IR text, or - for standard input")
    if passes and after:
        raise InputError("--pass and --after exclude each other: --after names a whole tail")
    chosen = [pass_named(name) for name in passes or []]
    if after is not None:
        chosen = list(PIPELINE[PIPELINE.index(pass_named(after)) + 1 :])
    graph = parse_graph(_read(file), str(file))
    verify(graph)
    diffs = [PrintChanged(text_output(json_output))] if print_changed else []
    results = run_passes(graph, chosen, instruments=diffs)
    text = print_graph(graph)
    if output is not None:
        output.write_text(text)
    if json_output:
        emit_json(
            {
                "passes": [{"name": r.name, "changes": r.changes} for r in results],
                "refusals": [
                    {"pass": f.pass_name, "site": f.site, "reason": f.reason, "value": f.value}
                    for r in results
                    for f in r.refusals
                ],
                "text": text,
            }
        )
    elif output is None and not print_changed:
        sys.stdout.write(text)


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as IR text ({error})") from None
