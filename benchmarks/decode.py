"""Tokens from CUDA graphs against the reference executor, on a GPU that has no compiler.

    python benchmarks/decode.py prepare .gpu --set tiny      # anywhere with the compiler
    python benchmarks/decode.py run .gpu --json FILE         # on the GPU

`prepare` writes for each case a bundle, the recipe of its checkpoint, and what the reference
executor generates from it on the CPU. `run` makes the checkpoint again, decodes on the GPU three
times and compares: free (the tokens), held to the reference's tokens (so that logits can be
compared at every step), the same with the launches one by one (bits of logits and states), and
every step from the reference's state (the contract of docs/numerics.md).
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, not installed

import torch
from torch import Tensor

from benchmarks.gpu_worker import Worker, gpu_facts, say

VOCABULARY = 512
MEDIAN = 0.02
"""Of the rms errors of logits over their deviation, each step from the reference's state."""


@dataclass(frozen=True)
class Case:
    """A bundle and how it is used: `tp` virtual ranks, `rows` rows a request (1: no verify)."""

    model: str
    tp: int = 1
    rows: int = 1
    tokens: int = 256
    pinned: bool = True

    @property
    def name(self) -> str:
        return f"{self.weights}-tp{self.tp}-q{self.rows}"

    @property
    def weights(self) -> str:
        """Name of the checkpoint."""
        return self.model if self.pinned else f"{self.model}-loose"

    @property
    def target(self) -> str:
        return {1: "sm_90a", 2: "sm_90a:64", 4: "sm_90a:32"}[self.tp]


SETS = {
    "smoke": (
        Case("kimi-k3-tiny", tokens=32),
        Case("kimi-k3-tiny", tokens=32, pinned=False),
        Case("kimi-k3-tiny", tp=2, tokens=32),
        Case("kimi-k3-tiny", tp=2, tokens=32, rows=8),
        Case("kimi-linear-tiny", tokens=32),
    ),
    "tiny": (
        Case("kimi-k3-tiny"),
        Case("kimi-k3-tiny", tp=2),
        Case("kimi-k3-tiny", tp=4, tokens=128),
        Case("kimi-k3-tiny", tp=2, rows=8),
        Case("kimi-linear-tiny"),
    ),
    "mini": (
        Case("kimi-k3-mini", tokens=64),
        Case("kimi-k3-mini", tp=2, tokens=64),
    ),
    "loose": (Case("kimi-k3-tiny", tp=2, pinned=False),),
}


def prompts_of(case: Case) -> list[list[int]]:
    """Five prompts for a bundle of four slots: one joins when another leaves."""
    lengths = (5, 1, 37, 90, 12)
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def prepare(out: Path, names: str) -> None:
    from safetensors.torch import save_file

    from k3fuse.cli import main as k3fuse
    from k3fuse.cli.load import bundle_source
    from k3fuse.runtime.bundle import read_bundle
    from k3fuse.runtime.executor import Capacity
    from k3fuse.runtime.generate import generate
    from k3fuse.runtime.stock import StockExecutor

    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for case in cases_of(names):
        folder, checkpoint = out / case.name, out.parent / f"{out.name}-checkpoints" / case.weights
        make_checkpoint(case, checkpoint)
        if not (folder / "bundle" / "manifest.json").exists():
            family = "kimi-linear" if case.model.startswith("kimi-linear") else "kimi-k3"
            options = ["--tp", str(case.tp), "--batch", "1,2,4", "--target", case.target]
            options += ["--max-context", "512", "--no-dumps", "--no-check"]
            options += ["--verify-rows", str(case.rows)] if case.rows > 1 else []
            command(
                k3fuse,
                ["compile", family, str(checkpoint), *options, "-o", str(folder / "bundle")],
            )
        expected = out / f"{case.weights}.safetensors"
        if expected.exists():
            continue
        bundle = read_bundle(folder / "bundle")
        model: Any = bundle_source(bundle, checkpoint).module()
        begin = time.monotonic()
        # The reference executor equals stock bit for bit, at any TP and with any rows a request
        # (tests/runtime/test_reference.py), so the fastest way serves for all cases.
        executor = StockExecutor(model, Capacity.of(bundle.options))
        made = generate(executor, prompts_of(case), case.tokens, buckets=[4])
        held: dict[str, Tensor] = {}
        for index, (tokens, logits) in enumerate(zip(made.tokens, made.logits, strict=True)):
            held[f"tokens.{index}"] = torch.tensor(tokens)
            held[f"logits.{index}"] = logits
        save_file(held, expected)
        print(f"{case.weights}: expected tokens in {time.monotonic() - begin:.1f} s", flush=True)
    (out / "cases.json").write_text(json.dumps([vars(case) for case in cases_of(names)]))


def make_checkpoint(case: Case, folder: Path) -> None:
    """Synthesise it, and pin the routers: random weights leave experts within a rounding error of
    one another, and where rounding chooses other experts there is nothing left to compare."""
    from safetensors.torch import load_file, save_file

    from k3fuse.cli import main as k3fuse

    if folder.exists():
        return
    command(k3fuse, ["synth", case.model, str(folder)])
    if not case.pinned:
        return
    generator = torch.Generator().manual_seed(3)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                noise = torch.rand(tensor.shape, generator=generator)
                tensors[name] = (4.0 * noise.argsort()).to(tensor.dtype)
        save_file(tensors, path)


