"""What is missing on a machine, from made-up facts: no GPU is needed for any answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from k3fuse.runtime import machine as machine_module
from k3fuse.runtime.bundle import read_bundle, write_bundle
from k3fuse.runtime.fit import Answer, Demand, Need, abilities, demand, stands_for, ways
from k3fuse.runtime.machine import Gpu, Machine, probe
from k3fuse.target import get_target
from tests.runtime.test_bundle import contents

GB = 10**9


def gpu(index: int = 0, name: str = "NVIDIA H200", free: int = 140) -> Gpu:
    h200 = get_target("h200")
    return Gpu(index, name, (9, 0), h200.sm_count, h200.smem_per_block, free * GB, 141 * GB)


def machine(*gpus: Gpu) -> Machine:
    return Machine(
        python="3.11.7",
        system="Linux x86_64",
        torch="2.11.0+cu130",
        cuda="13.0",
        driver="580.159.03",
        driver_cuda="13.0",
        cuda_python="13.0.1",
        cutlass="4.8.1",
        symmetric_memory=True,
        no_gpu="" if gpus else "torch sees no GPU: look at nvidia-smi",
        gpus=gpus,
        peers=tuple(tuple(True for _ in gpus) for _ in gpus),
    )


FOUR = machine(*(gpu(i) for i in range(4)))
WANTS = Demand(
    4, get_target("h200:32"), Need(weights=20 * GB, state=GB, arena=0, mailboxes=0, scratch=0)
)


def missing(answers: list[Answer]) -> list[tuple[str, ...]]:
    return [answer.missing for answer in answers]


def test_a_full_machine_can_all() -> None:
    assert missing(abilities(FOUR)) == [()] * 5
    assert missing(ways(FOUR, WANTS)) == [()] * 4


def test_without_a_gpu_only_the_cpu_is_left() -> None:
    bare = replace(machine(), cuda_python="", cutlass="")
    reason = "torch sees no GPU: look at nvidia-smi"
    assert missing(abilities(bare)) == [
        (),
        (),
        ("nvidia-cutlass-dsl is not installed: pip install 'k3fuse[compile]'",),
        (reason, "cuda-python is not installed: pip install 'k3fuse[gpu]'"),
        (reason,),
    ]
    *on_gpus, reference = ways(bare, WANTS)
    assert {answer.missing[0] for answer in on_gpus} == {reason}
    assert reference.ok


def test_too_few_gpus_name_the_launch_on_several_machines() -> None:
    (processes, virtual, loopback, _) = ways(machine(gpu(0), gpu(1)), WANTS)
    (reason,) = processes.missing
    assert reason.startswith("2 of 4 GPUs are here: torchrun --nnodes 2 --nproc-per-node 2, on")
    assert virtual.ok
    assert loopback.ok
    (reason,) = ways(machine(*(gpu(i) for i in range(3))), WANTS)[0].missing
    assert reason == "3 of 4 GPUs are here: compile with a smaller --tp"


def test_memory_is_counted_by_way() -> None:
    busy = machine(gpu(0), gpu(1, free=80), gpu(2, free=20), gpu(3))
    processes, virtual, loopback, _ = ways(busy, WANTS)
    (reason,) = processes.missing
    assert reason.startswith("GPU 2 has 20.00 GB free of 141.00, 21.00 GB are needed: end what")
    assert virtual.ok  # 84 GB on the emptiest GPU
    small = machine(*(gpu(i, free=83) for i in range(4)))
    processes, virtual, loopback, _ = ways(small, WANTS)
    assert (processes.ok, virtual.ok, loopback.ok) == (True, False, True)
    assert "84.00 GB are needed" in virtual.missing[0]


def test_virtual_ranks_need_sms_of_their_own() -> None:
    whole = replace(WANTS, target=get_target("h200"))
    processes, virtual, loopback, _ = ways(FOUR, whole)
    assert virtual.missing == (
        "4 ranks take 132 SMs each, GPU 0 has 132: compile with --target h200:32",
    )
    assert processes.ok
    assert loopback.ok
    many = replace(whole, tp=16, need=Need(0, 0, 0, 0, 0))
    assert "use fewer ranks" in ways(FOUR, many)[1].missing[0]


def test_gpus_of_another_kind_are_named_with_the_target_to_compile_for() -> None:
    blackwell = replace(gpu(1, "NVIDIA GB300"), capability=(10, 3))
    processes, virtual, *_ = ways(machine(gpu(0), blackwell), replace(WANTS, tp=2))
    assert processes.missing == (
        "GPU 1 (NVIDIA GB300) is sm_103a, the bundle's kernels are sm_90a: compile with "
        "--target gb300",
        "1 of 2 GPUs are here: torchrun --nnodes 2 --nproc-per-node 1, on machines that share "
        "NVLink, or compile with a smaller --tp",
    )
    assert virtual.ok  # on the other GPU
    old = replace(gpu(0, "NVIDIA A100"), capability=(8, 0))
    assert "no target has the architecture sm_80a" in abilities(machine(old))[3].missing[0]
    part = replace(gpu(0), sm_count=66)
    whole = replace(WANTS, target=get_target("h200"))
    assert "has 66 SMs, h200 has 132" in ways(machine(part), whole)[2].missing[0]
    small = replace(gpu(0), smem_per_block=99 * 1024)
    assert "gives a CTA 101376 bytes" in ways(machine(small), WANTS)[2].missing[0]


@pytest.mark.parametrize(
    ("name", "capability", "target"),
    [
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h200"),  # the row of its architecture
        ("NVIDIA B200", (10, 0), "b200"),
        ("NVIDIA GB200", (10, 0), "gb200"),
        ("NVIDIA GB300", (10, 3), "gb300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "rtx-pro-6000"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), None),
    ],
)
def test_rows_of_gpus(name: str, capability: tuple[int, int], target: str | None) -> None:
    row = stands_for(replace(gpu(0, name), capability=capability))
    assert (None if row is None else row.name) == target


def test_several_ranks_need_links_and_symmetric_memory() -> None:
    apart = tuple(tuple(i == j or {i, j} == {0, 1} for j in range(4)) for i in range(4))
    (first, second) = ways(replace(FOUR, peers=apart, symmetric_memory=False), WANTS)[0].missing
    assert first.startswith("torch has no symmetric memory")
    assert "(0-2, 0-3, 1-2, 1-3, 2-0, 2-1, 2-3, 3-0, 3-1, 3-2)" in second
    assert ways(replace(FOUR, peers=apart), replace(WANTS, tp=2))[0].ok  # on GPUs 0 and 1
    assert not abilities(machine(gpu()))[4].ok


def test_a_gpu_in_trouble_is_named() -> None:
    lost = replace(gpu(1), trouble="CUDA error: uncorrectable ECC error encountered", free=0)
    assert abilities(machine(gpu(0), lost))[3].missing == (
        "GPU 1 cannot be used (CUDA error: uncorrectable ECC error encountered): "
        "nvidia-smi -q -i 1",
    )


def test_what_a_bundle_lacks(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", replace(contents(), checkpoint=None))
    wants = demand(read_bundle(tmp_path / "bundle"))
    assert wants.unready == ("the bundle was compiled without weights: give run a --checkpoint",)
    assert wants.kernels == ("the bundle has no kernels: compile again without --no-kernels",)
    write_bundle(tmp_path / "bundle", contents())
    wants = demand(read_bundle(tmp_path / "bundle"))
    assert wants.unready == ("the checkpoint /models/kimi is not there: give run a --checkpoint",)


def test_the_need_covers_every_bucket(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", contents())
    bundle = read_bundle(tmp_path / "bundle")
    need = demand(bundle).need
    plans = [bundle.plan(bucket).memory for bucket in bundle.buckets]
    assert len(plans) > 1
    for part in ("weights", "state", "arena"):
        sizes = [getattr(memory, part) for memory in plans]
        assert max(sizes) <= getattr(need, part) <= sum(sizes), part
    assert need.arena == max(memory.arena for memory in plans)
    assert need.mailboxes == sum(memory.mailboxes for memory in plans)
    assert need.total == need.weights + need.state + need.arena + need.mailboxes + need.scratch


def test_this_machine_can_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = probe()
    assert (here.gpus == ()) == bool(here.no_gpu)
    assert len(here.peers) == len(here.gpus)
    version = tmp_path / "version"
    monkeypatch.setattr(machine_module, "_DRIVER", version)
    assert probe().driver == ""
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  x\n")
    assert probe().driver == "580.65.06"
