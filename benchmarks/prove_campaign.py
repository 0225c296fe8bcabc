"""Break real plans in ways that are wrong by construction, and demand that it is seen, twice.

The proof must accept every unbroken plan and reject every broken one: small plans get every
mutation or a sample of each, large ones (--all) fewer. Then small models of the same make run, with
numbers, in random orders: unbroken ones must give the reference's numbers in all of them, and at
least 90 % of the broken ones must show a wrong value or a deadlock in some. Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from k3fuse.compiler import buckets_of, compile_bucket
from k3fuse.lowering.recipe import weight_recipe
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.runtime.lockstep import StepTensors
from k3fuse.runtime.random_executor import RandomExecutor
from k3fuse.runtime.weights import evaluate_recipe
from k3fuse.schedule.derived_mutations import ALL_MUTATIONS
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.model import Schedule
from k3fuse.schedule.mutations import Mutant
from k3fuse.schedule.proof import prove_order
from k3fuse.schedule.residency import prove_residency

STEPS = 5
ORDERS_OF_ACCEPTED = 500
ORDERS_OF_BASE = 5
ORDERS_OF_MUTANT = 50
SHOWN_AT_LEAST = 0.9


@dataclass(frozen=True)
class Case:
    """One plan; `sample` mutants of each mutation, 0 for all."""

    model: str
    tp: int
    batch: int
    sample: int = 0


@dataclass(frozen=True)
class RunCase:
    """A model small enough to run; `orders` of its unbroken plan."""

    model: str
    tp: int
    orders: int
    sample: int = 0


SMALL = (
    Case("kimi-k3-tiny", 4, 1),
    Case("kimi-k3-tiny", 2, 8, sample=12),
    Case("kimi-k3-tiny", 1, 8, sample=12),
    Case("kimi-linear-tiny", 2, 8, sample=12),
    Case("kimi-linear-tiny", 8, 1, sample=12),
)
LARGE = (
    *(Case("kimi-k3", tp, batch, sample=1) for tp in (16, 8) for batch in (8, 1)),
    Case("kimi-linear", 8, 1, sample=4),
    Case("kimi-k3-mini", 8, 1, sample=10),
)
RUN = (
    RunCase("kimi-linear-tiny", 4, ORDERS_OF_ACCEPTED),
    RunCase("kimi-k3-tiny", 2, ORDERS_OF_ACCEPTED),
    RunCase("kimi-k3-tiny", 4, 20),
    RunCase("kimi-linear-tiny", 2, 20),
)


@dataclass
class Result:
    """What became of one case. `tried` and `shown` count mutants by kind."""

    name: str
    launches: int
    seconds: float = 0.0
    orders: int = 0
    tried: Counter[str] = field(default_factory=Counter[str])
    shown: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    not_shown: list[str] = field(default_factory=list[str])


def schedule_for(case: Case) -> Schedule:
    """Compile the built-in config of a case and take its schedule."""
    options = CompileOptions(target="gb300", tp=case.tp, batches=(case.batch,))
    model = family_of(case.model).build(builtin_config(case.model), "meta")
    compiled = compile_bucket(model, case.model, buckets_of(options)[0], options)
    return schedule_of(compiled.plan)


def chosen(schedule: Schedule, sample: int) -> Iterator[Mutant]:
    """Every mutant, or `sample` of each mutation, spread evenly."""
    for mutate in ALL_MUTATIONS:
        found = list(mutate(schedule))
        step = max(1, len(found) // sample) if sample else 1
        yield from found[::step][: sample or None]


def rejected(schedule: Schedule) -> bool:
    """By co-residency or by order, and not just left unproven."""
    return bool(prove_residency(schedule).findings) or prove_order(schedule).rejected


def accepted(schedule: Schedule) -> bool:
    """By order and, where it has grids, by co-residency."""
    residency = prove_residency(schedule)
    return prove_order(schedule).proved and not (residency.findings or residency.not_proven)


def prove_case(case: Case) -> Result:
    """Prove one plan, its mutants, and the schedules that those were made of."""
    start = time.perf_counter()
    schedule = schedule_for(case)
    result = Result(schedule.name, len(schedule.launches))
    base = schedule
    if not accepted(schedule):
        result.wrong.append("NOT ACCEPTED: the plan")
    for mutant in chosen(schedule, case.sample):
        if mutant.base is not None and mutant.base is not base:
            base = mutant.base
            if not accepted(base):
                result.wrong.append(f"NOT ACCEPTED: what this was made of: {mutant}")
        result.tried[mutant.kind] += 1
        if not rejected(mutant.schedule):
            result.wrong.append(f"NOT REJECTED: {mutant}")
    result.seconds = time.perf_counter() - start
    return result


def run_case(case: RunCase) -> Result:
    """Run a small plan and its mutants in random orders."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    schedule, executor = executor_for(case.model, case.tp)
    result = Result(schedule.name, len(schedule.launches), orders=case.orders)
    inputs = step_inputs()

    def failure(one: Schedule, orders: int) -> str:
        """What the first order shows that shows anything."""
        runs = (executor.run(one, inputs, seed) for seed in range(orders))
        return next((run.failure for run in runs if not run.ok), "")

    if found := failure(schedule, case.orders):
        result.wrong.append(f"FAILS: the plan: {found}")
    base = schedule
    for mutant in chosen(schedule, case.sample):
        if mutant.base is not None and mutant.base is not base:
            base = mutant.base
            if not accepted(base):
                result.wrong.append(f"NOT ACCEPTED: what this was made of: {mutant}")
            if found := failure(base, ORDERS_OF_BASE):
                result.wrong.append(f"FAILS: what this was made of: {mutant}: {found}")
        result.tried[mutant.kind] += 1
        if not rejected(mutant.schedule):
            result.wrong.append(f"NOT REJECTED: {mutant}")
        if failure(mutant.schedule, ORDERS_OF_MUTANT):
            result.shown[mutant.kind] += 1
        else:
            result.not_shown.append(str(mutant))
    result.seconds = time.perf_counter() - start
    return result


