"""How launches are cut into stages, and what stands between them."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest

from k3fuse.errors import InputError
from k3fuse.kernels.examples import EXAMPLES, example
from k3fuse.kernels.family import NotSupported
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.kernels.program_json import program_data, program_from
from k3fuse.kernels.stages import normalize, outline
from k3fuse.runtime.bundle import Bucket
from k3fuse.target import get_target
from tests.kernels.conftest import ARCHES, COMMIT, STEP, VERIFY, programs, samples

H200 = get_target("h200")


def outlines(found: dict[str, Program]) -> dict[str, str]:
    return {program.label: outline(configure(program, H200).stages) for program in found.values()}


def test_stages_of_the_main_launches() -> None:
    found = outlines(programs(STEP, 2)) | outlines(programs(VERIFY, 2))
    found |= outlines(programs(COMMIT, 2))
    assert {label: found.get(label) for label in EXPECTED} == EXPECTED


EXPECTED = {
    "embedding.push_partial": "point",
    "l2_prefetch": "prefetch",
    "linear.push_partial": "linear",
    "attn_res_blocks*6": "blocks",
    "sum_slots.rms_norm.linear*6": "[row].linear",
    "sum_slots.attn_res_merge.rms_norm.linear*2.situ_mul": "[row].linear",
    "sum_slots.add.attn_res_merge.rms_norm.linear*4.situ_mul": "[row].linear",
    "sum_slots.rms_norm.linear.sum_slots.add.push_gather": "[row].linear",
    "rms_norm.linear.slice.rms_norm.slice.mla_append.mla_absorb_query": (
        "[row].linear.row|append.absorb"
    ),
    "mla_attend_latent": "attend|attend_merge",
    "mla_value.sigmoid_mul": "value",
    "add.attn_res_merge.rms_norm.linear.argmax_local.push_gather*2": "[row].linear|argmax",
    "kda_commit": "commit",
}
"""The norm of a query's rows and of a latent's rows are two row stages: only the first has linear
maps alone as its readers, so only that one is done by every CTA."""


def test_few_tokens_are_routed_by_every_cta() -> None:
    label = "route_topk.moe_experts.linear.push_partial.push_chunks"
    few, many = (outlines(programs(Bucket(m, 1, "step"), 2))[label] for m in (8, 9))
    assert few == "[route].experts_up.linear|experts_down"
    assert many == "route.linear|experts_up|experts_down"


def test_heads_of_few_requests_need_no_barrier() -> None:
    label = "linear.kda_step.gated_rms_norm"
    few, many = (programs(Bucket(m, 1, "step"), 2) for m in (2, 64))
    assert outlines(few)[label] == "kda_heads"
    assert "|kda|" in outlines(many)[label]
    (program,) = (p for p in few.values() if p.label == label)
    config = configure(program, H200)
    assert (config.ctas, config.cluster, config.spins) == (16, 2, False)


def test_a_decay_that_others_read_stays_a_stage_of_its_own() -> None:
    (program,) = (
        p for p in programs(STEP, 2).values() if p.label == "linear.kda_step.gated_rms_norm"
    )
    decay = program.steps[0].results[0]
    shared = dataclasses.replace(program, written=(*program.written, decay))
    assert "kda_heads" not in outline(configure(shared, H200).stages)


def test_a_mailbox_is_received_before_an_anchor_that_cannot_poll() -> None:
    for program in samples():
        made = normalize(program)
        assert made.steps[-1].results == program.steps[-1].results
        assert made.values[: len(program.values)] == program.values
        added = [step for step in made.steps if step not in program.steps]
        received = {s.operands[0] for s in added if s.op == "receive"}
        assert all(program.values[v].place == "mailbox" for v in received)


def test_every_step_has_a_stage_or_is_evaluated_where_it_is_read() -> None:
    for program in samples():
        config = configure(program, H200)
        placed = {i for stage in config.stages for i in stage.steps}
        for number, step in enumerate(config.program.steps):
            if number not in placed:
                (result,) = step.results
                assert config.program.consumers(result), (program.label, step)
                assert config.program.values[result].place == "internal"
        levels = [stage.level for stage in config.stages]
        assert levels == sorted(levels)
        assert config.barriers == max(levels)


@pytest.mark.parametrize("gpu", ARCHES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_fit_every_gpu(gpu: str, name: str) -> None:
    target = get_target(gpu)
    program = example(name, ",".join(map(str, EXAMPLES[name].one)))
    config = configure(program, target)
    assert config.smem <= target.smem_per_block
    assert 1 <= config.ctas <= target.sm_count
    assert config.threads % 32 == 0
    assert config.threads <= 1024
    assert pickle.loads(pickle.dumps(config)) == config
    assert {p.name for p in config.parameters if p.name.startswith("v")} == {
        f"v{i}"
        for i, v in enumerate(config.program.values)
        if v.place != "internal" and v.root == i
    }


def test_wrong_examples_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown example 'nope'; known: .*linear"):
        example("nope", "1")
    for shape in ("1,2", "1,a,64", "1,0,64"):
        with pytest.raises(InputError, match="linear takes M,N,K, for example 1,3216,7168"):
            example("linear", shape)


def test_a_refusal_has_a_reason() -> None:
    with pytest.raises(NotSupported, match="rows of 999983"):
        configure(example("rms_norm", "1,999983"), H200)


def test_programs_survive_json() -> None:
    for program in samples():
        assert program_from(json.loads(json.dumps(program_data(program)))) == program


def test_labels_are_c_identifiers_and_differ() -> None:
    configs: list[LaunchConfig] = [configure(program, H200) for program in samples()]
    assert all(config.label.isidentifier() for config in configs)
    assert len({config.label for config in configs}) == len(configs)


def test_configuring_needs_neither_the_compiler_nor_torch() -> None:
    code = (
        "import sys; sys.modules['cutlass'] = None; sys.modules['torch'] = None; "
        "from k3fuse.kernels.launch import configure; from k3fuse.kernels.examples import example; "
        "from k3fuse.target import get_target; "
        "print(configure(example('linear', '1,40,192'), get_target('h200')).ctas)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0
