"""`k3fuse bench`: how long the steps of a bundle take on this GPU, beside the floor of the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from k3fuse.cli.device import engine_source, open_engine, require_gpu
from k3fuse.cli.output import console, emit_json
from k3fuse.errors import InputError
from k3fuse.runtime.bundle import Bucket, read_bundle
from k3fuse.runtime.gpu.engine import Engine
from k3fuse.runtime.gpu.timing import bandwidths, check_graph, step_inputs, time_step
from k3fuse.runtime.gpu.trace import perfetto, trace_step
from k3fuse.target import get_target


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("bench")(bench)


def bench(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    loopback: Annotated[
        bool, typer.Option("--loopback", help="One rank that plays its peers; no link is crossed.")
    ] = False,
    random_weights: Annotated[
        int | None, typer.Option(help="Random weights of this seed for a built-in model.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint, if not where the bundle was compiled from.")
    ] = None,
    replays: Annotated[int, typer.Option(help="Timed steps of each bucket.")] = 50,
    context: Annotated[int, typer.Option(help="Tokens that each request already has.")] = 64,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for the times of every launch (Perfetto files).")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Time the CUDA graph of every step bucket, once it gives the bits of single launches."""
    if replays < 1:
        raise InputError(f"--replays {replays}: time at least one step")
    opened = read_bundle(bundle)
    require_gpu()
    source = engine_source(opened, checkpoint, random_weights)
    with open_engine(opened, source, loopback=loopback, seed=random_weights or 0) as engine:
        facts, speaks = _measure(engine, replays, context, trace), engine.mode.speaks
    if not speaks:
        return
    rows = facts["steps"]
    if json_output:
        emit_json(facts)
        return
    table = Table(
        *("bucket", "rows", "step us", "best", "floor us", "share", "other us a layer", "token/s"),
        title=f"{opened.manifest.model}: {facts['ranks']}",
    )
    for row in rows:
        table.add_row(
            *(row["bucket"], str(row["rows"]), f"{row['us']:.1f}", f"{row['best_us']:.1f}"),
            *(f"{row['floor_us']:.1f}", f"{100 * row['share']:.1f} %"),
            *(f"{row['other_us_a_layer']:.2f}", f"{row['tokens_per_s']:.0f}"),
        )
    console.print(table)
    console.print(
        f"{facts['gpu']}: torch reads {facts['torch_read_tb_per_s']} TB/s and copies "
        f"{facts['torch_copy_tb_per_s']} TB/s; floor: the plan's bytes over "
        f"{facts['floor_bandwidth_tb_per_s']} TB/s",
        highlight=False,
    )


def _measure(engine: Engine, replays: int, context: int, trace: Path | None) -> dict[str, Any]:
    read, copy = bandwidths(engine.device)
    used = get_target(engine.bundle.manifest.target).read_bandwidth
    rows: list[dict[str, Any]] = []
    for bucket in engine.layout.buckets:
        if bucket.kind != "step":
            continue
        inputs = step_inputs(engine, bucket, context)
        check_graph(engine, bucket, inputs)
        rows.append(_row(engine, bucket, inputs, replays, used))
        if trace is not None:
            trace.mkdir(parents=True, exist_ok=True)
            events = perfetto(trace_step(engine, bucket, inputs))
            (trace / f"{bucket.name}.json").write_text(json.dumps(events))
    return {
        "model": engine.bundle.manifest.model,
        "ranks": engine.mode.label,
        "gpu": torch.cuda.get_device_name(),
        "torch_read_tb_per_s": round(read / 1e12, 3),
        "torch_copy_tb_per_s": round(copy / 1e12, 3),
        "floor_bandwidth_tb_per_s": used / 1e12,
        "planned_bytes": engine.layout.total * len(engine.mode.mine),
        "steps": rows,
    }


def _row(
    engine: Engine, bucket: Bucket, inputs: dict[str, Tensor], replays: int, bandwidth: float
) -> dict[str, Any]:
    plan = engine.layout.buckets[bucket].plan
    found = time_step(engine, bucket, inputs, replays)
    floor = plan.planned_bytes / bandwidth * 1e6
    layers = max(launch.layer for launch in plan.launches) + 1
    return {
        "bucket": bucket.name,
        "rows": plan.rows,
        "us": found.median_us,
        "best_us": found.best_us,
        "worst_us": found.worst_us,
        "replays": replays,
        "floor_us": floor,
        "share": floor / found.median_us,
        "other_us_a_layer": (found.median_us - floor) / layers,
        "tokens_per_s": 1e6 * bucket.batch / found.median_us,
        "launches": len(plan.launches),
        "predicted_us": plan.predicted_us,
    }
