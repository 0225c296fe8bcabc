"""`k3fuse compile`: checkpoint in, bundle out, with the pipeline's instruments as flags."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperCommand

from k3fuse.cli.load import Source, builtin_source, open_source, parse_ints, use_one_thread
from k3fuse.cli.output import Task, console, emit_json, err_console, progress, text_output
from k3fuse.compiler import (
    CompiledBucket,
    bucket_key,
    bucket_report,
    buckets_of,
    bundle_contents,
    compile_bucket,
    joint_hash,
    proofs,
    require_audited,
    require_kernels,
    require_proven,
    run_until,
    without_kernel,
)
from k3fuse.errors import InputError
from k3fuse.ir import Graph
from k3fuse.kernels.build import dsl_version
from k3fuse.lowering.build_kernels import BuiltKernels, build_kernels
from k3fuse.lowering.select import Kernels
from k3fuse.models.registry import Config
from k3fuse.options import CompileOptions
from k3fuse.passes.base import Pass, PassResult
from k3fuse.passes.instruments import Dumps, Emit, Instrument, PrintAfterAll, PrintChanged
from k3fuse.passes.numeric_check import Load
from k3fuse.passes.pipeline import PIPELINE, pass_named
from k3fuse.report.summary import group_refusals, summarize
from k3fuse.runtime.bundle import require_replaceable, write_bundle
from k3fuse.target import get_target

CHECK_BYTES = 1 << 29
"""Checkpoints up to this size are checked after every pass unless `--no-check` says otherwise."""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("compile", cls=_Command)(compile_)


class _Command(TyperCommand):
    """Lets `--print-changed` stand alone for `--print-changed diff`, which typer cannot say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        full: list[str] = []
        for position, word in enumerate(args):
            full.append(word)
            alone = position + 1 == len(args) or args[position + 1].startswith("-")
            if word == "--print-changed" and alone:
                full.append("diff")
        return super().parse_args(ctx, full)


