"""Check and time the kernels of real plans on a GPU that has neither the CuTe DSL nor a network.

    python benchmarks/kernels.py build .kbuild --set tiny,full    # anywhere with the compiler
    python benchmarks/kernels.py run .kbuild --time --json FILE   # on the GPU

`build` compiles the distinct launches of some models into one folder and lists what no kernel
family does yet. `run` gives each kernel a time limit and its own line of results: one that fails,
hangs or takes its process down ends with a reason, and the next goes on in a new process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, not installed

from benchmarks.gpu_worker import Worker, gpu_facts, say

TOKENS = (1, 2, 3, 5, 8, 16, 33, 64)
SETS: dict[str, tuple[tuple[str, int, tuple[int, ...], int], ...]] = {
    "smoke": (
        ("kimi-k3-tiny", 1, (1, 3), 0),
        ("kimi-k3-tiny", 2, (8,), 0),
        ("kimi-k3-tiny", 2, (2,), 4),
    ),
    "tiny": (
        ("kimi-k3-tiny", 1, TOKENS, 0),
        ("kimi-k3-tiny", 2, TOKENS, 0),
        ("kimi-k3-tiny", 8, (1, 3, 8, 64), 0),
        ("kimi-k3-tiny", 1, (1, 8), 8),
        ("kimi-k3-tiny", 2, (1, 3, 16), 4),
        ("kimi-linear-tiny", 1, (1, 8), 2),
        ("kimi-linear-tiny", 2, (1, 2, 33), 0),
    ),
    "mini": (
        ("kimi-k3-mini", 1, TOKENS, 0),
        ("kimi-k3-mini", 8, (1, 3, 8, 64), 0),
        ("kimi-k3-mini", 8, (2, 8), 8),
        ("kimi-k3-mini", 2, (3, 16), 4),
    ),
    "full": (
        ("kimi-k3", 16, TOKENS, 0),
        ("kimi-k3", 8, (1, 8, 64), 0),
        ("kimi-k3", 8, (1, 8), 8),
        ("kimi-k3", 16, (2, 16), 4),
    ),
}
"""Plans by name: model, ranks, requests of each bucket, rows of a verify step (0: no verify)."""

ARCH = "sm_90a"
SECONDS = 30  # for one kernel
START_SECONDS = 120
READ_BANDWIDTH = 4.6e12  # bytes/s that an H200 reads; the share of it is reported


def plans_of(names: str) -> list[tuple[str, int, tuple[int, ...], int]]:
    """Plans of comma-separated set names, or of one plan written MODEL:TP:BATCHES:VERIFY with
    batches joined by "+", or an example of a family written NAME=SIZES with sizes joined by "+"."""
    found: list[tuple[str, int, tuple[int, ...], int]] = []
    for name in names.split(","):
        if name in SETS:
            found += SETS[name]
        elif "=" in name:
            found.append((name, 1, (), 0))
        else:
            model, tp, batches, verify = name.split(":")
            found.append((model, int(tp), tuple(map(int, batches.split("+"))), int(verify)))
    return found


def programs_of(model: str, tp: int, batches: tuple[int, ...], verify: int) -> list[Any]:
    """(program, where it occurs) of every launch of a model's buckets."""
    from k3fuse.cli.load import builtin_source
    from k3fuse.compiler import buckets_of, compile_bucket
    from k3fuse.kernels.examples import example
    from k3fuse.lowering.launch_program import launch_programs
    from k3fuse.options import CompileOptions

    if "=" in model:
        name, sizes = model.split("=")
        return [(example(name, sizes.replace("+", ",")), f"example {name} {sizes}")]
    options = CompileOptions(target=ARCH, tp=tp, batches=batches, verify_rows=verify)
    module = builtin_source(model).meta_module()
    found: list[Any] = []
    for bucket in buckets_of(options):
        if verify and bucket.kind == "step" and bucket.rows_per_request == 1:
            continue  # plain steps are in another plan
        made = compile_bucket(module, model, bucket, options)
        for name, program in launch_programs(made.graph, made.plan).items():
            found.append((program, f"{model} tp{tp} {bucket.name} {name}"))
    return found


