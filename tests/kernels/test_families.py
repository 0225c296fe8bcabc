"""Rows that every CTA keeps in shared memory give way when they do not fit beside the rest."""

from __future__ import annotations

from dataclasses import replace

from k3fuse.kernels import launch
from k3fuse.kernels.families import FAMILIES
from k3fuse.kernels.launch import configure
from k3fuse.kernels.program import Held, Program, Step
from k3fuse.target import get_target


def norm_and_linear(m: int, h: int, n: int) -> Program:
    values = (
        Held("bf16", (m, h), "activation", 0),
        Held("bf16", (h,), "weight", 1),
        Held("bf16", (m, h), "internal", 2),
        Held("bf16", (n, h), "weight", 3),
        Held("bf16", (m, n), "activation", 4),
    )
    steps = (
        Step("rms_norm", (("eps", 1e-5),), (0, 1), (2,)),
        Step("linear", (), (2, 3), (4,)),
    )
    return Program(1, values, steps, (4,), "entry")


def test_a_private_row_that_does_not_fit_is_done_behind_a_barrier() -> None:
    program, target = norm_and_linear(8, 2048, 3216), get_target("h200")
    wide = configure(program, target)
    assert [stage.private for stage in wide.stages] == [True, False]
    assert wide.barriers == 0
    tight = configure(program, replace(target, smem_per_block=96 * 1024))
    assert not any(stage.private for stage in tight.stages)
    assert tight.barriers == 1
    assert tight.ctas <= target.sm_count - launch.SIDE_SMS


def test_every_family_is_measured_and_chosen_in_order() -> None:
    assert all(family.measured for family in FAMILIES)
    few, many = (configure(norm_and_linear(m, 512, 64), get_target("h200")) for m in (8, 9))
    assert few.families[-1].name == "few tokens: a tile a time"
    assert many.families[-1].name == "blocks of 16 tokens"
    assert many.families[-1].refusals[0][1] == "9 rows: holds up to 8"