def command(k3fuse: Any, arguments: list[str]) -> None:
    print("k3fuse", *arguments, flush=True)
    try:
        k3fuse(arguments)
    except SystemExit as end:
        if end.code:
            raise


def cases_of(names: str) -> list[Case]:
    return [case for name in names.split(",") for case in SETS[name]]


class Held:
    """An executor that is made to choose given tokens, so that two runs have one history."""

    def __init__(self, engine: Any, expected: Sequence[Sequence[int]], *, eager: bool) -> None:
        self._engine, self._expected, self._eager = engine, expected, eager
        self._next = 0
        self._by_slot: dict[int, list[int]] = {}  # slot -> [prompt, tokens so far]
        self.vocab_size, self.capacity = engine.vocab_size, engine.capacity

    def reset(self, slots: Sequence[int]) -> None:
        self._engine.reset(slots)
        for slot in slots:
            self._by_slot[slot] = [self._next, 0]
            self._next += 1

    def prefill(self, inputs: Any, rows: int) -> Any:
        result = self._engine.prefill(inputs, rows)
        tokens = result.tokens.clone()
        request = self._by_slot[int(inputs.slots[0])]
        tokens[-1] = self._expected[request[0]][0]
        request[1] = 1  # the last chunk counts
        return result._replace(tokens=tokens)

    def step(self, inputs: Any, rows: int, mode: Any) -> Any:
        result = self._run(inputs, rows, mode)
        self._last = self._chosen(inputs, result.tokens, rows)
        if mode == "commit":
            for slot in inputs.slots.tolist():
                if slot >= 0:
                    self._by_slot[slot][1] += 1
        return result._replace(tokens=self._last)

    def _run(self, inputs: Any, rows: int, mode: Any) -> Any:
        return self._engine.step(inputs, rows, mode, eager=self._eager)

    def _chosen(self, inputs: Any, natural: Tensor, rows: int) -> Tensor:
        """What the rows of a step are made to choose."""
        tokens = natural.clone()
        for place, slot in enumerate(inputs.slots.tolist()):
            if slot < 0:
                continue
            prompt, count = self._by_slot[slot]
            for row in range(rows):
                if count + row < len(self._expected[prompt]):
                    tokens[place * rows + row] = self._expected[prompt][count + row]
        return tokens

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        self._engine.commit(slots, accepted, eager=self._eager)
        for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
            if slot >= 0:
                self._by_slot[slot][1] += count


class FromReference(Held):
    """As `Held`, every step from the reference's state: the graph's logits, and then the step again
    op by op, whose state is kept."""

    def step(self, inputs: Any, rows: int, mode: Any) -> Any:
        states = [self._engine.states(rank) for rank in range(len(self._engine.mode.mine))]
        before = [{name: state.clone() for name, state in held.items()} for held in states]
        logits = super().step(inputs, rows, mode).logits.clone()  # also notes what to choose
        for held, kept in zip(states, before, strict=True):
            for name, state in held.items():
                state.copy_(kept[name])
        exact = self._engine.prefill(inputs, rows)
        return exact._replace(logits=logits, tokens=self._last)


class OpByOp(Held):
    """As `Held`, with every step op by op in torch."""

    def _run(self, inputs: Any, rows: int, mode: Any) -> Any:
        return self._engine.prefill(inputs, rows)


def work(folder: Path, first: int) -> None:
    say(gpu_facts())
    for case in [Case(**entry) for entry in json.loads((folder / "cases.json").read_text())][
        first:
    ]:
        begin = time.perf_counter()
        result: dict[str, Any] = {"case": case.name, "tokens": case.tokens}
        try:
            result |= check_case(folder, case)
        except Exception as error:
            result |= {"ok": False, "why": f"{type(error).__name__}: {error}"[:800]}
            result["trace"] = traceback.format_exc(limit=-6)
        result["seconds"] = round(time.perf_counter() - begin, 2)
        say(result)
        torch.cuda.empty_cache()


def check_case(folder: Path, case: Case) -> dict[str, Any]:
    from k3fuse.cli.device import open_engine
    from k3fuse.cli.load import bundle_source
    from k3fuse.runtime.bundle import read_bundle

    checkpoint = folder.parent / f"{folder.name}-checkpoints" / case.weights
    make_checkpoint(case, checkpoint)
    bundle = read_bundle(folder / case.name / "bundle")
    source = bundle_source(bundle, checkpoint)
    before = torch.cuda.mem_get_info()[0]
    with open_engine(bundle, source) as engine:
        taken = before - torch.cuda.mem_get_info()[0]
        return compare(folder, case, engine, taken)


