"""The harness of single launches: its reference against the graph's, and its checks against
launches that are wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from k3fuse.alone.check import Finding, check, judge_choice
from k3fuse.alone.inputs import draw, outside
from k3fuse.alone.memory import pushes_of, sent_to
from k3fuse.alone.reference import IDS, Evaluated, evaluate
from k3fuse.alone.timing import bytes_moved
from k3fuse.ir import state_roots
from k3fuse.kernels.examples import example
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import normalize
from k3fuse.lowering.launch_program import launch_programs, program_operands
from k3fuse.runtime.bundle import Bucket
from k3fuse.runtime.rank_body import RankBody, layout_of
from k3fuse.schedule.edges import launches_of
from k3fuse.tensor_type import DType
from tests.kernels.conftest import COMMIT, STEP, VERIFY, compiled_bucket, samples
from tests.kernels.emulated import Change, Emulated, facts_of, memory_at


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=0.123), b.nan_to_num(nan=0.123))


@pytest.mark.parametrize("bucket", [STEP, VERIFY, COMMIT], ids=["step", "verify", "commit"])
def test_a_program_computes_what_the_launch_does(bucket: Bucket) -> None:
    made = compiled_bucket(bucket)
    graph, roots = made.graph, state_roots(made.graph)
    made_programs, seen = launch_programs(graph, made.plan), set[Program]()
    for launch in launches_of(graph):
        program = made_programs[launch.name]
        if program in seen:
            continue
        seen.add(program)
        torch.manual_seed(len(seen))  # pyright: ignore[reportUnknownMemberType]
        inputs = draw(program, "cpu")
        operands = program_operands(graph, launch)
        by_name = {operands[index].name: tensor for index, tensor in inputs.items()}
        body = RankBody(launch, graph, {}, roots)
        wanted = body.compute(1, {name: by_name[name] for name in body.reads})
        got = evaluate(program, inputs, rank=1).values
        index = {value.name: i for i, value in enumerate(operands)}
        for name, data in wanted.activations.items():
            layout = layout_of(operands[index[name]], graph)
            assert same(layout.decode(data), got[index[name]].to(layout.dtype)), (launch.name, name)
        for leaf in launch.body:
            for result in leaf.results:
                if (root := roots.get(id(result))) is not None:
                    assert same(wanted.states[root.name], got[index[result.name]])
        for step in pushes_of(program):
            value = operands[step.results[0]]
            for peer, payload in enumerate(wanted.payloads[value.name]):
                assert payload is not None
                sent = sent_to(step, got[step.operands[0]], peer, program.tp)
                dtype = layout_of(value, graph).dtype
                assert payload == _bytes(
                    (sent + 0.0 if sent.is_floating_point() else sent).to(dtype)
                )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def checked(program: Program, change: Change | None = None, seed: int = 3) -> Finding:
    kernels, facts = Emulated(program, change), facts_of(program)
    return check(kernels, "k", facts, normalize(program), device="cpu", seed=seed, replays=0)


def test_a_right_launch_passes() -> None:
    for program in samples():
        found = checked(program)
        assert found.faults == [], program.label
        assert all(error < 4e-3 for error in found.errors.values())


def test_a_wrong_number_is_found() -> None:
    for program in samples():
        for value in _floats(program):

            def change(values: dict[int, Tensor], value: int = value) -> None:
                values[value] = values[value] * 1.01

            assert checked(program, change).faults, (program.label, value)


def _floats(program: Program) -> list[int]:
    """Values that leave the launch as numbers: written, sent, or states."""
    made = {r for step in program.steps for r in step.results}
    found = {v for v in program.written if program.values[v].dtype in ("bf16", "f32")}
    found |= {step.operands[0] for step in pushes_of(program)}
    found |= {v for v in made if program.values[v].place == "state"}
    return sorted(v for v in found if program.values[v].dtype in ("bf16", "f32"))


def test_a_missing_or_wrong_id_is_found() -> None:
    for program in samples():
        for step in program.steps:
            if step.op not in IDS:
                continue
            ids = step.results[IDS[step.op]]
            sent = any(ids in push.operands for push in pushes_of(program))
            if ids not in program.written and not sent:
                continue

            def change(values: dict[int, Tensor], ids: int = ids) -> None:
                values[ids] = values[ids] + 1

            assert checked(program, change).faults, program.label


def _with(op: str, *, without: str = "-") -> Program:
    return next(p for p in samples() if op in p.label and without not in p.label)


class Stray(Emulated):
    """A launch that also does something that it must not do."""

    def __init__(self, program: Program, also: Callable[[Mapping[str, Any]], object]) -> None:
        super().__init__(program)
        self.also = also

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[[int], None]:
        launch = super().bind(name, arguments)

        def both(stream: int) -> None:
            launch(stream)
            self.also(arguments)

        return both


def stray(program: Program, also: Callable[[Mapping[str, Any]], object]) -> str:
    kernels = Stray(program, also)
    found = check(
        kernels, "k", facts_of(program), normalize(program), device="cpu", seed=3, replays=0
    )
    return "; ".join(found.faults)


def poke(address: int) -> None:
    byte = memory_at(address, "u8", (1,))
    byte.copy_(byte ^ 0x11)


def test_writes_to_wrong_places_are_found() -> None:
    program = example("linear", "2,40,64")
    assert "wrote outside of v2" in stray(program, lambda a: poke(a["v2"] - 1))
    assert "wrote outside of v2" in stray(program, lambda a: poke(a["v2"] + 2 * 40 * 2))
    assert "changed v0, an input" in stray(program, lambda a: poke(a["v0"] + 5))
    assert "changed v1, an input" in stray(program, lambda a: poke(a["v1"] + 5))


def test_writes_into_rings_are_found() -> None:
    program = _with("sum_slots")
    ring = next(i for i in outside(program) if program.values[i].place == "mailbox")
    text = stray(program, lambda a: poke(a[f"v{ring}"] - 1))
    assert "wrote outside of own ring" in text
    text = stray(program, lambda a: [poke(a[f"v{ring}"] + at) for at in range(0, 4096, 64)])
    assert "own ring" in text


def test_rows_that_depend_on_padding_are_found() -> None:
    program = example("rms_norm", "3,64")

    def leak(values: dict[int, Tensor]) -> None:
        values[2] = values[2] + (0 * values[2][-1:]).to(values[2].dtype)

    assert checked(program, leak).faults == ["v2: rows depend on NaN in a row of padding"]


@pytest.mark.parametrize(
    ("logits", "got", "fault"),
    [
        ([1.0, 2.0, 2.0, 0.0], 1, None),
        ([1.0, 2.0, 2.0, 0.0], 2, "equal candidates"),
        ([1.0, 2.0, 2.0, 0.0], 0, "from the best"),
        ([1.0, 2.0, 2.0, 0.0], 4, "out of range"),
    ],
)
def test_given_logits_leave_no_freedom(logits: list[float], got: int, fault: str | None) -> None:
    program = example("argmax", "1,4")
    values = {0: torch.tensor([logits]), 1: torch.tensor([got])}
    natural = {1: torch.tensor([1])}
    answer = judge_choice(program, program.steps[0], Evaluated(values, natural), values[1], 0)
    assert answer is None if fault is None else answer is not None and fault in answer


def test_routing_accepts_its_ids_and_no_others() -> None:
    program = example("route", "3,32,4")
    assert checked(program).faults == []

    def swap(values: dict[int, Tensor]) -> None:
        values[2] = values[2].flip(1)
        values[3] = values[3].flip(1)

    assert "chose a candidate" in checked(program, swap).faults[0]

    def repeat(values: dict[int, Tensor]) -> None:
        values[2] = values[2][:, :1].expand(-1, 4).contiguous()

    assert "an id twice" in "; ".join(checked(program, repeat).faults)


def test_bytes_count_what_is_touched() -> None:
    experts = example("experts", "1,32,4,64,64")
    inputs = draw(experts, "cpu")
    weights = sum(experts.values[v].bytes for v in range(3, 9))
    rest = sum(experts.values[v].bytes for v in (0, 1, 2, 9))
    assert bytes_moved(experts, inputs, 0) == weights * 4 // 32 + rest
    kda = example("kda", "2,2,32,1")
    state = kda.values[10].bytes + kda.values[11].bytes
    small = sum(kda.values[v].bytes for v in (*range(10), 12, 13))
    assert bytes_moved(kda, draw(kda, "cpu"), 0) == 2 * state + small
    attend = example("mla_attend", "1,2,32,16,64,1")
    assert bytes_moved(attend, draw(attend, "cpu"), 0) == sum(
        attend.values[v].bytes for v in range(6)
    )


def test_inputs_have_the_types_of_the_program() -> None:
    for program in samples():
        for value, tensor in draw(program, "cpu").items():
            held = program.values[value]
            assert tensor.dtype == DType(held.dtype).to_torch()
            assert tuple(tensor.shape) == held.shape
