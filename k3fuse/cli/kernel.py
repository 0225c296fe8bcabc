"""`k3fuse kernel`: compile one kernel for a shape, and on a GPU check and time it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from k3fuse import functional
from k3fuse.cli.output import console, emit_json
from k3fuse.errors import InputError, RefusedError
from k3fuse.kernels.build import Request, build, write_folder
from k3fuse.kernels.spec import CompiledKernel, KernelSpec, get_kernel
from k3fuse.runtime.launcher import KernelFolder
from k3fuse.target import Target, get_target

Tensors = dict[str, torch.Tensor]

GUARD = 1024  # bytes on each side of an output that must keep their pattern
PATTERN = 0xA5
TOLERANCE = 2e-2  # largest error over the largest value: bf16 keeps 8 bits of each result
REPEATS = 50


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("kernel")(kernel)


def kernel(
    name: Annotated[str, typer.Argument(help="projection, rms_norm, slots_rms_norm.")],
    shape: Annotated[str, typer.Option(help="Sizes in order: M,N,K (projection), M,H or M,H,T.")],
    target: Annotated[str, typer.Option(help="GPU or architecture: h200, sm_90a ...")] = "sm_90a",
    run: Annotated[bool, typer.Option("--run", help="Check and time it on this GPU.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compile a kernel for one shape; say what it uses, and with --run what it reaches."""
    spec, gpu = get_kernel(name), get_target(target)
    shapes = _shapes(spec, shape)
    request = Request(name, spec.configure(shapes, gpu), gpu.arch)
    built = build([request])  # a quarter of a second, and as much again for the worker
    compiled = built.kernels[0]
    data: dict[str, Any] = {
        "kernel": name,
        "shape": shapes,
        "target": gpu.name,
        "cached": built.compiled == 0,
        "launch": compiled.launch_facts(),
        "bytes_moved": spec.bytes_moved(shapes),
    }
    if run:
        data["run"] = _run(spec, compiled, shapes, gpu)
    if json_output:
        emit_json(data)
    else:
        _print(data, compiled)
    if run and not data["run"]["ok"]:
        raise RefusedError(f"kernel {name} {shape}: {data['run']['why']}")


def _shapes(spec: KernelSpec, text: str) -> dict[str, int]:
    parts = text.split(",")
    wanted = ",".join(spec.dims)
    if len(parts) != len(spec.dims) or not all(p.strip().isdigit() for p in parts):
        raise InputError(f"--shape {text}: {spec.name} takes {wanted}, for example 1,3216,7168")
    return dict(zip(spec.dims, map(int, parts), strict=True))


def _print(data: dict[str, Any], compiled: CompiledKernel) -> None:
    table = Table(title=compiled.name, show_header=False)
    rows = [
        ("architecture", compiled.arch),
        ("grid, block", f"{compiled.grid}, {compiled.block}"),
        ("cluster", str(compiled.cluster or "none")),
        ("shared memory", f"{compiled.smem} B"),
        ("registers, stack", f"{compiled.registers}, {compiled.stack} B"),
        ("machine code", f"{compiled.code} B"),
        ("parameters", ", ".join(f"{p.name} ({p.access})" for p in compiled.params)),
        ("least bytes moved", f"{data['bytes_moved']:,}"),
        ("from the cache", "yes" if data["cached"] else "no"),
    ]
    if "run" in data:
        result = data["run"]
        rows += [
            ("correct", "yes" if result["ok"] else f"no: {result['why']}"),
            ("largest error", f"{result['error']:.2e} of the largest value"),
            ("time", f"{result['us']:.2f} us"),
            ("bandwidth", f"{result['share']:.1%} of what the card reads"),
        ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _run(
    spec: KernelSpec, compiled: CompiledKernel, shapes: dict[str, int], gpu: Target
) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise InputError(
            "--run needs a CUDA GPU and a CUDA build of torch; leave it out to compile"
        )
    torch.zeros(1, device="cuda")  # makes the context that the launcher uses
    inputs, expected = _CASES[spec.name](shapes)
    memory = {k: _guarded(v.shape, v.dtype) for k, v in expected.items()}
    addresses = {k: v.data_ptr() for k, v in inputs.items()}
    addresses |= {k: v.data_ptr() + GUARD for k, v in memory.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), [compiled])
        launch = KernelFolder(Path(folder)).bind(compiled.name, addresses)
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        error, why = 0.0, ""
        for key, wanted in expected.items():
            result = _inside(memory[key], wanted)
            difference = (result.double() - wanted.double()).abs().max() / wanted.abs().max()
            error = max(error, float(difference.nan_to_num(torch.inf)))
            if not _guards_intact(memory[key]):
                why = f"wrote outside of {key}"
        if error > TOLERANCE:
            why = f"error {error:.2e} above {TOLERANCE:.0e}"
        us = _time(launch)
    moved = spec.bytes_moved(shapes)
    share = moved / (us * 1e-6) / gpu.read_bandwidth
    return {"ok": not why, "why": why, "error": error, "us": us, "bytes": moved, "share": share}


def _guarded(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of a tensor between two guards, all one pattern: what is not written shows."""
    size = shape.numel() * dtype.itemsize
    return torch.full((GUARD + size + GUARD,), PATTERN, dtype=torch.uint8, device="cuda")


def _inside(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory[GUARD:-GUARD].view(like.dtype).view(like.shape)


def _guards_intact(memory: torch.Tensor) -> bool:
    return bool((memory[:GUARD] == PATTERN).all() and (memory[-GUARD:] == PATTERN).all())


def _time(launch: Callable[[int], None]) -> float:
    """Microseconds a launch in a captured chain; weights that fit the L2 come from there."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            launch(torch.cuda.current_stream().cuda_stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS


def _random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def _projection(s: dict[str, int]) -> tuple[Tensors, Tensors]:
    x, w = _random(s["M"], s["K"]), _random(s["N"], s["K"], scale=s["K"] ** -0.5)
    return {"x": x, "w": w}, {"y": functional.linear(x, w)}


def _rms_norm(s: dict[str, int]) -> tuple[Tensors, Tensors]:
    x, weight = _random(s["M"], s["H"]), _random(s["H"])
    return {"x": x, "weight": weight}, {"y": functional.rms_norm(x, weight, eps=1e-5)}


def _slots_rms_norm(s: dict[str, int]) -> tuple[Tensors, Tensors]:
    inputs, _ = _rms_norm(s)
    slots = _random(s["T"], s["M"], s["H"], dtype=torch.float32)
    total = slots[0]
    for slot in slots[1:]:
        total = total + slot
    h = (total + 0.0).bfloat16() + inputs["x"]
    y = functional.rms_norm(h, inputs["weight"], eps=1e-5)
    return {**inputs, "slots": slots}, {"h": h, "y": y}


_CASES: dict[str, Callable[[dict[str, int]], tuple[Tensors, Tensors]]] = {
    "projection": _projection,
    "rms_norm": _rms_norm,
    "slots_rms_norm": _slots_rms_norm,
}
