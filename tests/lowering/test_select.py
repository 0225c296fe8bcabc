"""Which kernel does a launch, on which memory; and what becomes of kernels that are compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from k3fuse.errors import InputError
from k3fuse.kernels.build import Built, Request
from k3fuse.kernels.family import NotSupported
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.lowering import build_kernels as building
from k3fuse.lowering import select as selecting
from k3fuse.lowering.build_kernels import audit_all, build_kernels
from k3fuse.lowering.launch_program import launch_programs
from k3fuse.lowering.select import Kernels, polls_late, resources_of, select
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.selection import (
    NO_WORD,
    Selection,
    check_selection,
    launch_resources,
    read_kernels,
    read_selection,
)
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.proof import prove
from k3fuse.target import get_target
from tests.lowering.compiled import compiled

TP = 4
GB300 = get_target("gb300")


def tiny() -> tuple[Plan, Selection, Kernels]:
    made, kernels = compiled("kimi-k3-tiny", TP), Kernels(GB300)
    return made.plan, select(made.graph, made.plan, kernels), kernels


def test_every_launch_has_a_kernel_or_a_reason() -> None:
    plan, selection, kernels = tiny()
    assert [item.launch for item in selection.launches] == [x.name for x in plan.launches]
    assert all(bool(item.kernel) != bool(item.reason) for item in selection.launches)
    assert {item.kernel for item in selection.launches if item.kernel} == set(kernels.configs)
    assert all(name == config.label for name, config in kernels.configs.items())


@pytest.mark.parametrize("model", ["kimi-k3-tiny", "kimi-linear-tiny"])
@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_of_a_whole_model_is_without_a_kernel(model: str, tp: int) -> None:
    for rows, kind in ((1, "step"), (3, "verify"), (3, "commit")):
        made = compiled(model, tp, 2, rows=rows, kind=kind)  # pyright: ignore[reportArgumentType]
        assert select(made.graph, made.plan).without == ()


def test_layers_and_buckets_share_kernels() -> None:
    one, two = (compiled("kimi-k3-tiny", TP, context=context) for context in (1, 2))
    kernels = Kernels(GB300)
    select(one.graph, one.plan, kernels)
    names = set(kernels.configs)
    assert 0 < len(names) < len(one.plan.launches) / 2
    select(two.graph, two.plan, kernels)  # the same step, priced for another context
    assert set(kernels.configs) == names


def test_arguments_name_memory_of_the_plan() -> None:
    plan, selection, kernels = tiny()
    weights = {w.value for w in plan.weights}
    arena = {b.value: b for b in plan.arena}
    states = {s.name for s in plan.states}
    rings = {m.name: m for m in plan.mailboxes}
    seen: set[str] = set()
    for position, item in enumerate(selection.launches):
        if not item.kernel:
            continue
        config, launch = kernels.configs[item.kernel], plan.launches[position]
        assert [a.parameter for a in item.arguments] == [p.name for p in config.parameters]
        operands = {o.value: o for o in launch.operands}
        for argument, parameter in zip(item.arguments, config.parameters, strict=True):
            seen.add(argument.role)
            if argument.role == "memory":
                home = {
                    "weight": argument.storage in weights,
                    "activation": argument.storage in arena,
                    "state": argument.storage in states,
                    "host": argument.storage.startswith("inputs."),
                }
                assert home[parameter.access], (argument, parameter)
                if parameter.access == "activation":
                    assert argument.offset == arena[argument.storage].offset
            elif argument.role in ("mailbox", "peers", "use"):
                assert 0 <= argument.use < rings[argument.storage].uses
                operand = operands[argument.value]
                assert (operand.storage, operand.use) == (argument.storage, argument.use)
                mode = {"mailbox": "read", "peers": "write"}.get(argument.role, operand.mode)
                assert operand.mode == mode
            else:
                assert argument.role == argument.parameter
    assert seen == {"memory", "mailbox", "peers", "use", "scratch", "control", "step", "rank"}


def test_every_operand_of_a_launch_is_an_argument() -> None:
    """But views of them, and what only passes through the launch."""
    plan, selection, _ = tiny()
    for launch, item in zip(plan.launches, selection.launches, strict=True):
        if item.kernel:
            given = {a.value for a in item.arguments} | {a.storage for a in item.arguments}
            for operand in launch.operands:
                assert operand.value in given or operand.storage in given, (launch.name, operand)


def test_memory_beside_the_plan() -> None:
    _, selection, kernels = tiny()
    spinning = [
        item for item in selection.launches if item.kernel and kernels.configs[item.kernel].barriers
    ]
    assert [item.control for item in spinning] == list(range(selection.memory.control_words))
    assert all(x.control == NO_WORD for x in selection.launches if x not in spinning)
    most = max(config.scratch_bytes for config in kernels.configs.values())
    assert max(dict(selection.memory.scratch).values()) == most
    assert selection.memory.step
    tables = {a.storage for x in selection.launches for a in x.arguments if a.role == "peers"}
    assert set(selection.memory.peer_tables) == tables != set()


def test_a_refusal_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fussy(program: Program, target: Any, *, debug: bool) -> LaunchConfig:
        if "embedding" in program.label:
            raise NotSupported("tables of this size")
        return configure(program, target, debug=debug)

    monkeypatch.setattr(selecting, "configure", fussy)
    _, selection, _ = tiny()
    (found,) = selection.without
    assert (found.launch, found.kernel, found.reason) == ("embed_tokens", "", "tables of this size")
    assert found.arguments == ()


def test_no_kernel_polls_after_it_publishes() -> None:
    """The order that the proof believes; a stage too early would be refused."""
    _, _, kernels = tiny()
    turned = 0
    for config in kernels.configs.values():
        assert not polls_late(config)
        late = dataclasses.replace(config, stages=tuple(reversed(config.stages)))
        turned += polls_late(late)
    assert turned


def test_text_is_read_back_and_mistakes_are_named() -> None:
    plan, selection, kernels = tiny()
    text = selection.to_json()
    assert read_selection(text, "s.json") == selection
    with pytest.raises(InputError, match=r"s\.json: version 9, this k3fuse reads 1: compile again"):
        read_selection(re.sub(r'("version": )1', r"\g<1>9", text), "s.json")
    with pytest.raises(InputError, match=r"s\.json: not JSON"):
        read_selection("{", "s.json")
    with pytest.raises(InputError, match=r"s\.json: launches"):
        read_selection(text.replace('"reason"', '"raison"', 1), "s.json")
    with pytest.raises(InputError, match=r"k\.json: format None"):
        read_kernels("[]", "k.json")
    with pytest.raises(InputError, match="there is no kernel"):
        check_selection(selection, plan, {})
    other = compiled("kimi-k3-tiny", TP, 2).plan
    with pytest.raises(InputError, match="made for another plan"):
        check_selection(selection, other, {})
    assert kernels.resources(selection)


def test_the_proof_knows_the_grids() -> None:
    plan, selection, kernels = tiny()
    resources = kernels.resources(selection)
    schedule = schedule_of(plan, resources)
    for launch in schedule.launches:
        assert launch.grid == resources[launch.name].grid > 0
        assert launch.spins == resources[launch.name].spins
    proof = prove(schedule)
    assert (proof.verdict, proof.no_resources) == ("ACCEPT", [])
    bare = prove(schedule_of(plan))
    assert len(bare.no_resources) == len(plan.launches)


PTX = """
.visible .entry NAME_0(
PARAMETERS
)
.reqntid 128, 1, 1
{
griddepcontrol.launch_dependents;
BEFORE
griddepcontrol.wait;
ret;
}
"""


def fake(config: LaunchConfig, arch: str, before: str = "") -> CompiledKernel:
    kinds = {"u64": ".param .u64 .ptr .global .align 16", "i32": ".param .u32"}
    listed = ",\n".join(
        f"{kinds[p.kind]} NAME_0_param_{i}" for i, p in enumerate(config.parameters)
    )
    text = PTX.replace("PARAMETERS", listed).replace("BEFORE", before)
    return CompiledKernel(
        name=config.label,
        arch=arch,
        symbol=f"{config.label}_0",
        cubin=config.label.encode(),
        ptx=text.replace("NAME", config.label),
        params=config.parameters,
        grid=(config.ctas, 1, 1),
        block=(config.threads, 1, 1),
        cluster=None if config.cluster == 1 else (config.cluster, 1, 1),
        smem=config.smem,
        pdl=True,
        registers=64,
        stack=0,
        code=100,
    )


def faked(monkeypatch: pytest.MonkeyPatch, before: str = "") -> None:
    """No compiler: every kernel does nothing but what `before` says above the wait."""

    def make(requests: Sequence[Request], **_: object) -> Built:
        return Built(tuple(fake(r.config, r.arch, before) for r in requests), len(requests))

    monkeypatch.setattr(building, "build", make)
    monkeypatch.setattr(building, "dsl_version", lambda: "a compiler")


def test_records_of_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch)
    plan, selection, kernels = tiny()
    built = build_kernels(kernels, folder=tmp_path)
    assert built.findings == ()
    assert built.distinct == built.compiled == len(kernels.configs)
    records = built.manifest.by_name()
    for name, config in kernels.configs.items():
        record = records[name]
        assert record.resources == resources_of(config)
        assert record.sha256 == hashlib.sha256(built.cubins[record.cubin]).hexdigest()
        assert len(record.stages) == len(config.stages)
        assert record.audited
    assert launch_resources(selection, records) == kernels.resources(selection)
    check_selection(selection, plan, records)
    assert read_kernels(built.manifest.to_json(), "k.json") == built.manifest


def test_a_kernel_that_reads_too_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch, "ld.param.b64 %rd1, [NAME_0_param_0]; ld.global.b32 %r1, [%rd1];")
    _, _, kernels = tiny()
    built = build_kernels(kernels, folder=tmp_path)
    for name, config in kernels.configs.items():
        found = [text for text in built.findings if name in text]
        record = built.manifest.by_name()[name]
        assert record.audited == (config.parameters[0].access == "weight") == (not found)
        assert all("before wait" in text or "not proven" in text for text in found)


def test_answers_of_the_audit_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, _, kernels = tiny()
    config = next(iter(kernels.configs.values()))
    bad = "ld.param.b64 %rd1, [NAME_0_param_0]; st.global.b32 [%rd1], 1;"
    made = [fake(config, "sm_103a"), fake(config, "sm_103a", bad)]
    first = audit_all(made, folder=tmp_path)
    assert first[0] == ()
    assert first[1]

    def never(kernel: CompiledKernel) -> tuple[str, ...]:
        raise AssertionError(kernel.name)

    monkeypatch.setattr(building, "audit_one", never)
    assert audit_all(made, folder=tmp_path) == first


def test_registers_must_fit_an_sm(tmp_path: Path) -> None:
    _, _, kernels = tiny()
    config = next(iter(kernels.configs.values()))
    kernel = fake(config, "sm_103a")
    wide = dataclasses.replace(kernel, registers=255, block=(512, 1, 1))
    (found,) = audit_all([wide], folder=tmp_path)
    assert "registers" in found[0]
    assert "131072" in found[0]


def test_programs_and_launches_agree() -> None:
    made = compiled("kimi-k3-tiny", TP)
    assert list(launch_programs(made.graph, made.plan)) == [x.name for x in made.plan.launches]
