"""Check and time compiled kernels on a GPU that has neither the CuTe DSL nor a network.

    python benchmarks/kernels_h200.py build .kbuild        # anywhere with nvidia-cutlass-dsl
    python benchmarks/kernels_h200.py run .kbuild > json   # on the GPU
    python benchmarks/kernels_h200.py table                # compile time, registers, spills

`run` gives each kernel a time limit and its own line of results: one that fails, hangs or takes
its process down ends with a reason, and the next goes on in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, not installed

TOKENS = (1, 2, 3, 5, 8)
WEIGHTS = ((40, 192), (24, 7232), (3216, 7168), (448, 3584), (7168, 768))
ROWS = ((264, 3), (7168, 1), (7168, 16), (7168, 19))
ARCH = "sm_90a"
SECONDS = 90  # for one kernel, on top of the start of a process
START_SECONDS = 120
REPLAYS = 50
CHAIN, SHORT = 96, 16  # launches of the two chains whose difference is timed
GUARD, PATTERN = 1024, 0xA5
COLD_BYTES = 300 * 1000**2  # of distinct weights in a timed chain: five times the L2 of an H200
TOLERANCE = {"bf16": 4e-3, "f32": 2e-3}  # error norm over the norm of the result


def cases() -> Iterator[tuple[str, dict[str, int], dict[str, str]]]:
    """(kernel, shape, options) of everything that is checked; equal labels do not occur."""
    for n, k in WEIGHTS:
        for m in TOKENS:
            yield "projection", {"M": m, "N": n, "K": k}, {}
    for n, k in WEIGHTS:
        for m in (1, 8):
            yield "projection", {"M": m, "N": n, "K": k}, {"trigger": "last_tile"}
    for m in (1, 3, 8):
        yield "projection", {"M": m, "N": 448, "K": 3584}, {"out": "f32"}
    yield "projection", {"M": 2, "N": 1024, "K": 12288}, {}
    for h in (264, 7168):
        for m in TOKENS:
            yield "rms_norm", {"M": m, "H": h}, {}
    for h, t in ROWS:
        for m in TOKENS:
            yield "slots_rms_norm", {"M": m, "H": h, "T": t}, {}


def requests(arch: str) -> list[Any]:
    from k3fuse.kernels.build import Request
    from k3fuse.kernels.spec import get_kernel
    from k3fuse.target import get_target

    target = get_target(arch)
    return [
        Request(name, get_kernel(name).configure(shape, target, **options), arch)
        for name, shape, options in cases()
    ]


def build_folder(out: Path) -> None:
    from k3fuse.kernels.build import build, write_folder
    from k3fuse.kernels.spec import get_kernel

    def show(label: str, done: int, total: int) -> None:
        print(f"{done}/{total} {label}", file=sys.stderr)

    built = build(requests(ARCH), progress=show)
    write_folder(out, built.kernels)
    listed = [
        {
            "label": kernel.name,
            "kernel": name,
            "shape": shape,
            "options": options,
            "bytes": get_kernel(name).bytes_moved(shape),
        }
        for kernel, (name, shape, options) in zip(built.kernels, cases(), strict=True)
    ]
    (out / "cases.json").write_text(json.dumps(listed, indent=1))
    print(f"{len(listed)} kernels in {out}, {built.compiled} compiled now", file=sys.stderr)


def table() -> None:
    """Compile everything anew, one kernel after the other, for three architectures."""
    from k3fuse.kernels.build import dsl_version
    from k3fuse.kernels.spec import get_kernel

    print(dsl_version())
    print(f"{'arch':8} {'seconds':>7} {'regs':>4} {'stack':>5} {'code':>6} {'smem':>7}  kernel")
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        for request in requests(arch):
            start = time.perf_counter()
            made = get_kernel(request.kernel).compile(request.config, arch)
            seconds = time.perf_counter() - start
            print(
                f"{arch:8} {seconds:7.2f} {made.registers:4} {made.stack:5} {made.code:6} "
                f"{made.smem:7}  {made.name}"
            )


def run(folder: Path) -> None:
    """Hand the cases to a worker process, a new one after each that had to be ended."""
    listed: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    results: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    failed_starts = 0
    while len(results) < len(listed) and failed_starts < 3:
        worker = Worker(folder, len(results))
        first = worker.line(START_SECONDS)
        if first is None or "gpu" not in first:
            failed_starts += 1
            worker.end()
            continue
        facts = first
        while len(results) < len(listed):
            line = worker.line(SECONDS)
            if line is None:
                case = listed[len(results)]
                results.append({**case, "ok": False, "why": worker.why()})
                break
            results.append(line)
            print(f"{line['label']}: {line.get('why') or 'ok'}", file=sys.stderr)
        worker.end()
    failed = [r["label"] for r in results if not r["ok"]]
    if len(results) < len(listed):
        facts["error"] = f"no worker starts; {len(listed) - len(results)} kernels were not run"
    json.dump({**facts, "failed": failed, "results": results}, sys.stdout, indent=1)
    print()


class Worker:
    """A process that prints one JSON line a case, from case `first` on."""

    def __init__(self, folder: Path, first: int):
        command = [sys.executable, __file__, "worker", str(folder), str(first)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.put(text)
        self.lines.put(None)

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next result; None after the time limit or the end of the process."""
        limit = time.monotonic() + seconds
        while True:
            try:
                text = self.lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                return None
            if text is None:
                return None
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                print(text, end="", file=sys.stderr)

    def why(self) -> str:
        try:
            return f"the process ended with code {self.process.wait(timeout=2)}"
        except subprocess.TimeoutExpired:
            return f"no result after {SECONDS} s"

    def end(self) -> None:
        self.process.kill()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            print("a worker does not end; going on without it", file=sys.stderr)


