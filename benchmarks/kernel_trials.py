"""Try compiled kernels on inputs that kernels of this field got wrong, on a GPU without the DSL.

    python benchmarks/kernel_trials.py build .ktrials            # anywhere with the compiler
    python benchmarks/kernel_trials.py run .ktrials --json FILE  # on the GPU

The trials are in `k3fuse/alone/trials/`. After them comes the parity of rows: every launch of
some models on a row alone and on that row among others. A trial that hangs or takes its process
down ends with a reason, and the next goes on in a new process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, not installed

from benchmarks.gpu_worker import Worker, gpu_facts, say

ARCH = "sm_90a"
SECONDS = 30  # for one trial
START_SECONDS = 120
TWO_LAYERS = ("layers.1.", "layers.3.")  # KDA and MLA, both with experts
PARITY = (
    ("kimi-k3-tiny", 1, 8, ("",)),
    ("kimi-k3-tiny", 2, 8, ("",)),
    ("kimi-k3-mini", 1, 8, TWO_LAYERS),
    ("kimi-k3-mini", 8, 8, TWO_LAYERS),
    ("kimi-k3-mini", 8, 64, TWO_LAYERS),
    ("kimi-k3", 8, 8, TWO_LAYERS),
)
"""Model, ranks, rows beside a row alone, launches by the start of their names."""
PADDED = (("kimi-k3-tiny", 2, 8, 0), ("kimi-k3-tiny", 2, 3, 4))
"""Model, ranks, requests and rows of a verify step (0: plain) of launches with padding."""


def programs_of(model: str, tp: int, batches: tuple[int, ...], verify: int) -> dict[str, Any]:
    """Bucket -> launch -> program."""
    from k3fuse.cli.load import builtin_source
    from k3fuse.compiler import buckets_of, compile_bucket
    from k3fuse.lowering.launch_program import launch_programs
    from k3fuse.options import CompileOptions

    options = CompileOptions(target=ARCH, tp=tp, batches=batches, verify_rows=verify)
    module = builtin_source(model).meta_module()
    found: dict[str, Any] = {}
    for bucket in buckets_of(options):
        made = compile_bucket(module, model, bucket, options)
        found[bucket.name] = launch_programs(made.graph, made.plan)
    return found


class Builder:
    """Configurations of all programs asked for, by label."""

    def __init__(self) -> None:
        from k3fuse.target import get_target

        self.target = get_target(ARCH)
        self.configs: dict[str, Any] = {}
        self.refused: dict[str, str] = {}

    def label(self, program: Any, where: str) -> str | None:
        """The kernel's name; None for a program that no family does."""
        from k3fuse.kernels.family import NotSupported
        from k3fuse.kernels.launch import configure

        try:
            config = configure(program, self.target)
        except NotSupported as reason:
            self.refused[where] = str(reason)
            return None
        self.configs[config.label] = config
        return config.label


def build_folder(out: Path) -> None:
    from k3fuse.alone.parity import unlike
    from k3fuse.alone.trials import trials
    from k3fuse.kernels.build import Request, build, write_folder
    from k3fuse.kernels.program_json import program_data

    builder = Builder()
    items: list[dict[str, Any]] = []
    for trial in trials():
        cases = {n: builder.label(c.program, f"{trial.title}, {n}") for n, c in trial.cases.items()}
        items.append({"kind": "trial", "name": trial.title, "cases": cases})
    for model, tp, batch, verify in PADDED:
        padded: dict[str, str | None] = {}
        for bucket, programs in programs_of(model, tp, (batch,), verify).items():
            if bucket.startswith("commit") or (verify and bucket.endswith("_q1")):
                continue
            for name, program in programs.items():
                label = builder.label(program, f"{model} tp{tp} {bucket} {name}")
                if label not in padded.values():
                    padded[name] = label
        name = f"B45 launches of {model}, {tp} ranks, {batch} requests of {verify or 1} rows"
        items.append({"kind": "padding", "name": name, "cases": padded})
    for model, tp, rows, prefixes in PARITY:
        buckets = programs_of(model, tp, (1, rows), 0)
        alone, together = (buckets[f"step_b{count}_q1"] for count in (1, rows))
        for name in dict.fromkeys([*alone, *together]):
            one, many = alone.get(name), together.get(name)
            ops = (one or many).label
            if not name.startswith(prefixes) or ops == "l2_prefetch":
                continue
            where = f"{model} tp{tp} {name}"
            item: dict[str, Any] = {"kind": "parity", "name": where, "ops": ops, "rows": rows}
            if one is None or many is None:
                item["why"] = f"a launch of the step of {rows if one is None else 1} rows only"
            elif (why := unlike(one, many)) is not None:
                item["why"] = why
            else:
                item["cases"] = [builder.label(program, where) for program in (one, many)]
            items.append(item)
    failures: list[str] = []

    def show(label: str, done: int, total: int) -> None:
        if done % 10 == 0 or done == total:
            print(f"{done}/{total} {label}", file=sys.stderr)

    def failed(error: str) -> None:
        failures.append(error[:2000])
        print(error[:2000], file=sys.stderr)

    requests = [Request(config, ARCH) for config in builder.configs.values()]
    built = build(requests, progress=show, failed=failed)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.cubin"):
        old.unlink()
    write_folder(out, built.kernels)
    listed = {
        "items": items,
        "programs": {name: program_data(c.program) for name, c in builder.configs.items()},
        "refused": builder.refused,
        "failures": failures,
    }
    (out / "trials.json").write_text(json.dumps(listed))
    size = sum(path.stat().st_size for path in out.iterdir())
    print(
        f"{len(items)} trials, {len(built.kernels)} kernels in {out} ({size / 1e6:.1f} MB), "
        f"{built.compiled} compiled now, {len(failures)} failed; refused: {builder.refused}"
    )


