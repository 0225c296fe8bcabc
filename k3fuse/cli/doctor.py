"""`k3fuse doctor`: what this machine can do with k3fuse, and what is missing for the rest."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib import metadata
from typing import Annotated

import torch
import typer
from rich.table import Table

from k3fuse.cli.output import console, emit_json
from k3fuse.target import TARGETS


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what can run here, and why the rest cannot."""
    facts = _facts()
    abilities = _abilities()
    if json_output:
        emit_json({"facts": facts, "abilities": abilities})
        return
    table = Table("what", "here", "why not, and the fix", title="k3fuse doctor")
    for name, value in facts.items():
        table.add_row(name, value, "")
    for ability in abilities:
        table.add_row(
            str(ability["name"]), "yes" if ability["ok"] else "no", str(ability["reason"])
        )
    console.print(table)


def _facts() -> dict[str, str]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "GPUs": ", ".join(gpus) or "none",
        "targets": ", ".join(TARGETS),
    }


def _abilities() -> list[dict[str, object]]:
    cutlass, cuda = _version("nvidia-cutlass-dsl"), _has("cuda.bindings")
    gpu = torch.cuda.is_available()
    return [
        _ability("compile plans", True, ""),
        _ability("run on the reference executor", True, ""),
        _ability(
            "compile kernels",
            cutlass is not None,
            "nvidia-cutlass-dsl is not installed: pip install 'k3fuse[compile]'",
        ),
        _ability(
            "launch kernels",
            gpu and cuda,
            "no CUDA GPU is visible to torch" if not gpu else "pip install 'k3fuse[gpu]'",
        ),
        _ability(
            "several ranks over NVLink",
            gpu and torch.cuda.device_count() > 1,
            "fewer than two CUDA GPUs are visible",
        ),
    ]


def _ability(name: str, ok: bool, reason: str) -> dict[str, object]:
    return {"name": name, "ok": ok, "reason": "" if ok else reason}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
