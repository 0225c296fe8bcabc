"""`k3fuse verify`: run every dump of a bundle against the traced graph, on real weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from k3fuse.cli.load import bundle_source, use_one_thread
from k3fuse.cli.output import Task, console, emit_json, progress
from k3fuse.errors import InputError, RefusedError
from k3fuse.ir import parse_graph, print_graph, verify
from k3fuse.lowering.lower import lower
from k3fuse.passes.numeric_check import Load, NumericCheck, PassCheck
from k3fuse.passes.pipeline import STOCK
from k3fuse.runtime.bundle import Bucket, Bundle, read_bundle


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("verify")(verify_)


@dataclass(frozen=True)
class _Row:
    bucket: Bucket
    check: PassCheck


def verify_(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint, if not where the bundle was compiled from.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check each pass of each bucket: structure, float64 numbers, and the plan of the last graph."""
    use_one_thread()
    opened = read_bundle(bundle)
    source = bundle_source(opened, checkpoint)
    cache = {name: p.data for name, p in source.module().named_parameters()}
    rows: list[_Row] = []
    with progress("verify") as task:
        task.total(sum(len(opened.dumps(bucket)) for bucket in opened.buckets))
        for bucket in opened.buckets:
            rows.extend(_check_bucket(opened, bucket, lambda value: cache[value.binding], task))
    ok = all(row.check.ok for row in rows)
    if json_output:
        emit_json(
            {
                "ok": ok,
                "passes": [
                    {
                        "name": row.check.name,
                        "bucket": row.bucket.name,
                        "max_rel_err": row.check.max_rel_err,
                        "tolerance": row.check.tolerance,
                        "ok": row.check.ok,
                    }
                    for row in rows
                ],
            }
        )
    else:
        console.print(_table(rows))
    if not ok:
        first = next(row for row in rows if not row.check.ok)
        raise RefusedError(
            f"{bundle}: after {first.check.name} of {first.bucket} outputs differ by "
            f"{first.check.max_rel_err:.2e} relative (allowed {first.check.tolerance:.0e})"
        )


def _check_bucket(bundle: Bundle, bucket: Bucket, load: Load, task: Task) -> Iterator[_Row]:
    dumps = bundle.dumps(bucket)
    if not dumps:
        raise InputError(f"{bundle.directory}: bucket {bucket} has no dumps: compile it again")
    (_, trace_text), *later = dumps
    check = NumericCheck(load)
    check.start(parse_graph(trace_text, "trace"), trace_text)
    task.advance()
    before, stock = trace_text, trace_text
    for stem, text in later:
        name = stem.partition("_")[2]
        task.label(f"{bucket} {name}")
        graph = parse_graph(text, stem)
        verify(graph)
        if text != before:
            check.compare(name, graph)
        else:
            check.repeat(name)
        stock = text if name == STOCK else stock
        before = text
        task.advance()
        yield _Row(bucket, check.checks[-1])
    final = bundle.graph(bucket)
    if print_graph(final) != before:
        raise RefusedError(f"{bundle.directory}: {bucket} runs another graph than its last dump")
    if lower(final, parse_graph(stock, STOCK)).hash() != bundle.plan(bucket).hash():
        raise RefusedError(f"{bundle.directory}: the plan of {bucket} is not that of its graph")


def _table(rows: list[_Row]) -> Table:
    buckets = list(dict.fromkeys(row.bucket for row in rows))
    table = Table("pass", *(str(b) for b in buckets), title="largest relative error in float64")
    for name in dict.fromkeys(row.check.name for row in rows):
        cells = [
            f"{row.check.max_rel_err:.1e}{'' if row.check.ok else ' FAILED'}"
            for bucket in buckets
            for row in rows
            if row.bucket == bucket and row.check.name == name
        ]
        table.add_row(name, *cells)
    return table
