"""`k3fuse roofline`: the floor of a decode step, and how far a measured step is from it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from k3fuse.cli.output import console, emit_json
from k3fuse.models.registry import builtin_config
from k3fuse.roofline import expected_distinct_experts, roofline
from k3fuse.target import get_target


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("roofline")(roofline_)


def roofline_(
    model: Annotated[str, typer.Argument(help="Built-in config: kimi-k3, kimi-linear ...")],
    tp: Annotated[int, typer.Option(help="GPUs that share the weights.")] = 1,
    gpu: Annotated[str, typer.Option(help="GPU: h200, b200, b300, gb200, gb300.")] = "h200",
    batch: Annotated[int, typer.Option(help="Requests in the step.")] = 1,
    measured_ms: Annotated[
        float | None, typer.Option(help="A measured step, to state its share.")
    ] = None,
    head_and_state: Annotated[
        bool, typer.Option("--head-and-state", help="Count LM head and KDA state too.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """State the least bytes a step must read, and the time they take at nominal bandwidth."""
    config, target = builtin_config(model), get_target(gpu)
    result = roofline(config, target, tp, batch, measured_ms, include_head_and_state=head_and_state)
    distinct = expected_distinct_experts(config.num_experts, config.top_k, batch)
    data: dict[str, object] = {
        "model": model,
        "gpu": target.name,
        "tp": tp,
        "batch": batch,
        "bytes": result.counted_bytes,
        "distinct_experts": distinct,
        "bandwidth_bytes_per_s": result.bandwidth,
        "floor_ms": result.floor_ms,
        "reachable_ms": result.reachable_ms,
        "tokens_per_s": result.tokens_per_s,
        "measured_ms": measured_ms,
        "share": result.share,
        "everything_else_ms": result.everything_else_ms,
        "everything_else_us_per_layer": result.everything_else_us_per_layer,
    }
    if json_output:
        emit_json(data)
        return
    table = Table(title=f"{model} on {tp} x {target.name}, batch {batch}", show_header=False)
    rows = [
        ("bytes read by the group", f"{result.counted_bytes / 1e9:.2f} GB"),
        ("distinct experts a layer", f"{distinct:.1f}"),
        ("bandwidth (nominal)", f"{result.bandwidth / 1e12:.1f} TB/s"),
        ("floor", f"{result.floor_ms:.3f} ms, {result.tokens_per_s:.0f} tok/s"),
        ("floor at reachable read bandwidth", f"{result.reachable_ms:.3f} ms"),
    ]
    if measured_ms is not None and result.share is not None:
        rows += [
            ("measured", f"{measured_ms:.3f} ms, {batch * 1e3 / measured_ms:.1f} tok/s"),
            ("share of the floor", f"{result.share:.1%}"),
            (
                "everything else",
                f"{result.everything_else_ms:.3f} ms, "
                f"{result.everything_else_us_per_layer:.1f} us a layer",
            ),
        ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