def executor_for(name: str, tp: int) -> tuple[Schedule, RandomExecutor]:
    """Compile a small model, draw its weights, and take its schedule."""
    config = small_config(name)
    options = CompileOptions(target="gb300", tp=tp, batches=(1,), page_size=4, max_context=24)
    made = compile_bucket(KimiModel(config, "meta"), name, buckets_of(options)[0], options)
    model = random_model(config)
    weights = evaluate_recipe(
        weight_recipe(made.graph), lambda path: model.get_parameter(path).detach()
    )
    return schedule_of(made.plan), RandomExecutor(made.plan, made.graph, weights)


def small_config(name: str) -> KimiConfig:
    """Three layers with KDA, MLA, a dense MLP and experts, as small as four ranks allow."""
    k3 = name == "kimi-k3-tiny"
    return dataclasses.replace(
        BUILTIN_CONFIGS[name],
        hidden_size=32,
        num_layers=3,
        vocab_size=32,
        mla_layers=frozenset({1}),
        kda_heads=4,
        kda_head_dim=8,
        a_log_shape=(8,) if k3 else (1, 1, 4, 1),
        num_heads=4,
        q_lora_rank=16 if k3 else None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        intermediate_size=64,
        num_experts=8,
        top_k=2,
        moe_intermediate_size=128,
        latent_size=32 if k3 else None,
        shared_intermediate_size=32,
        attn_res_block_size=2 if k3 else None,
    )