def compile_(
    model: Annotated[
        str, typer.Argument(help="Model family (kimi-k3, kimi-linear) or built-in config.")
    ],
    checkpoint: Annotated[Path | None, typer.Argument(help="Checkpoint directory.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Bundle directory to write.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group.")] = 1,
    batch: Annotated[
        str, typer.Option(help="Requests of each bucket, comma-separated, 1 to 64.")
    ] = "1",
    target: Annotated[
        str,
        typer.Option(
            help="GPU or architecture: h200, sm_90a, gb300 ...; h200:64 for 64 of its SMs."
        ),
    ] = "sm_90a",
    verify_rows: Annotated[
        int, typer.Option(help="Rows a request of verify buckets (2 to 8; 0: none).")
    ] = 0,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="Compile the built-in config, no checkpoint.")
    ] = False,
    context: Annotated[
        int, typer.Option(help="Cached tokens a request that bytes and times are stated for.")
    ] = 1,
    max_context: Annotated[int, typer.Option(help="Longest request the MLA cache holds.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Positions of a cache page.")] = 64,
    protocol: Annotated[
        str, typer.Option(help="All-reduce protocol: auto, one_shot, two_shot.")
    ] = "auto",
    prefetch: Annotated[bool, typer.Option(help="Insert L2 prefetch windows.")] = False,
    kernels: Annotated[
        bool | None,
        typer.Option(
            "--kernels/--no-kernels",
            help="Compile kernels into the bundle (default: if nvidia-cutlass-dsl is installed).",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Kernels that give up waiting, and say for what.")
    ] = False,
    dumps: Annotated[bool, typer.Option(help="Keep the IR after every pass in the bundle.")] = True,
    check: Annotated[
        bool | None,
        typer.Option(help="Check numbers after each pass (default: small checkpoints)."),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Fail on what is not proven and on launches without a kernel.")
    ] = True,
    print_after_all: Annotated[
        bool, typer.Option("--print-after-all", help="Print the IR after every pass.")
    ] = False,
    print_changed: Annotated[
        str | None, typer.Option(help="Print what each pass changed: diff or quiet.")
    ] = None,
    filter_passes: Annotated[
        str | None, typer.Option(help="Only these passes in printed output.")
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Write the IR after every pass into this directory.")
    ] = None,
    stop_after: Annotated[
        str | None, typer.Option(help="Stop after this pass and print its IR; no bundle.")
    ] = None,
    bisect_limit: Annotated[
        int | None, typer.Option(help="Skip optional passes after the N-th.")
    ] = None,
    time_passes: Annotated[
        bool, typer.Option("--time-passes", help="Print the seconds of every pass.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Trace a stock forward, run the passes, check them, and write a bundle."""
    use_one_thread()
    get_target(target)
    if protocol not in ("auto", "one_shot", "two_shot"):
        raise InputError(f"--protocol {protocol}: choose auto, one_shot or two_shot")
    if bisect_limit is not None and bisect_limit < 0:
        raise InputError(f"--bisect-limit {bisect_limit}: number of passes to keep, 0 or more")
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
        kernels=_wants_kernels(kernels, stop_after is not None),
        debug=debug,
    )
    if output is not None:
        require_replaceable(output)
    source = _source(model, checkpoint, no_weights)
    buckets = buckets_of(options)
    module = source.meta_module()
    printers = _printers(text_output(json_output), print_after_all, print_changed, filter_passes)
    if stop_after is not None:
        written = [] if dump_dir is None else [Dumps(dump_dir / buckets[0].name)]
        text = run_until(module, model, buckets[0], options, stop_after, [*printers, *written])
        if json_output:
            emit_json({"pass": stop_after, "bucket": buckets[0].name, "text": text})
        else:
            sys.stdout.write(text)
        return
    load = _load_for_checks(source, check)
    compiled: list[CompiledBucket] = []
    chosen = Kernels(get_target(target), debug) if options.kernels else None
    with progress("compile") as task:
        task.total(len(buckets) * len(PIPELINE))
        for bucket in buckets:
            instruments = list(printers)
            if dump_dir is not None:
                instruments.append(Dumps(dump_dir / bucket.name))
            instruments.append(_ShowPass(task, bucket.name))
            compiled.append(
                compile_bucket(
                    *(module, model, bucket, options),
                    load=load,
                    instruments=instruments,
                    kernels=chosen,
                )
            )
    if strict:
        require_kernels(compiled)
    require_proven(compiled, strict=strict)
    built = None if chosen is None else _build(chosen)
    if built is not None and strict:
        require_audited(built)
    if output is not None:
        write_bundle(
            output,
            bundle_contents(
                *(model, source.config, options, compiled, source.reference(), built), dumps=dumps
            ),
        )
    summary = _summary(model, options, compiled, source.config, built)
    if json_output:
        emit_json(summary)
    else:
        _print_tables(compiled, source.config, built)
        console.print(_closing_line(summary, output), markup=False)
    if time_passes:
        _print_times(compiled)


class _ShowPass(Instrument):
    """Moves the progress bar on and names the pass that has just run."""

    def __init__(self, task: Task, bucket: str) -> None:
        self._task, self._bucket = task, bucket

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        self._task.label(f"{self._bucket} {item.name}")
        self._task.advance()


def _wants_kernels(asked: bool | None, stops_early: bool) -> bool:
    """Whether to compile kernels; InputError when they are asked for and cannot be."""
    if asked is False or stops_early:
        return False
    try:
        dsl_version()
    except InputError as error:
        if asked:
            raise
        err_console.print(f"no kernels: {error}", markup=False)
        return False
    return True


def _build(chosen: Kernels) -> BuiltKernels:
    """Compile the kernels, with a bar for those that the cache does not hold."""
    with progress("kernels") as task:

        def show(label: str, done: int, total: int) -> None:
            task.total(total)
            task.label(f"kernel {label}")
            task.advance()

        return build_kernels(chosen, progress=show)


def _source(model: str, checkpoint: Path | None, no_weights: bool) -> Source:
    if no_weights and checkpoint is not None:
        raise InputError("--no-weights and a checkpoint exclude each other: leave one out")
    if no_weights:
        return builtin_source(model)
    if checkpoint is None:
        raise InputError("name a checkpoint directory, or --no-weights for the built-in config")
    return open_source(model, checkpoint)


def _printers(
    emit: Emit, after_all: bool, changed: str | None, only: str | None
) -> list[Instrument]:
    names = only.split(",") if only else []
    for name in names:
        pass_named(name)
    if changed not in (None, "diff", "quiet"):
        raise InputError(f"--print-changed {changed}: choose diff or quiet")
    found: list[Instrument] = []
    if after_all:
        found.append(PrintAfterAll(emit, names))
    if changed is not None:
        found.append(PrintChanged(emit, changed, names))
    return found


def _load_for_checks(source: Source, check: bool | None) -> Load | None:
    """Where the numeric checks get weights; None when they are off."""
    if source.checkpoint is None:
        if check:
            raise InputError("--check needs weights: give a checkpoint instead of --no-weights")
        return None
    return (
        source.weight
        if check or (check is None and source.parameter_bytes() <= CHECK_BYTES)
        else None
    )


def _summary(
    model: str,
    options: CompileOptions,
    compiled: list[CompiledBucket],
    config: Config,
    built: BuiltKernels | None,
) -> dict[str, object]:
    """What `--json` prints; batches are keys as strings, verify and commit buckets by name."""
    reports = {bucket_key(c): bucket_report(c, config, built) for c in compiled}
    summaries = {key: summarize(report) for key, report in reports.items()}
    return {
        "model": model,
        "target": options.target,
        "tp": options.tp,
        "batches": list(options.batches),
        "verify_rows": options.verify_rows,
        "plan_hash": joint_hash([c.plan for c in compiled]),
        "launches": {
            key: {
                kind.kind: {
                    "main": int(kind.main_launches.most),
                    "aux": int(kind.aux_launches.most),
                    "prefetch": int(kind.prefetch_launches.most),
                    "stock": int(kind.stock_launches.most),
                    "layers": len(kind.layers),
                }
                for kind in summary.kinds
            }
            for key, summary in summaries.items()
        },
        "bytes_per_rank": {
            key: {
                "stock": s.stock_bytes,
                "stock_padding": s.stock_padding_bytes,
                "planned": s.planned_bytes,
            }
            for key, s in summaries.items()
        },
        "predicted_us": {key: s.predicted_us for key, s in summaries.items()},
        "memory_bytes": max(s.memory.total for s in summaries.values()),
        "memory": {key: dataclasses.asdict(s.memory) for key, s in summaries.items()},
        "refusals": [
            {
                "pass": r.pass_name,
                "site": r.site,
                "reason": r.reason,
                "value": r.value,
                "bucket": key,
            }
            for key, report in reports.items()
            for r in report.refusals
        ],
        "kernels": None if built is None else _kernel_summary(compiled, built),
        "proofs": proofs(compiled, built),
    }


def _kernel_summary(compiled: list[CompiledBucket], built: BuiltKernels) -> dict[str, object]:
    return {
        "distinct": built.distinct,
        "compiled": built.compiled,
        "cached": built.distinct - built.compiled,
        "seconds": round(built.seconds, 3),
        "without": [list(item) for item in without_kernel(compiled)],
    }


def _print_tables(
    compiled: list[CompiledBucket], config: Config, built: BuiltKernels | None
) -> None:
    table = Table(title="launches, bytes and predicted time of one rank")
    for column in (
        "bucket",
        "layers",
        "stock",
        "main",
        "aux",
        "prefetch",
        "MB a layer",
        "us a layer",
    ):
        table.add_column(column, justify="left" if column in ("bucket", "layers") else "right")
    for item in compiled:
        summary = summarize(bucket_report(item, config))
        for kind in summary.kinds:
            table.add_row(
                item.bucket.name,
                f"{kind.kind} x {len(kind.layers)}",
                kind.stock_launches.text(),
                kind.main_launches.text(),
                kind.aux_launches.text(),
                kind.prefetch_launches.text(),
                kind.planned_bytes.text("{:.3f}", 1e6),
                kind.predicted_us.text("{:.1f}"),
            )
        table.add_row(
            item.bucket.name,
            "whole step",
            str(summary.stock_launches),
            *(str(summary.launches[stream]) for stream in ("main", "aux", "prefetch")),
            f"{summary.planned_bytes / 1e6:.1f} (stock {summary.stock_bytes / 1e6:.1f})",
            f"{summary.predicted_us:.1f}",
            end_section=True,
        )
    console.print(table)
    memory = compiled[0].plan.memory
    console.print(
        f"memory of one rank: {memory.total / 1e9:.3f} GB (weights {memory.weights / 1e9:.3f}, "
        f"states {memory.state / 1e9:.3f}, arena {memory.arena / 1e6:.2f} MB, "
        f"mailboxes {memory.mailboxes / 1e6:.2f} MB)"
    )
    if built is not None:
        _print_kernels(compiled, built)
    for name, text in proofs(compiled, built).items():
        console.print(f"{name}: {text}", markup=False)
    groups = group_refusals(r for item in compiled for r in item.refusals)
    count = sum(group.count for group in groups)
    console.print(f"{count} refusals of {len(groups)} kinds (k3fuse inspect --refusals)")


def _print_kernels(compiled: list[CompiledBucket], built: BuiltKernels) -> None:
    launches = sum(len(item.plan.launches) for item in compiled)
    without = without_kernel(compiled)
    console.print(
        f"kernels: {built.distinct} distinct for {launches - len(without)} of {launches} launches "
        f"({built.compiled} compiled, {built.distinct - built.compiled} from the cache, "
        f"{built.seconds:.1f} s)"
    )
    for bucket, launch, reason in without:
        console.print(f"  no kernel for @{launch} of {bucket}: {reason}", markup=False)


def _closing_line(summary: dict[str, object], output: Path | None) -> str:
    where = f"wrote {output}" if output is not None else "no bundle written (-o DIRECTORY)"
    return f"{where}, plan {str(summary['plan_hash'])[:16]}"


def _print_times(compiled: list[CompiledBucket]) -> None:
    table = Table("pass", "seconds", title="time of the passes, all buckets")
    seconds: dict[str, float] = {}
    for item in compiled:
        for result in item.results:
            seconds[result.name] = seconds.get(result.name, 0.0) + result.seconds
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}")
    err_console.print(table)