def compare(folder: Path, case: Case, engine: Any, taken: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    from k3fuse.runtime.generate import generate

    found: dict[str, Any] = {
        "ranks": engine.mode.label,
        "planned_bytes": engine.layout.total * case.tp,
        "taken_bytes": taken,
    }
    held = load_file(folder / f"{case.weights}.safetensors")
    prompts = prompts_of(case)
    expected = [held[f"tokens.{i}"][: case.tokens].tolist() for i in range(len(prompts))]
    arguments = {"buckets": [1, 2, 4], "rows_per_request": case.rows}

    begin = time.perf_counter()
    free = generate(engine, prompts, case.tokens, **arguments)
    found["free_seconds"] = round(time.perf_counter() - begin, 2)
    found["free_equal"] = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(y))
        for x, y in zip(free.tokens, expected, strict=True)
    ]
    begin = time.perf_counter()
    graph = generate(Held(engine, expected, eager=False), prompts, case.tokens, **arguments)
    found["held_seconds"] = round(time.perf_counter() - begin, 2)
    states = {k: v.clone() for k, v in engine.states().items()}
    eager = generate(Held(engine, expected, eager=True), prompts, case.tokens, **arguments)
    found["eager_equal"] = all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(graph.logits, eager.logits, strict=True)
    )
    found["eager_states_equal"] = all(
        torch.equal(states[k].view(torch.uint8), v.view(torch.uint8))
        for k, v in engine.states().items()
    )
    if case.rows == 1:
        near = generate(FromReference(engine, expected, eager=False), prompts, 64, **arguments)
        off = [
            (row.double().cpu() - wanted.double()).square().mean().sqrt() / wanted.double().std()
            for i, rows in enumerate(near.logits)
            for row, wanted in zip(rows[1:], held[f"logits.{i}"][1:64], strict=True)
        ]
        found["from_reference_median"] = float(torch.stack(off).median())
        found["from_reference_same_token"] = sum(
            int((rows.argmax(1).cpu() == held[f"logits.{i}"][:64].argmax(1)).sum())
            for i, rows in enumerate(near.logits)
        ) / (64 * len(near.logits))
        slow = generate(OpByOp(engine, expected, eager=False), prompts, 8, **arguments)
        found["op_by_op_error"] = max(
            float((a.cpu() - held[f"logits.{i}"][:8]).norm() / held[f"logits.{i}"][:8].norm())
            for i, a in enumerate(slow.logits)
        )
    errors, wrong, margins = [], 0, []
    for index, logits in enumerate(graph.logits):
        wanted = held[f"logits.{index}"][: case.tokens].double()
        got = logits.double().cpu()
        error = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
        errors.append(error.max().item())
        found.setdefault("first_errors", []).append([float(f"{e:.1e}") for e in error[:6]])
        found.setdefault("median_errors", []).append(float(f"{error.median():.1e}"))
        chosen = got.argmax(1)
        best = wanted.argmax(1)
        off = chosen != best
        wrong += int(off.sum())
        loss = wanted.gather(1, best[:, None]) - wanted.gather(1, chosen[:, None])
        margins += loss[off].flatten().tolist()
    found["logit_error"] = max(errors)
    found["argmax_other"] = wrong
    found["argmax_loss"] = max(margins, default=0.0)
    found["accepted"] = graph.mean_accepted
    found["ok"] = (
        found["eager_equal"]
        and found["eager_states_equal"]
        # docs/numerics.md, "Comparing whole steps": every step from the reference's state
        and found.get("from_reference_median", 0.0) <= MEDIAN
    )
    return found


def run(folder: Path, arguments: argparse.Namespace) -> int:
    cases = json.loads((folder / "cases.json").read_text())
    facts: dict[str, Any] = {
        "commit": arguments.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }
    results: list[dict[str, Any]] = []
    while len(results) < len(cases):
        worker = Worker([__file__, "worker", str(folder), "--first", str(len(results))])
        first = worker.line(120)
        if first is None:
            worker.end()
            facts["error"] = worker.why(120)
            break
        facts |= first
        while len(results) < len(cases):
            line = worker.line(arguments.seconds)
            if line is None:
                line = {"case": str(cases[len(results)]), "ok": False}
                line["why"] = worker.why(arguments.seconds)
                results.append(line)
                print(json.dumps(line), flush=True)
                break
            results.append(line)
            print(json.dumps(line), flush=True)
        worker.end()
    facts["failed"] = sum(not r["ok"] for r in results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**facts, "results": results}, indent=1))
    print(json.dumps(facts))
    return 1 if facts["failed"] or "error" in facts else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "run", "worker"):
        commands.add_parser(name).add_argument("folder", type=Path)
    commands.choices["prepare"].add_argument("--set", default="smoke", help=", ".join(SETS))
    commands.choices["worker"].add_argument("--first", type=int, default=0)
    runner = commands.choices["run"]
    runner.add_argument("--json", type=Path)
    runner.add_argument("--commit", default="")
    runner.add_argument("--seconds", type=float, default=120, help="limit of one case")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.folder.resolve(), arguments.set)
    elif arguments.command == "run":
        sys.exit(run(arguments.folder.resolve(), arguments))
    else:
        work(arguments.folder.resolve(), arguments.first)


if __name__ == "__main__":
    main()
