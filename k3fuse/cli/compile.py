"""`k3fuse compile`: checkpoint in, bundle out, with the pipeline's instruments as flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from k3fuse.cli.load import Source, builtin_source, open_source, parse_ints, use_one_thread
from k3fuse.cli.output import Task, console, emit_json, progress
from k3fuse.compiler import CompiledBucket, buckets_of, bundle_contents, compile_bucket
from k3fuse.errors import InputError, RefusedError
from k3fuse.options import CompileOptions
from k3fuse.passes.instruments import Dumps, Instrument, PrintAfterAll, PrintChanged
from k3fuse.passes.numeric_check import Load
from k3fuse.passes.pipeline import PIPELINE, pass_named
from k3fuse.report.launches import launches_by_kind
from k3fuse.report.proofs import proofs
from k3fuse.runtime.bundle import write_bundle
from k3fuse.target import get_target

CHECK_BYTES = 1 << 29
"""Checkpoints up to this size are checked after every pass unless `--no-check` says otherwise."""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("compile")(compile_)


def compile_(
    model: Annotated[str, typer.Argument(help="Model family (kimi-k3, kimi-linear) or built-in config.")],
    checkpoint: Annotated[Path | None, typer.Argument(help="Checkpoint directory.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Bundle directory to write.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group.")] = 1,
    batch: Annotated[str, typer.Option(help="Requests of each bucket, comma-separated, 1 to 64.")] = "1",
    target: Annotated[str, typer.Option(help="GPU or architecture: h200, sm_90a, gb300, sm_103a ...")] = "sm_90a",
    verify_rows: Annotated[int, typer.Option(help="Rows a request of verify buckets (2 to 8; 0: none).")] = 0,
    no_weights: Annotated[bool, typer.Option("--no-weights", help="Compile the built-in config, no checkpoint.")] = False,
    context: Annotated[int, typer.Option(help="Cached tokens a request that bytes and times are stated for.")] = 1,
    max_context: Annotated[int, typer.Option(help="Longest request the MLA cache holds.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Positions of a cache page.")] = 64,
    protocol: Annotated[str, typer.Option(help="All-reduce protocol: auto, one_shot, two_shot.")] = "auto",
    prefetch: Annotated[bool, typer.Option(help="Insert L2 prefetch windows.")] = True,
    check: Annotated[bool | None, typer.Option(help="Check numbers after each pass (default: small checkpoints).")] = None,
    strict: Annotated[bool, typer.Option(help="Fail on anything that was not proven.")] = True,
    print_after_all: Annotated[bool, typer.Option("--print-after-all", help="Print the IR after every pass.")] = False,
    print_changed: Annotated[str | None, typer.Option(help="Print what each pass changed: diff or quiet.")] = None,
    filter_passes: Annotated[str | None, typer.Option(help="Only these passes in printed output.")] = None,
    dump_dir: Annotated[Path | None, typer.Option(help="Write the IR after every pass into this directory.")] = None,
    stop_after: Annotated[str | None, typer.Option(help="Stop after this pass and print its IR; no bundle.")] = None,
    bisect_limit: Annotated[int | None, typer.Option(help="Skip optional passes after the N-th.")] = None,
    time_passes: Annotated[bool, typer.Option("--time-passes", help="Print the seconds of every pass.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Trace a stock forward, run the passes, check them, and write a bundle."""
    use_one_thread()
    get_target(target)
    options = CompileOptions(
        target=target,
        tp=tp,
        batches=parse_ints(batch, "--batch"),
        verify_rows=verify_rows,
        context=context,
        max_context=max_context,
        page_size=page_size,
        protocol=protocol,
        prefetch=prefetch,
        bisect_limit=bisect_limit,
    )
    printers = _printers(print_after_all, print_changed, filter_passes)
    source = _source(model, checkpoint, no_weights)
    if stop_after is not None:
        pass_named(stop_after)
    load = _load_for_checks(source, check)
    buckets = buckets_of(options)
    compiled: list[CompiledBucket] = []
    with progress("compile") as task:
        task.total(len(buckets) * len(PIPELINE))
        module = source.meta_module()
        for bucket in buckets:
            instruments = list[Instrument](printers)
            if dump_dir is not None:
                instruments.append(Dumps(dump_dir / bucket.name))
            done = compile_bucket(
                module,
                model,
                bucket,
                options,
                load=load,
                instruments=instruments,
                on_pass=_advance(task, bucket.name),
                stop_after=stop_after,
            )
            if done is None:
                return  # stopped; the printers have shown what was asked for
            compiled.append(done)
    report = proofs(compiled, strict=strict)
    if output is not None:
        write_bundle(output, bundle_contents(source.family, source.config, source.checkpoint, model, options, compiled))
    summary = _summary(model, options, compiled, report)
    if json_output:
        emit_json(summary)
    else:
        _print(summary, compiled, output)
    if time_passes:
        _print_times(compiled)
