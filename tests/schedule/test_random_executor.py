from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.prove_campaign import random_model, small_config
from k3fuse.compiler import compile_bucket
from k3fuse.errors import InputError
from k3fuse.ir import Graph
from k3fuse.ir.interpreter import Ranks
from k3fuse.lowering.recipe import weight_recipe
from k3fuse.lowering.select import Kernels, select
from k3fuse.models.kimi import KimiModel, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.options import CompileOptions
from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.random_executor import RandomExecutor, StepTensors, run_random
from k3fuse.runtime.reference import Program, ReferenceExecutor
from k3fuse.runtime.weights import evaluate_recipe
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.model import Action, Schedule, ScheduledLaunch
from k3fuse.target import get_target
from tests.runtime.conftest import tiny_model

STEPS = 5


class Case(NamedTuple):
    plan: Plan
    graph: Graph
    weights: dict[str, Ranks]
    model: KimiModel
    schedule: Schedule
    executor: RandomExecutor


@functools.cache
def case(name: str, tp: int, *, small: bool = True, batch: int = 1, rows: int = 1) -> Case:
    config = small_config(name) if small else BUILTIN_CONFIGS[name]
    options = CompileOptions("gb300", tp, (batch,), page_size=4, max_context=24)
    model = random_model(config) if small else tiny_model(name)
    made = compile_bucket(KimiModel(config, "meta"), name, Bucket(batch, rows, "step"), options)
    recipe = weight_recipe(made.graph)
    weights = evaluate_recipe(recipe, lambda path: model.get_parameter(path).detach())
    executor = RandomExecutor(made.plan, made.graph, weights)
    return Case(made.plan, made.graph, weights, model, schedule_of(made.plan), executor)


@functools.cache
def inputs(batch: int = 1, rows: int = 1) -> list[StepInputs]:
    pages = torch.arange(6 * batch, dtype=torch.int32).view(batch, 6)
    slots = torch.arange(batch, dtype=torch.int32)
    return [
        StepInputs(
            (torch.arange(batch * rows) * 5 + 7 * step + 3) % 32,
            torch.full((batch,), step * rows, dtype=torch.int32),
            pages,
            slots,
        )
        for step in range(STEPS)
    ]


@functools.cache
def tensors(batch: int = 1, rows: int = 1) -> list[StepTensors]:
    return [step._asdict() for step in inputs(batch, rows)]


def failures(one: Case, schedule: Schedule, orders: int) -> list[str]:
    runs = [one.executor.run(schedule, tensors(), seed) for seed in range(orders)]
    return [run.failure for run in runs if not run.ok]


def changed(schedule: Schedule, launch: ScheduledLaunch, **fields: object) -> Schedule:
    new = dataclasses.replace(launch, **fields)  # pyright: ignore[reportArgumentType]
    launches = tuple(new if x is launch else x for x in schedule.launches)
    return dataclasses.replace(schedule, launches=launches)


@pytest.mark.parametrize(
    ("name", "tp", "orders"),
    [("kimi-k3-tiny", 2, 60), ("kimi-linear-tiny", 2, 60), ("kimi-linear-tiny", 4, 15)],
)
def test_every_order_gives_the_numbers_of_the_reference(name: str, tp: int, orders: int) -> None:
    one = case(name, tp)
    assert failures(one, one.schedule, orders) == []


@pytest.mark.parametrize("name", ["kimi-k3-tiny", "kimi-linear-tiny"])
def test_with_the_grids_of_the_kernels(name: str) -> None:
    """Side launches take SMs from grids that spin, and nothing is ever stuck."""
    one = case(name, 2)
    kernels = Kernels(get_target("gb300"))
    resources = kernels.resources(select(one.graph, one.plan, kernels))
    schedule = schedule_of(one.plan, resources)
    assert any(launch.spins and launch.grid > 1 for launch in schedule.launches)
    assert failures(one, schedule, 10) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("kimi-k3-tiny", 2), ("kimi-linear-tiny", 2)])
def test_five_hundred_orders(name: str, tp: int) -> None:
    one = case(name, tp)
    assert failures(one, one.schedule, 500) == []


