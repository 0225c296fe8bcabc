"""The trials of kernels on the references: all pass, and each finds a kernel that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from k3fuse.alone.launching import Case, Kernel, Sketch
from k3fuse.alone.parity import parity, unlike
from k3fuse.alone.trials import ELSEWHERE, Trial, padding_trial, trials
from k3fuse.kernels.attn_res import BlocksOptions
from k3fuse.kernels.examples import example
from k3fuse.kernels.launch import configure
from k3fuse.kernels.program import Program
from k3fuse.runtime.bundle import Bucket
from k3fuse.target import get_target
from tests.kernels.conftest import programs
from tests.kernels.emulated import Change, Emulated, facts_of

TRIALS = {trial.title: trial for trial in trials()}
Values = dict[int, Tensor]


def emulated(case: Case, change: Change | None = None) -> Kernel:
    return Kernel(Emulated(case.program, change), "k", facts_of(case.program), case, "cpu")


def wrong(trial: Trial, changes: dict[str, Change]) -> list[str]:
    kernels = {name: emulated(case, changes.get(name)) for name, case in trial.cases.items()}
    return list(trial.run(kernels))


@pytest.mark.parametrize("title", TRIALS)
def test_the_references_pass(title: str) -> None:
    assert wrong(TRIALS[title], {}) == []


def test_launches_of_a_model_pass() -> None:
    bucket = programs(Bucket(3, 1, "step"))
    assert wrong(padding_trial(bucket), {}) == []


def _set(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Case], Change]:
    """A change of one value by name."""

    def of(case: Case) -> Change:
        def apply(values: Values) -> None:
            index = case.names[name]
            values[index] = change(values[index]).to(values[index].dtype)

        return apply

    return of


def _leak(into: str, source: str) -> Callable[[Case], Change]:
    """NaN anywhere in one value reaches all of another."""

    def of(case: Case) -> Change:
        def apply(values: Values) -> None:
            total = values[case.names[source]].double().sum()
            into_value = values[case.names[into]]
            values[case.names[into]] = into_value + (0 * total).to(into_value.dtype)

        return apply

    return of


def _no_subnormals(y: Tensor) -> Tensor:
    return y.masked_fill(y.abs() < 2.0**-126, 0)


def _touch(state: Tensor) -> Tensor:
    state = state.clone()
    state[0] += 1
    return state


def _transposed(state: Tensor) -> Tensor:
    return state.transpose(-1, -2)


def _swap_pairs(y: Tensor) -> Tensor:
    return y.view(-1, 2).flip(1).view(y.shape)


MUTANTS: list[tuple[str, str, Callable[[Case], Change]]] = [
    ("B32 equal scores", "given", _set("ids", lambda ids: ids.flip(1))),
    ("B34 scores of NaN", "sent", _set("ids", lambda ids: ids[:, :1].expand(-1, 16))),
    ("B34 scores of NaN", "given", _set("weights", lambda w: w.masked_fill(w == 0, torch.nan))),
    ("B34 logits of NaN", "argmax", _set("ids", lambda ids: ids.clamp(max=5))),
    ("B36 router logits 2^-9 apart", "computed", _set("ids", lambda ids: ids.clamp(max=5))),
    ("B36 router logits 2^-9 apart", "pushed", _set("logits", lambda x: x.to(torch.bfloat16))),
    ("B41 MXFP4 codes", "experts", _set("y", _swap_pairs)),
    ("B42 MXFP4 scales", "experts", _set("y", _no_subnormals)),
    ("B42 MXFP4 scales", "experts", _set("y", lambda y: y.nan_to_num(nan=0.0))),
    ("B45 one launch a family", "rms_norm", _leak("v2", "v0")),
    ("B45 one launch a family", "kda", _leak("v13", "v0")),
    ("B46 nothing accepted", "commit", _set("recurrent'", _touch)),
    ("B46 nothing accepted", "commit", _set("conv'", _touch)),
    ("B47 verify, commit, plain step", "verify", _set("o", lambda o: o * (1 + 1e-6))),
    ("B47 verify, commit, plain step", "commit", _set("recurrent'", lambda s: s * (1 + 1e-6))),
    ("B47 verify and plain step over the cache", "attend 4", _set("o", lambda o: o * 1.01)),
    ("B52 a chunk of 4 rows, two of 2, four of 1", "2", _set("recurrent'", _transposed)),
    ("B53 NaN in another slot", "step", _leak("o", "recurrent")),
    ("B53 NaN in the rest of a page", "attend 1", _leak("o", "cache")),
    ("B56 order of a sum over ranks", "4 ranks, 8 rows", _set("sum", lambda s: s + 1)),
    ("B56 any terms over ranks", "16 ranks", _set("sum", lambda s: s * 1.01)),
]


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[m[0] for m in MUTANTS])
def test_a_wrong_kernel_is_found(number: int) -> None:
    title, case, change = MUTANTS[number]
    trial = TRIALS[title]
    assert wrong(trial, {case: change(trial.cases[case])}) != []


def test_rows_alone_are_compared() -> None:
    one, many = (Case.of(example("kda", f"{n},2,32,1")) for n in (1, 8))
    assert unlike(one.program, many.program) is None
    assert parity(emulated(one), emulated(many)) == {"equal": True, "max_diff": 0.0}

    def other(values: Values) -> None:
        values[13] = values[13] + 0.5

    found = parity(emulated(one, other), emulated(many))
    assert not found["equal"]
    assert found["values"] == ["v13"]
    assert abs(found["max_diff"] - 0.5) < 1e-6
    assert "other ops" in str(unlike(one.program, example("rms_norm", "8,64")))


def test_a_few_rows_are_compared_by_their_first() -> None:
    two, many = (Case.of(example("linear", f"{n},16,64")) for n in (2, 5))
    assert parity(emulated(two), emulated(many)) == {"equal": True, "max_diff": 0.0}


def test_a_value_of_too_few_rows_is_refused() -> None:
    kernel = emulated(Case.of(example("linear", "2,16,64")))
    given = kernel.draw(0)
    with pytest.raises(ValueError, match=r"v0 is bf16 \(2, 64\), not"):
        kernel({**given, "v0": given["v0"][:1]})


def _many_queries(rows: int, width: int) -> Program:
    s = Sketch()
    x = s.value("x", "bf16", rows, width)
    for number in range(24):
        query = s.value(f"q{number}", "f32", width, place="weight")
        results = [s.value(f"{name}{number}", "f32", rows) for name in ("top", "sum")]
        results.append(s.value(f"mix{number}", "f32", rows, width))
        s.step("attn_res_blocks", [query, x], results, eps=1e-5)
    return s.case().program


def test_sums_of_a_row_do_not_depend_on_the_rows() -> None:
    target = get_target("sm_90a")
    for width in (128, 2048, 7168):
        configs = [configure(_many_queries(rows, width), target) for rows in range(1, 17)]
        options = [cast(BlocksOptions, config.plans[0].options) for config in configs]
        assert len({(o.steps, o.slices, o.chunks, o.depth) for o in options}) == 1


def test_faults_that_are_tested_elsewhere_are() -> None:
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text()