def work(folder: Path, first: int) -> None:
    import torch

    from k3fuse.runtime.launcher import KernelFolder

    torch.manual_seed(first)  # pyright: ignore[reportUnknownMemberType]
    torch.zeros(1, device="cuda")
    kernels = KernelFolder(folder)
    say({"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__})
    listed: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    for case in listed[first:]:
        result: dict[str, Any] = dict(case)
        try:
            result |= check(kernels, case)
            result |= timed(kernels, case)
        except Exception as error:
            result |= {"ok": False, "why": f"{type(error).__name__}: {error}"}
            result["trace"] = traceback.format_exc(limit=4)
            say(result)
            if "CUDA" in str(error):  # the context may be lost: go on in a new process
                os._exit(3)
            continue
        say(result)


def say(data: dict[str, Any]) -> None:
    print(json.dumps(data), flush=True)


def random_inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Fresh inputs by parameter name."""
    import torch

    s = case["shape"]

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Any:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    if case["kernel"] == "projection":
        return {"w": normal(s["N"], s["K"], scale=s["K"] ** -0.5), "x": normal(s["M"], s["K"])}
    inputs = {"weight": normal(s["H"]), "x": normal(s["M"], s["H"])}
    if "T" in s:
        inputs["slots"] = normal(s["T"], s["M"], s["H"], dtype=torch.float32)
        inputs["slots"][:, :, ::7] = -0.0  # must add up to +0.0
        inputs["x"][:, ::7] = -0.0
    return inputs


def reference(case: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    from k3fuse import functional

    if case["kernel"] == "projection":
        dtype = torch.float32 if case["options"].get("out") == "f32" else torch.bfloat16
        return {"y": functional.linear(inputs["x"], inputs["w"], out_dtype=dtype)}
    h = inputs["x"]
    outputs: dict[str, Any] = {}
    if "slots" in inputs:
        total = inputs["slots"][0]
        for slot in inputs["slots"][1:]:
            total = total + slot
        h = (total + 0.0).to(torch.bfloat16) + h
        outputs["h"] = h
    return {**outputs, "y": functional.rms_norm(h, inputs["weight"], eps=1e-5)}


class Guarded:
    """A buffer between two guards, filled with a pattern that no result looks like."""

    def __init__(self, like: Any):
        import torch

        self.like = like
        size = GUARD * 2 + like.numel() * like.element_size()
        self.bytes = torch.full((size,), PATTERN, dtype=torch.uint8, device="cuda")
        self.address = self.bytes.data_ptr() + GUARD

    def poison(self) -> None:
        self.bytes.fill_(PATTERN)

    def value(self) -> Any:
        return self.bytes[GUARD:-GUARD].view(self.like.dtype).view(self.like.shape)

    def intact(self) -> bool:
        outside = (self.bytes[:GUARD], self.bytes[-GUARD:])
        return all(bool((part == PATTERN).all()) for part in outside)


def check(kernels: Any, case: dict[str, Any]) -> dict[str, Any]:
    """One launch against the reference, then replays that must give the same bits."""
    import torch

    inputs = random_inputs(case)
    expected = reference(case, inputs)
    kept = {name: value.clone() for name, value in inputs.items()}
    outputs = {name: Guarded(value) for name, value in expected.items()}
    addresses = {name: value.data_ptr() for name, value in inputs.items()}
    addresses |= {name: buffer.address for name, buffer in outputs.items()}
    launch = kernels.bind(case["label"], addresses)
    launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "registers": kernels.attribute(case["label"], "NUM_REGS"),
        "local_bytes": kernels.attribute(case["label"], "LOCAL_SIZE_BYTES"),
        "errors": {},
        "why": "",
    }
    for name, wanted in expected.items():
        got = outputs[name].value()
        norm = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
        error = float(norm.nan_to_num(float("inf")))
        found["errors"][name] = error
        limit = TOLERANCE["f32" if wanted.dtype == torch.float32 else "bf16"]
        if not error <= limit:
            found["why"] = f"{name}: error {error:.2e} above {limit:.0e}"
        if name == "h" and not torch.equal(got.view(torch.int16), wanted.view(torch.int16)):
            found["why"] = f"{name}: not the bits of the reference"
        if not outputs[name].intact():
            found["why"] = f"{name}: wrote outside of it"
    for name, value in inputs.items():
        if not torch.equal(value.view(torch.uint8), kept[name].view(torch.uint8)):
            found["why"] = f"{name}: an input changed"
    first = {name: buffer.bytes.clone() for name, buffer in outputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for buffer in outputs.values():
            buffer.poison()
        for _ in range(2):  # the second comes up while the first still runs
            launch(torch.cuda.current_stream().cuda_stream)
    different = 0
    for _ in range(REPLAYS):
        graph.replay()
        same = [torch.equal(b.bytes, first[name]) for name, b in outputs.items()]
        different += not all(same)
    if different:
        found["why"] = f"{different} of {REPLAYS} replays gave other bits"
    return {**found, "different_replays": different, "ok": not found["why"]}


def timed(kernels: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Microseconds a launch in a dependent chain over distinct inputs, several times the L2 in all.

    Small shapes stay in the L2 ("cold" false). The slope between a short and a long chain, so that
    the start of the graph does not count.
    """
    import torch

    size = case["bytes"]
    copies = max(2, min(CHAIN, -(-COLD_BYTES // size)))
    sets = [random_inputs(case) for _ in range(copies)]
    expected = reference(case, sets[0])
    launches: list[Callable[[int], None]] = []
    for index in range(CHAIN):
        inputs = sets[index % len(sets)]
        addresses = {name: value.data_ptr() for name, value in inputs.items()}
        addresses |= {name: value.data_ptr() for name, value in expected.items()}
        launches.append(kernels.bind(case["label"], addresses))
    short, long = chain(launches[:SHORT]), chain(launches)
    us = (median_us(long) - median_us(short)) / (CHAIN - SHORT)
    torch.cuda.synchronize()
    cold = size * len(sets) > 2 * 60 * 2**20
    return {"us": us, "cold": cold, "tb_per_s": size / us * 1e-6, "share": size / us * 1e-6 / 4.6}


def chain(launches: list[Callable[[int], None]]) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch(torch.cuda.current_stream().cuda_stream)
    return graph


def median_us(graph: Any) -> float:
    """Median of replays, each after reading other memory: no chain starts with a warm L2."""
    import torch

    other = torch.zeros(64 * 1000**2, device="cuda")
    times: list[float] = []
    for _ in range(25):
        other.amax()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run", "worker"):
        commands.add_parser(name).add_argument("folder", type=Path)
    commands.choices["worker"].add_argument("first", type=int)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build_folder(arguments.folder)
    elif arguments.command == "run":
        run(arguments.folder)
    elif arguments.command == "worker":
        work(arguments.folder, arguments.first)
    else:
        table()


if __name__ == "__main__":
    main()
