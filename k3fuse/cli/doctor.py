"""`k3fuse doctor`: what this machine can do with k3fuse, and what is missing for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from k3fuse.cli.output import console, emit_json
from k3fuse.report.units import human_bytes
from k3fuse.runtime.bundle import read_bundle
from k3fuse.runtime.fit import Answer, Demand, abilities, demand, stands_for, ways
from k3fuse.runtime.machine import Gpu, Machine, probe
from k3fuse.target import TARGETS


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    bundle: Annotated[
        Path | None, typer.Argument(help="Bundle directory: say too how it can run here.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what can run here, and why the rest cannot."""
    wants = None if bundle is None else demand(read_bundle(bundle))
    machine = probe()
    if json_output:
        emit_json(_as_json(machine, wants))
        return
    table = Table("what", "here", "why not, and the fix", title="k3fuse doctor")
    for name, value in _facts(machine).items():
        table.add_row(name, value, "")
    _add(table, abilities(machine))
    console.print(table)
    if machine.gpus:
        console.print(_gpu_table(machine))
    if wants is not None:
        console.print(_memory_table(wants))
        table = Table("way", "here", "what is missing, and the fix", title=f"{bundle}")
        _add(table, ways(machine, wants))
        console.print(table)


def _facts(machine: Machine) -> dict[str, str]:
    takes = f", takes CUDA {machine.driver_cuda}" if machine.driver_cuda else ""
    return {
        "python": machine.python,
        "machine": machine.system,
        "torch": f"{machine.torch}, {f'CUDA {machine.cuda}' if machine.cuda else 'no CUDA'}",
        "driver": f"{machine.driver or 'unknown'}{takes}" if machine.driver or takes else "none",
        "cuda-python": machine.cuda_python or "none",
        "nvidia-cutlass-dsl": machine.cutlass or "none",
        "symmetric memory": "yes" if machine.symmetric_memory else "no",
        "GPUs": ", ".join(gpu.name for gpu in machine.gpus) or "none",
        "targets": ", ".join(TARGETS),
    }


def _target(gpu: Gpu) -> str:
    row = stands_for(gpu)
    return "" if row is None else row.name


def _add(table: Table, answers: Sequence[Answer]) -> None:
    for answer in answers:
        first, *others = answer.missing or ("",)
        table.add_row(answer.name, "yes" if answer.ok else "no", first)
        for reason in others:
            table.add_row("", "", reason)


def _gpu_table(machine: Machine) -> Table:
    table = Table("GPU", "name", "capability", "target", "SMs", "free", "total", "reaches")
    for gpu, row in zip(machine.gpus, machine.peers, strict=True):
        reaches = [str(i) for i, ok in enumerate(row) if ok and i != gpu.index]
        table.add_row(
            str(gpu.index),
            gpu.name,
            "{}.{}".format(*gpu.capability),
            _target(gpu) or "none",
            str(gpu.sm_count),
            human_bytes(gpu.free),
            human_bytes(gpu.total),
            " ".join(reaches) or "none",
        )
    return table


def _memory_table(wants: Demand) -> Table:
    table = Table(*asdict(wants.need), "one rank", title="memory of a rank, all buckets")
    parts = [*asdict(wants.need).values(), wants.need.total]
    table.add_row(*(human_bytes(part) for part in parts))
    return table


def _as_json(machine: Machine, wants: Demand | None) -> dict[str, object]:
    data: dict[str, object] = {
        "facts": _facts(machine),
        "gpus": [{**asdict(gpu), "target": _target(gpu)} for gpu in machine.gpus],
        "peers": machine.peers,
        "abilities": [_answer(answer) for answer in abilities(machine)],
    }
    if wants is not None:
        data["bundle"] = {
            "tp": wants.tp,
            "target": wants.target.name,
            "memory": {**asdict(wants.need), "total": wants.need.total},
            "ways": [_answer(answer) for answer in ways(machine, wants)],
        }
    return data


def _answer(answer: Answer) -> dict[str, object]:
    return {"name": answer.name, "ok": answer.ok, "missing": answer.missing}