def test_a_whole_tiny_model() -> None:
    one = case("kimi-k3-tiny", 2, small=False)
    assert failures(one, one.schedule, 5) == []


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 1)])
def test_outputs_are_those_of_the_reference_executor(batch: int, rows: int) -> None:
    """Bit for bit, although that one runs the plan's launches on all ranks at once."""
    one = case("kimi-k3-tiny", 2, batch=batch, rows=rows)
    run = run_random(one.schedule, one.plan, one.graph, one.weights, tensors(batch, rows), seed=3)
    assert run.ok, run.failure
    program = Program("step", one.plan, one.graph, one.weights)
    capacity = Capacity(slots=batch, pages=6 * batch, page_size=4, table=6, rows=1)
    reference = ReferenceExecutor(one.model, capacity, [program])
    for step, outputs in zip(inputs(batch, rows), run.outputs, strict=True):
        result = reference.step(step, 1, "commit")
        for name, rank0 in outputs.items():
            whole: Tensor = getattr(result, name)
            mine = rank0 if rank0.shape == whole.shape else whole.chunk(2, -1)[0]
            assert torch.equal(rank0, mine), name


def test_a_seed_gives_one_order() -> None:
    one = case("kimi-linear-tiny", 2)
    broken = without(one.schedule, "wait", "layers.0.self_attn.kda_core")
    first, again = (failures(one, broken, 20) for _ in range(2))
    assert first == again


def without(schedule: Schedule, kind: str, name: str) -> Schedule:
    launch = schedule.launch(name)
    program = tuple(a for a in launch.program if a.kind != kind)
    return changed(schedule, launch, program=program)


def test_a_dropped_wait_reads_too_early() -> None:
    one = case("kimi-k3-tiny", 2)
    found = failures(one, without(one.schedule, "wait", "layers.0.self_attn.kda_core"), 20)
    assert len(found) > 5
    assert all("@layers.0.self_attn.kda_core reads layers.0.self_attn." in text for text in found)


def test_a_read_above_the_wait() -> None:
    one = case("kimi-k3-tiny", 2)
    launch = one.schedule.launch("layers.0.self_attn.o_proj")
    read = next(a for a in launch.program if a.kind == "read" and a.access == "activation")
    program = (read, *(a for a in launch.program if a is not read))
    assert failures(one, changed(one.schedule, launch, program=program), 20)


def test_a_dropped_event_of_the_side_stream() -> None:
    one = case("kimi-k3-tiny", 2)
    launch = one.schedule.launch("layers.0.mlp.projections")
    after = tuple(edge for edge in launch.after if edge.kind != "event")
    assert len(after) < len(launch.after)
    assert failures(one, changed(one.schedule, launch, after=after), 20)


@pytest.mark.parametrize("rule", [{"stages": 1}, {"stages": 2}, {"rearm": 1}, {"rearm": 3}])
def test_a_ring_with_another_rule(rule: dict[str, int]) -> None:
    one = case("kimi-k3-tiny", 2)
    boxes = tuple(
        dataclasses.replace(box, **rule) if box.protocol == "push_partial" else box
        for box in one.schedule.mailboxes
    )
    found = failures(one, dataclasses.replace(one.schedule, mailboxes=boxes), 30)
    assert any("deadlock" in text or "different words" in text for text in found)


def test_nobody_publishes() -> None:
    one = case("kimi-k3-tiny", 2)
    found = failures(one, without(one.schedule, "publish", "embed_tokens"), 1)
    (text,) = found
    assert text.startswith("deadlock: step 0 rank 0 @layers.0.self_attn.projections: poll")
    assert "(no words from rank 0, 1)" in text


def test_two_values_in_the_same_bytes() -> None:
    one = case("kimi-k3-tiny", 2)
    places = {s.name: s for s in one.schedule.storages}
    victim = places["layers.0.self_attn.q_proj"]
    storages = tuple(
        dataclasses.replace(s, offset=victim.offset) if s.name == "layers.0.self_attn.k_proj" else s
        for s in one.schedule.storages
    )
    assert len(failures(one, dataclasses.replace(one.schedule, storages=storages), 5)) == 5


def test_a_launch_that_lags_reads_what_others_have_overwritten() -> None:
    """The last reader of a buffer loses its place in the order before the next writer of it."""
    one = case("kimi-k3-tiny", 2)
    found = failures(one, without(one.schedule, "wait", "layers.1.self_attn.projections"), 40)
    assert any("changed before all blocks had read it" in text for text in found)


def test_a_barrier_lets_nobody_pass_alone() -> None:
    one = case("kimi-linear-tiny", 2)
    launch = one.schedule.launches[2]
    program = (*launch.program, Action("barrier", "ranks"))
    assert failures(one, changed(one.schedule, launch, program=program), 5) == []


def test_a_schedule_of_other_launches_is_refused() -> None:
    one = case("kimi-linear-tiny", 2)
    other = dataclasses.replace(one.schedule, launches=one.schedule.launches[:-1])
    with pytest.raises(InputError, match="does not have the launches of the plan"):
        one.executor.run(other, tensors(), 0)
