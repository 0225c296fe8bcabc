"""`k3fuse kernel`: compile the kernel of one launch, and on a GPU check and time it."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from k3fuse.alone.check import check
from k3fuse.alone.timing import time_launch
from k3fuse.cli.load import builtin_source
from k3fuse.cli.output import console, emit_json
from k3fuse.compiler import buckets_of, compile_bucket
from k3fuse.errors import InputError, RefusedError
from k3fuse.kernels.build import Request, build, write_folder
from k3fuse.kernels.examples import EXAMPLES, example
from k3fuse.kernels.family import NotSupported
from k3fuse.kernels.launch import configure, describe
from k3fuse.kernels.program import Program
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.lowering.launch_program import launch_programs
from k3fuse.options import CompileOptions
from k3fuse.runtime.launcher import KernelFolder
from k3fuse.target import Target, get_target

NAMES = ", ".join(f"{name} ({','.join(known.dims)})" for name, known in EXAMPLES.items())


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("kernel")(kernel)


def kernel(
    name: Annotated[str, typer.Argument(help=f"An example with its sizes: {NAMES}.")] = "",
    shape: Annotated[str, typer.Option(help="Sizes of the example in order.")] = "",
    model: Annotated[str, typer.Option(help="Built-in model, for a launch of its plan.")] = "",
    launch: Annotated[str, typer.Option(help="Name of a launch, as `compile` shows it.")] = "",
    tp: Annotated[int, typer.Option(help="Ranks of the plan.")] = 1,
    batch: Annotated[int, typer.Option(help="Requests of the plan's step.")] = 1,
    verify_rows: Annotated[int, typer.Option(help="Rows a request of a verify step.")] = 0,
    target: Annotated[str, typer.Option(help="GPU or architecture: h200, sm_90a ...")] = "sm_90a",
    run: Annotated[bool, typer.Option("--run", help="Check and time it on this GPU.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compile the kernel of a launch; say what it does and uses, and with --run what it reaches."""
    gpu = get_target(target)
    if bool(name) == bool(model):
        raise InputError("name one: an example with --shape, or a launch with --model and --launch")
    if name:
        what, program = f"{name} {shape}", example(name, shape)
    else:
        options = CompileOptions(target=gpu.name, tp=tp, batches=(batch,), verify_rows=verify_rows)
        what, program = launch, _launch_of(model, launch, options)
    try:
        config = configure(program, gpu)
    except NotSupported as reason:
        raise RefusedError(f"no kernel does {what}: {reason}") from None
    built = build([Request(config, gpu.arch)])
    compiled = built.kernels[0]
    data: dict[str, Any] = {
        "kernel": what,
        "ops": program.label,
        "target": gpu.name,
        "cached": built.compiled == 0,
        "launch": compiled.launch_facts(),
        "stages": describe(config)["stages"],
    }
    if run:
        data["run"] = _run(compiled, config.program, gpu)
    if json_output:
        emit_json(data)
    else:
        _print(data, compiled)
    if run and not data["run"]["ok"]:
        raise RefusedError(f"kernel {what}: {data['run']['why']}")


def _launch_of(model: str, name: str, options: CompileOptions) -> Program:
    """The program of a launch of the last bucket that has it: verify before step."""
    module = builtin_source(model).meta_module()
    known: list[str] = []
    for bucket in reversed(buckets_of(options)):
        made = compile_bucket(module, model, bucket, options)
        programs = launch_programs(made.graph, made.plan)
        if name in programs:
            return programs[name]
        known += programs
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.3)
    raise InputError(f"{model} has no launch {name!r}; near: {', '.join(near)}")


def _print(data: Mapping[str, Any], compiled: CompiledKernel) -> None:
    table = Table(title=compiled.name, show_header=False)
    rows = [
        ("ops", data["ops"]),
        ("stages", "; ".join(_stage(stage) for stage in data["stages"])),
        ("families", "; ".join(_family(stage) for stage in data["stages"])),
        ("architecture", compiled.arch),
        ("grid, block", f"{compiled.grid}, {compiled.block}"),
        ("cluster", str(compiled.cluster or "none")),
        ("shared memory", f"{compiled.smem} B"),
        ("scratch memory", f"{compiled.scratch} B"),
        ("registers, stack", f"{compiled.registers}, {compiled.stack} B"),
        ("machine code", f"{compiled.code} B"),
        ("parameters", ", ".join(f"{p.name} ({p.access})" for p in compiled.params)),
        ("from the cache", "yes" if data["cached"] else "no"),
    ]
    if "run" in data:
        result = data["run"]
        worst = max(result["errors"].values(), default=0.0)
        rows += [
            ("correct", "yes" if result["ok"] else f"no: {result['why']}"),
            ("largest error", f"{worst:.2e}, norm of the error over the norm of the result"),
            ("bytes moved", f"{result['bytes']:,}" + ("" if result["cold"] else ", from the L2")),
            ("time", f"{result['us']:.2f} us"),
            ("bandwidth", f"{result['tb_per_s']:.2f} TB/s, {result['share']:.1%} of what it reads"),
        ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _family(stage: Mapping[str, Any]) -> str:
    """The family taken, and those before it in the table with their reasons."""
    refused = f" (not {', '.join(stage['refused'])})" if stage["refused"] else ""
    return f"{stage['kind']}: {stage['family']}{refused}"


def _stage(stage: Mapping[str, Any]) -> str:
    notes = [f"behind barrier {stage['after_barriers']}"] if stage["after_barriers"] else []
    notes += ["by every CTA"] if stage["private"] else []
    ops = ", ".join(dict.fromkeys(stage["ops"]))
    return f"{stage['kind']}: {ops}" + (f" ({', '.join(notes)})" if notes else "")


def _run(compiled: CompiledKernel, program: Program, gpu: Target) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise InputError(
            "--run needs a CUDA GPU and a CUDA build of torch; leave it out to compile"
        )
    torch.zeros(1, device="cuda")  # makes the context that the launcher uses
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), [compiled])
        kernels = KernelFolder(Path(folder))
        facts = kernels.facts[compiled.name]
        found = check(kernels, compiled.name, facts, program)
        times = time_launch(kernels, compiled.name, facts, program, gpu.read_bandwidth)
    return {**found.as_dict(), **times}