def read_items(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trials.json").read_text())["items"]


def run(folder: Path, arguments: argparse.Namespace) -> int:
    """Hand the items to a worker process, a new one after each that had to be ended."""
    from k3fuse.alone.trials import ELSEWHERE

    items = [item for item in read_items(folder) if chosen(item, arguments.only)]
    facts: dict[str, Any] = {
        "commit": arguments.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }
    results: list[dict[str, Any]] = []
    failed_starts, begin = 0, time.monotonic()
    while len(results) < len(items) and failed_starts < 3:
        worker = Worker(
            [
                __file__,
                "worker",
                str(folder),
                "--first",
                str(len(results)),
                "--only",
                arguments.only,
            ]
        )
        first = worker.line(START_SECONDS)
        if first is None or "gpu" not in first:
            failed_starts += 1
            worker.end()
            continue
        facts |= first
        while len(results) < len(items):
            line = worker.line(SECONDS)
            if line is None:
                item = items[len(results)]
                line = {"kind": item["kind"], "name": item["name"], "ok": False}
                results.append({**line, "wrong": [worker.why(SECONDS)]})
                break
            results.append(line)
        worker.end()
    if len(results) < len(items):
        facts["error"] = f"{len(items) - len(results)} trials were not run: no worker starts"
    tried = [{k: v for k, v in r.items() if k != "kind"} for r in results if r["kind"] != "parity"]
    rows = [r for r in results if r["kind"] == "parity"]
    for result in rows:
        result["launch"] = result.pop("name")
        del result["kind"]
    bad = [r for r in tried if not r["ok"]] + [r for r in rows if "wrong" in r]
    summary = {
        **facts,
        "seconds": round(time.monotonic() - begin, 1),
        "trials": len(tried),
        "failed": len(bad),
        "launches_with_parity": sum(r.get("equal") is True for r in rows),
        "launches_without": sum(r.get("equal") is False for r in rows),
        "launches_not_compared": sum("why" in r for r in rows),
    }
    if arguments.json is not None:
        elsewhere = {fault: f"not a kernel's matter: {at}" for fault, at in ELSEWHERE.items()}
        whole = {**summary, "results": tried, "elsewhere": elsewhere, "parity": rows}
        arguments.json.write_text(json.dumps(whole, indent=1))
    print(json.dumps({**summary, "failures": bad[:40]}, indent=1))
    for result in rows:
        if result.get("equal") is not True:
            print(json.dumps(result))
    return 1 if bad or "error" in facts else 0


def chosen(item: dict[str, Any], only: str) -> bool:
    """Whether an item has any of the comma-separated patterns in its name."""
    return any(pattern in f"{item['kind']} {item['name']}" for pattern in only.split(","))


def work(folder: Path, arguments: argparse.Namespace) -> None:
    """Run one item after the other."""

    from k3fuse.alone.launching import Case, Kernel
    from k3fuse.alone.parity import parity
    from k3fuse.alone.trials import padding_trial, trials
    from k3fuse.kernels.program_json import program_from
    from k3fuse.runtime.launcher import KernelFolder

    say(gpu_facts())
    kernels = KernelFolder(folder)
    data = json.loads((folder / "trials.json").read_text())
    known = {trial.title: trial for trial in trials()}
    compared: dict[tuple[str, str], dict[str, Any]] = {}
    items = [item for item in data["items"] if chosen(item, arguments.only)]

    def kernel(name: str | None, case: Case | None = None) -> Kernel:
        if name not in kernels.facts:
            raise ValueError(f"not built: {name}, {data['refused']}")
        case = case or Case.of(program_from(data["programs"][name]))
        return Kernel(kernels, name, kernels.facts[name], case)

    def attempt(item: dict[str, Any]) -> dict[str, Any]:
        labels = item.get("cases", {})
        if item["kind"] == "parity":
            facts = {"ops": item["ops"], "rows": item["rows"]}
            if "why" in item:
                return {**facts, "equal": None, "max_diff": None, "why": item["why"]}
            one, many = labels
            if (one, many) not in compared:
                compared[one, many] = parity(kernel(one), kernel(many))
            return {**facts, **compared[one, many]}
        if item["kind"] == "padding":
            programs = {n: program_from(data["programs"][label]) for n, label in labels.items()}
            trial = padding_trial(programs)
        else:
            trial = known[item["name"]]
        given = {n: kernel(labels[n], case) for n, case in trial.cases.items()}
        wrong = list(trial.run(given))
        return {"right": trial.right, "cases": list(given), "ok": not wrong, "wrong": wrong}

    for item in items[arguments.first :]:
        result: dict[str, Any] = {"kind": item["kind"], "name": item["name"]}
        begin = time.perf_counter()
        try:
            result |= attempt(item)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"[:500]
            result |= {"ok": False, "wrong": [wrong], "trace": traceback.format_exc(limit=-4)}
        result["seconds"] = round(time.perf_counter() - begin, 3)
        say(result)
        if "CUDA" in str(result.get("wrong", "")):  # the context may be lost: start anew
            sys.exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run", "worker"):
        commands.add_parser(name).add_argument("folder", type=Path)
    for name in ("run", "worker"):
        commands.choices[name].add_argument("--only", default="", help="patterns of names")
    commands.choices["worker"].add_argument("--first", type=int, default=0)
    run_command = commands.choices["run"]
    run_command.add_argument("--json", type=Path, help="file for all results")
    run_command.add_argument("--commit", default="", help="what the kernels were built from")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build_folder(arguments.folder)
    elif arguments.command == "run":
        sys.exit(run(arguments.folder, arguments))
    else:
        work(arguments.folder, arguments)


if __name__ == "__main__":
    main()
