from __future__ import annotations

import pytest

from benchmarks.prove_campaign import accepted, executor_for, rejected, step_inputs
from k3fuse.schedule.derived_mutations import (
    ALL_MUTATIONS,
    early_trigger,
    rearm_above_wait,
    rearm_own_stage,
    widen_grid,
)
from k3fuse.schedule.model import Schedule
from k3fuse.schedule.mutations import Mutant, Mutate, write_weight
from k3fuse.schedule.proof import prove_order
from k3fuse.schedule.residency import prove_residency

KINDS = {
    "drop wait",
    "late wait",
    "hoist read",
    "drop edge",
    "drop join",
    "fewer stages",
    "re-arm one ahead",
    "drop publish",
    "drop poll",
    "drop re-arm",
    "poll an old epoch",
    "alias",
    "write weight",
    "trigger early",
    "re-arm above the wait",
    "re-arm before the poll",
    "re-arm without a barrier",
    "widen grid",
}


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return executor_for("kimi-k3-tiny", 2)[0]


def first_of_each_kind(schedule: Schedule) -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    for mutate in ALL_MUTATIONS:
        for mutant in mutate(schedule):
            found.setdefault(mutant.kind, mutant)
    return found


def test_every_kind_is_rejected(schedule: Schedule) -> None:
    assert accepted(schedule)
    mutants = first_of_each_kind(schedule)
    assert set(mutants) == KINDS
    assert [str(m) for m in mutants.values() if not rejected(m.schedule)] == []
    assert [str(m) for m in mutants.values() if m.base and not accepted(m.base)] == []


def test_every_kind_is_shown_by_random_orders(schedule: Schedule) -> None:
    plan, executor = executor_for("kimi-k3-tiny", 2)
    inputs = step_inputs()
    for kind, mutant in first_of_each_kind(plan).items():
        runs = (executor.run(mutant.schedule, inputs, seed) for seed in range(30))
        assert any(not run.ok for run in runs), kind
        if mutant.base is not None:
            assert [
                run for s in range(3) if not (run := executor.run(mutant.base, inputs, s)).ok
            ] == []


@pytest.mark.parametrize(
    ("mutate", "finding"),
    [
        (early_trigger, "read after write"),
        (rearm_above_wait, "mailbox re-arm"),
        (rearm_own_stage, "mailbox re-arm"),
        (write_weight, "read before wait"),
    ],
)
def test_the_finding_names_the_fault(schedule: Schedule, mutate: Mutate, finding: str) -> None:
    mutants = list(mutate(schedule))
    assert mutants
    for mutant in mutants[::5]:
        kinds = {found.kind for found in prove_order(mutant.schedule).findings}
        assert finding in kinds, str(mutant)


def test_a_wide_grid_is_a_matter_of_co_residency(schedule: Schedule) -> None:
    mutants = list(widen_grid(schedule))
    assert {m.detail.rpartition(", ")[2] for m in mutants} == {"alone", "beside"}
    for mutant in mutants:
        kinds = {found.kind for found in prove_residency(mutant.schedule).findings}
        assert kinds == {"co-residency"}, str(mutant)