def random_model(config: KimiConfig) -> KimiModel:
    """Weights whose values all differ and keep activations near one."""
    model, generator = KimiModel(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            shape = parameter.shape
            if parameter.dtype == torch.uint8:
                low, high = (122, 125) if path.endswith("_scale") else (0, 256)
                parameter.copy_(torch.randint(low, high, shape, generator=generator))
            else:
                noise = torch.randn(shape, generator=generator) / max(shape[-1], 4) ** 0.5
                parameter.copy_(1 + noise if "norm" in path else noise)
    return model


def step_inputs() -> list[StepTensors]:
    """One request, another token and length in each step."""
    return [
        {
            "tokens": torch.tensor([(7 * step + 3) % 32]),
            "lengths": torch.tensor([step], dtype=torch.int32),
            "block_table": torch.arange(6, dtype=torch.int32).view(1, 6),
            "slots": torch.zeros(1, dtype=torch.int32),
        }
        for step in range(STEPS)
    ]


def table(results: list[Result]) -> Iterator[str]:
    """Shown and tried by kind, over all small models."""
    tried, shown = total([r.tried for r in results]), total([r.shown for r in results])
    yield f"{'mutation':<28} shown   of"
    for kind, count in tried.items():
        yield f"{kind:<28} {shown[kind]:5} {count:4}"
    for result in results:
        for line in result.not_shown:
            yield f"not shown in {ORDERS_OF_MUTANT} orders: {result.name}: {line}"
            yield f"  because {reason(line)}"


def reason(mutant: str) -> str:
    """Why random orders may miss a mutant that the proof rejects."""
    if mutant.startswith("widen grid"):
        return "both launches must have got a part of the SMs that they wait for, by chance"
    if mutant.startswith("re-arm"):
        return "a block of the same launch must read late, while its stage is emptied"
    return "the order in which it does harm was not drawn"


def total(counters: list[Counter[str]]) -> Counter[str]:
    """The sum, with kinds in the order of the first that has them."""
    found: Counter[str] = Counter()
    for counter in counters:
        found.update(counter)
    return found


def campaign(cases: tuple[Case, ...], runs: tuple[RunCase, ...], report: Path | None) -> bool:
    """Run all, two at a time; print what happened; whether all answers were right."""
    begin = time.perf_counter()
    proved: list[Result] = []
    ran: list[Result] = []
    with ProcessPoolExecutor(2) as pool:
        proving = [pool.submit(prove_case, case) for case in cases]
        running = [pool.submit(run_case, case) for case in runs]
        for future in proving:
            result = future.result()
            proved.append(result)
            print(
                f"{result.name}: {result.launches} launches, {result.tried.total()} mutants, "
                f"{len(result.wrong)} wrong answers ({result.seconds:.0f} s)",
                *result.wrong,
                sep="\n  ",
                flush=True,
            )
        for future in running:
            result = future.result()
            ran.append(result)
            print(
                f"{result.name}, small: {result.orders} orders as planned, "
                f"{result.tried.total()} mutants run, {len(result.wrong)} wrong answers "
                f"({result.seconds:.0f} s)",
                *result.wrong,
                sep="\n  ",
                flush=True,
            )
    print(*table(ran), sep="\n")
    mutants = total([r.tried for r in proved])
    tried, shown = sum(r.tried.total() for r in ran), sum(r.shown.total() for r in ran)
    wrong = sum(len(r.wrong) for r in (*proved, *ran))
    seconds = time.perf_counter() - begin
    print(
        f"{mutants.total()} wrong schedules against the proof and {tried} against random orders, "
        f"which show {shown} ({shown / max(tried, 1):.1%}); {wrong} wrong answers; {seconds:.0f} s"
    )
    if report is not None:
        write(report, proved, ran, seconds)
    return wrong == 0 and shown >= SHOWN_AT_LEAST * tried


def write(path: Path, proved: list[Result], ran: list[Result], seconds: float) -> None:
    """The whole outcome as JSON."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    outcome = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": " ".join(["python", *sys.argv]),
        "seconds": round(seconds),
        "mutants_proved": sum(r.tried.total() for r in proved),
        "mutants_run": sum(r.tried.total() for r in ran),
        "mutants_shown": sum(r.shown.total() for r in ran),
        "wrong_answers": sum(len(r.wrong) for r in (*proved, *ran)),
        "proved": [vars(r) for r in proved],
        "ran": [vars(r) for r in ran],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome, indent=1) + "\n")


def main() -> None:
    """Run the campaign over small plans, or over all with --all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the full K3 plans too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome to this file")
    options = parser.parse_args()
    cases = (*LARGE, *SMALL) if options.all else SMALL
    sys.exit(0 if campaign(cases, RUN, options.json) else 1)


if __name__ == "__main__":
    main()
