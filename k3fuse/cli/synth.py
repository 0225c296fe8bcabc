"""`k3fuse synth`: a synthetic checkpoint in the real layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3fuse.checkpoint.safetensors_header import tensor_bytes
from k3fuse.checkpoint.synth import synthesize
from k3fuse.cli.load import builtin_source
from k3fuse.cli.output import console, emit_json, progress
from k3fuse.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("synth")(synth)


def synth(
    model: Annotated[
        str,
        typer.Argument(help="Built-in config: kimi-k3-tiny, kimi-k3-mini, kimi-linear-tiny ..."),
    ],
    directory: Annotated[Path, typer.Argument(help="Directory to create.")],
    seed: Annotated[int, typer.Option(help="Same seed, same bytes, whatever the shards.")] = 0,
    shards: Annotated[int, typer.Option(help="Number of safetensors files.")] = 2,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write a checkpoint with random weights under the real names, shapes and dtypes."""
    if shards < 1:
        raise InputError(f"--shards {shards}: a checkpoint has at least one file")
    source = builtin_source(model)
    tensors = {s.name: s for spec in source.specs for s in spec.sources}
    total = sum(tensor_bytes(s) for s in tensors.values())
    with progress(f"synth {model}") as task:
        task.total(total)
        synthesize(
            source.specs,
            source.family.to_hf(source.config),
            directory,
            init=source.family.init(source.config),
            seed=seed,
            shards=shards,
            progress=task.advance,
        )
    summary = {"model": model, "directory": str(directory), "seed": seed, "shards": shards}
    if json_output:
        emit_json({**summary, "tensors": len(tensors), "bytes": total})
    else:
        console.print(
            f"{model}: {len(tensors)} tensors, {total / 1e6:.1f} MB in {shards} shards "
            f"-> {directory}",
            markup=False,
        )
