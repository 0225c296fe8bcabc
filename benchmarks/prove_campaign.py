"""Break real plans in ways that are wrong by construction, and demand that the proof sees it.

Small plans get every mutation, large ones a sample of each kind. Prints a line a plan and the
total, exits 1 when an unbroken plan is not accepted or a broken one is not rejected.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from k3fuse.compiler import buckets_of, compile_bucket
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.model import Schedule
from k3fuse.schedule.mutations import MUTATIONS, Mutant
from k3fuse.schedule.proof import prove_order


@dataclass(frozen=True)
class Case:
    """One plan; `sample` mutants of each kind, 0 for all."""

    model: str
    tp: int
    batch: int
    sample: int = 0
    verify_rows: int = 0


SMALL = (
    Case("kimi-k3-tiny", 4, 1),
    Case("kimi-k3-tiny", 2, 8),
    Case("kimi-k3-tiny", 1, 8),
    Case("kimi-linear-tiny", 2, 8),
    Case("kimi-linear-tiny", 8, 1),
)
LARGE = (
    Case("kimi-k3-mini", 8, 1, sample=10),
    Case("kimi-linear", 8, 1, sample=4),
    *(Case("kimi-k3", tp, batch, sample=1) for tp in (8, 16) for batch in (1, 8)),
)


def schedule_for(case: Case) -> Schedule:
    """Compile the built-in config of a case and take its schedule."""
    options = CompileOptions(target="gb300", tp=case.tp, batches=(case.batch,))
    model = family_of(case.model).build(builtin_config(case.model), "meta")
    compiled = compile_bucket(model, case.model, buckets_of(options)[0], options)
    return schedule_of(compiled.plan)


def chosen(schedule: Schedule, sample: int) -> Iterator[Mutant]:
    """Every mutant, or `sample` of each kind, spread evenly."""
    for mutate in MUTATIONS:
        found = list(mutate(schedule))
        step = max(1, len(found) // sample) if sample else 1
        yield from found[::step][: sample or None]


def run(cases: Iterable[Case]) -> bool:
    """Prove every case and its mutants; print what happened; whether all answers were right."""
    total, wrong, begin = 0, 0, time.perf_counter()
    for case in cases:
        start = time.perf_counter()
        schedule = schedule_for(case)
        proof = prove_order(schedule)
        kinds: Counter[str] = Counter()
        missed: list[str] = []
        for mutant in chosen(schedule, case.sample):
            kinds[mutant.kind.split(" ")[0]] += 1
            if not prove_order(mutant.schedule).rejected:
                missed.append(f"{mutant.kind} at {mutant.where}")
        total += sum(kinds.values())
        wrong += len(missed) + (not proof.proved)
        print(
            f"{schedule.name}: {len(schedule.launches)} launches, unbroken {proof.verdict} in "
            f"{proof.seconds:.2f} s; {sum(kinds.values())} mutants, {len(missed)} not rejected "
            f"({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
        for line in missed:
            print(f"  NOT REJECTED: {line}")
    print(f"{total} wrong schedules, {wrong} wrong answers, {time.perf_counter() - begin:.0f} s")
    return wrong == 0


def main() -> None:
    """Run the campaign over small plans, or over all with --all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the full K3 plans too")
    everything = parser.parse_args().all
    sys.exit(0 if run((*SMALL, *LARGE) if everything else SMALL) else 1)


if __name__ == "__main__":
    main()