def build_folder(out: Path, names: str, only: str, debug: bool) -> None:
    from concurrent.futures import ProcessPoolExecutor

    from k3fuse.kernels.build import Request, build, write_folder
    from k3fuse.kernels.family import NotSupported
    from k3fuse.kernels.launch import LaunchConfig, configure
    from k3fuse.kernels.program_json import program_data
    from k3fuse.kernels.stages import outline
    from k3fuse.target import get_target

    target = get_target(ARCH)
    plans = plans_of(names)
    places: dict[Any, list[str]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(programs_of, *zip(*plans, strict=True)):
            for program, where in found:
                places.setdefault(program, []).append(where)
    configs: dict[str, tuple[LaunchConfig, list[str]]] = {}
    refused: Counter[str] = Counter()
    for program, where in places.items():
        try:
            config = configure(program, target, debug=debug)
        except NotSupported as reason:
            refused[f"{program.label}: {reason} ({where[0]})"] += 1
            continue
        if only in f"{program.label} {where[0]} {outline(config.stages)}":
            configs[config.label] = (config, where)
    refusals = [f"{count} programs of {what}" for what, count in refused.most_common()]

    def show(label: str, done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            print(f"{done}/{total} {label}", file=sys.stderr)

    def failed(error: str) -> None:
        refusals.append(error[:2000])
        print(error[:2000], file=sys.stderr)

    requests = [Request(config, ARCH) for config, _ in configs.values()]
    built = build(requests, progress=show, failed=failed)
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.cubin"), *out.glob("*.ptx")):
        old.unlink()
    write_folder(out, built.kernels)
    listed = [
        {
            "label": kernel.name,
            "where": configs[kernel.name][1][0],
            "count": len(configs[kernel.name][1]),
            "ops": configs[kernel.name][0].program.label,
            "stages": outline(configs[kernel.name][0].stages),
            "registers": kernel.registers,
            "stack": kernel.stack,
            "code": kernel.code,
            "grid": kernel.grid[0],
            "threads": kernel.block[0],
            "program": program_data(configs[kernel.name][0].program),
        }
        for kernel in built.kernels
    ]
    (out / "programs.json").write_text(json.dumps(listed))
    (out / "refused.json").write_text(json.dumps(refusals, indent=1))
    size = sum(path.stat().st_size for path in out.iterdir())
    print(
        f"{len(listed)} kernels in {out} ({size / 1e6:.1f} MB), {built.compiled} compiled now; "
        f"{len(places) - len(listed)} programs refused: {out / 'refused.json'}"
    )


def run(folder: Path, arguments: argparse.Namespace) -> int:
    """Hand the cases to a worker process, a new one after each that had to be ended."""
    listed = [case for case in read_cases(folder) if chosen(case, arguments.only)]
    facts: dict[str, Any] = {
        "commit": arguments.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }
    results: list[dict[str, Any]] = []
    failed_starts, begin = 0, time.monotonic()
    while len(results) < len(listed) and failed_starts < 3:
        worker = Worker(worker_command(folder, len(results), arguments))
        first = worker.line(START_SECONDS)
        if first is None or "gpu" not in first:
            failed_starts += 1
            worker.end()
            continue
        facts |= first
        while len(results) < len(listed):
            if time.monotonic() - begin > arguments.seconds:
                break
            line = worker.line(SECONDS)
            if line is None:
                case = {k: v for k, v in listed[len(results)].items() if k != "program"}
                results.append({**case, "ok": False, "why": worker.why(SECONDS)})
            else:
                results.append(line)
            print(json.dumps(results[-1] if arguments.verbose else short(results[-1])), flush=True)
            if line is None:
                break
        worker.end()
        if time.monotonic() - begin > arguments.seconds:
            facts["error"] = f"stopped after {arguments.seconds} s"
            break
    if len(results) < len(listed):
        facts.setdefault("error", "no worker starts")
        facts["not_run"] = len(listed) - len(results)
    bad = [r for r in results if not r["ok"]]
    facts |= {"kernels": len(results), "failed": len(bad), "seconds": time.monotonic() - begin}
    if arguments.json is not None:
        whole = {**facts, "results": results}
        arguments.json.write_text(json.dumps(whole, indent=1))
    failures = [{k: r[k] for k in ("label", "where", "stages", "why")} for r in bad]
    print(json.dumps({**facts, "failures": failures[:40]}, indent=1))
    return 1 if bad or "error" in facts else 0


def short(result: dict[str, Any]) -> dict[str, Any]:
    """What the line of a kernel says on a terminal."""
    found: dict[str, Any] = {k: result[k] for k in ("where", "stages", "ok")}
    worst = max(result.get("errors", {}).values(), default=0.0)
    found["error"] = float(f"{worst:.1e}")
    for key in ("us", "tb_per_s", "share"):
        if key in result:
            found[key] = round(result[key], 3)
    if not result["ok"]:
        found["why"] = result["why"]
    return found


def read_cases(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "programs.json").read_text())


def chosen(case: dict[str, Any], only: str) -> bool:
    """Whether a case has any of the comma-separated patterns in its names."""
    text = " ".join(str(case[k]) for k in ("label", "where", "ops", "stages"))
    return any(pattern in text for pattern in only.split(","))


def worker_command(folder: Path, first: int, arguments: argparse.Namespace) -> list[str]:
    """A worker that checks the cases from number `first` on."""
    command = [__file__, "worker", str(folder), "--first", str(first), "--only", arguments.only]
    command += ["--replays", str(arguments.replays), "--seed", str(arguments.seed)]
    return [*command, "--time"] if arguments.time else command


def work(folder: Path, arguments: argparse.Namespace) -> None:
    """Check, and time, one case after the other."""
    import torch

    from k3fuse.alone.check import check
    from k3fuse.alone.timing import time_launch
    from k3fuse.kernels.program_json import program_from
    from k3fuse.runtime.launcher import KernelFolder

    say(gpu_facts())
    kernels = KernelFolder(folder)
    listed = [case for case in read_cases(folder) if chosen(case, arguments.only)]
    for number, case in enumerate(listed[arguments.first :], arguments.first):
        program = program_from(case.pop("program"))
        result: dict[str, Any] = dict(case)
        begin = time.perf_counter()
        name, seed = case["label"], arguments.seed * 100003 + number
        try:
            facts = kernels.facts[name]
            found = check(kernels, name, facts, program, seed=seed, replays=arguments.replays)
            result |= found.as_dict()
            result["local_bytes"] = kernels.attribute(name, "LOCAL_SIZE_BYTES")
            if arguments.time:
                result |= time_launch(kernels, name, facts, program, READ_BANDWIDTH, seed=seed)
        except Exception as error:
            result |= {"ok": False, "why": f"{type(error).__name__}: {error}"[:500]}
            result["trace"] = traceback.format_exc(limit=-4)
        result["seconds"] = time.perf_counter() - begin
        say(result)
        if "CUDA" in result["why"]:  # the context may be lost: go on in a new process
            os._exit(3)
        if torch.cuda.memory_reserved() > 60 * 1000**3:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run", "worker"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--only", default="", help="patterns of ops, stages, models, layers")
    build = commands.choices["build"]
    build.add_argument("--set", default="smoke", help=f"{', '.join(SETS)}; or MODEL:TP:1+8:VERIFY")
    build.add_argument("--debug", action="store_true", help="spins are bounded and reported")
    for name in ("run", "worker"):
        command = commands.choices[name]
        command.add_argument("--replays", type=int, default=50)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--time", action="store_true")
    commands.choices["worker"].add_argument("--first", type=int, default=0)
    run_command = commands.choices["run"]
    run_command.add_argument("--json", type=Path, help="file for all results")
    run_command.add_argument("--commit", default="", help="what the kernels were built from")
    run_command.add_argument("--seconds", type=float, default=540, help="stop after this long")
    run_command.add_argument("--verbose", action="store_true", help="print whole results")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build_folder(arguments.folder, arguments.set, arguments.only, arguments.debug)
    elif arguments.command == "run":
        sys.exit(run(arguments.folder, arguments))
    else:
        work(arguments.folder, arguments)


if __name__ == "__main__":
    main()
