"""Compiled kernels on the CPU, run by a machine for PTX under the harness of single launches, which
checks them on a GPU: numbers, choices, peers' rings, guards, rows of padding."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from k3fuse.alone.check import check
from k3fuse.alone.launching import Case, Kernel
from k3fuse.alone.parity import parity
from k3fuse.kernels.examples import example
from k3fuse.kernels.families import FAMILIES
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.kernels.stages import Kind
from k3fuse.runtime.bundle import Bucket
from k3fuse.target import get_target
from tests.kernels.conftest import TINY, programs
from tests.kernels.emulated import memory_at
from tests.kernels.ptx_machine import Machine
from tests.kernels.ptx_memory import Fault, GlobalMemory, Region

LANES = 1536  # of a grid; more CTAs would take longer and find no more


class OnCpu:
    """A kernel folder of one kernel; each launch takes another order of warps."""

    def __init__(self, kernel: CompiledKernel, program: Program, seed: int) -> None:
        self.kernel, self.program, self.seed = kernel, program, seed

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[[int], None]:
        regions = [r for p in self.kernel.params for r in self._regions(p.name, arguments)]
        values = [arguments[p.name] for p in self.kernel.params]

        def launch(stream: int) -> None:
            self.seed += 1
            machine = Machine(
                self.kernel.ptx,
                values,
                GlobalMemory(regions),
                ctas=self.kernel.grid[0],
                threads=self.kernel.block[0],
                smem=self.kernel.smem,
                cluster=self.kernel.cluster[0] if self.kernel.cluster else 1,
                seed=self.seed,
            )
            machine.run()

        return launch

    def _regions(self, name: str, arguments: Mapping[str, Any]) -> list[Region]:
        """What a kernel may touch through a parameter."""
        if name in ("scratch", "control", "errors", "step"):
            size = {"scratch": self.kernel.scratch, "step": 8}.get(name, 256)
            return [Region(name, arguments[name], size)]
        if not name.startswith("v"):
            return []
        held = self.program.values[int(name[1:])]
        if held.ring is None:
            return [Region(name, arguments[name], held.bytes)]
        size = held.ring.stages * held.ring.stage_bytes
        if held.place == "mailbox":
            return [Region(name, arguments[name], size)]
        peers = memory_at(arguments[name], "i64", (self.program.tp,))
        rings = [Region(f"{name} of {p}", int(at), size) for p, at in enumerate(peers)]
        return [Region(name, arguments[name], 8 * self.program.tp), *rings]


@functools.cache
def configured(program: Program) -> LaunchConfig:
    config = configure(program, get_target("sm_90a"))
    if config.stages[0].kind == "kda_heads":
        return config  # a CTA for each slice of a head, no fewer
    most = max(1, LANES // config.threads // config.cluster) * config.cluster
    return replace(config, ctas=min(config.ctas, most))


def compiled(program: Program) -> CompiledKernel:
    config = configured(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the CuTe DSL about itself
        build = importlib.import_module("k3fuse.kernels.device.launch").build
        return replace(build(config, "sm_90a"), scratch=config.scratch_bytes)


def _facts(kernel: CompiledKernel) -> dict[str, Any]:
    params = [{"name": p.name, "kind": p.kind} for p in kernel.params]
    return {"params": params, "scratch": kernel.scratch}


def faults_of(program: Program, kernel: CompiledKernel, seed: int) -> list[str]:
    program = configured(program).program
    folder, facts = OnCpu(kernel, program, seed), _facts(kernel)
    try:
        return check(folder, "k", facts, program, device="cpu", seed=seed, replays=0).faults
    except Fault as fault:
        return [str(fault)]


# Buckets by name, and launches of theirs that are not like one further up.
BUCKETS = {
    "step": (Bucket(2, 1, "step"), 2, TINY),
    "step of 9": (Bucket(9, 1, "step"), 2, TINY),
    "verify": (Bucket(2, 2, "step"), 2, TINY),
    "commit": (Bucket(2, 2, "commit"), 2, TINY),
    "one rank": (Bucket(2, 1, "step"), 1, TINY),
    "kimi-linear": (Bucket(2, 1, "step"), 2, "kimi-linear-tiny"),
}
LAUNCHES = {
    "step": """
        embed_tokens
        embed_tokens.prefetch
        layers.0.self_attn.projections
        layers.0.self_attn.kda_core
        layers.0.self_attn.o_proj
        layers.0.attn_res_blocks
        layers.0.mlp.projections
        layers.1.self_attn.projections
        layers.1.block_sparse_moe.shared_experts.projections
        layers.1.block_sparse_moe.experts.routed_experts
        layers.1.block_sparse_moe.routed_expert_up_proj
        layers.2.self_attn.projections
        layers.3.self_attn.mla_query
        layers.3.self_attn.mla_attend.mla_attend_latent
        layers.3.self_attn.mla_value
        layers.6.attn_res_blocks
        lm_head
        argmax.pick""",
    "step of 9": """
        layers.0.self_attn.projections
        layers.0.self_attn.kda_core
        layers.0.self_attn.o_proj
        layers.0.mlp.projections
        layers.1.block_sparse_moe.experts.routed_experts
        layers.3.self_attn.mla_query
        layers.3.self_attn.mla_value
        lm_head""",
    "verify": """
        layers.0.self_attn.kda_core
        layers.1.block_sparse_moe.experts.routed_experts
        layers.3.self_attn.mla_query
        layers.3.self_attn.mla_attend.mla_attend_latent""",
    "commit": "kda_commit",
    "one rank": """
        embed_tokens
        layers.0.mlp.down_proj
        layers.1.block_sparse_moe.routed_experts
        layers.1.block_sparse_moe.routed_expert_up_proj
        lm_head
        argmax""",
    "kimi-linear": """
        layers.0.self_attn.kda_core
        layers.0.mlp.projections
        layers.1.block_sparse_moe.experts.routed_experts
        layers.3.self_attn.mla_query
        layers.3.self_attn.mla_attend.mla_attend_latent
        layers.3.self_attn.mla_attend.mla_value""",
    "example": """
        argmax 1,40000
        slots_norm 4,2,2048
        rms_norm 1,7168
        experts 3,16,4,256,96
        experts 1,16,16,256,96
        linear 33,72,160
        linear 33,72,32
        linear 5,16,7168
        linear 21,24,2120""",
}
CASES = [
    (where, name.strip()) for where, names in LAUNCHES.items() for name in names.strip().split("\n")
]
IDS = [f"{where}: {name}" for where, name in CASES]


@functools.cache
def program_of(where: str, name: str) -> Program:
    if where == "example":
        return example(*name.split(" "))
    return programs(*BUCKETS[where])[name]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name"), CASES, ids=IDS)
def test_a_launch_is_right(dsl: None, where: str, name: str) -> None:
    program = program_of(where, name)
    seed = zlib.crc32(f"{where} {name}".encode())
    assert faults_of(program, compiled(program), seed) == []


def test_every_kind_of_stage_and_every_family_has_its_launch() -> None:
    seen: set[tuple[Kind, str]] = set()
    for case in CASES:
        config = configured(program_of(*case))
        chosen = zip(config.stages, config.families, strict=True)
        seen |= {(stage.kind, family.name) for stage, family in chosen}
    assert {kind for kind, _ in seen} == set(get_args(Kind))
    assert {(family.kind, family.name) for family in FAMILIES} == seen
    assert any(configured(program_of(*case)).cluster > 1 for case in CASES)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_has_the_same_bits_where_a_cluster_splits_k(dsl: None, rows: int) -> None:
    few, some = (Case.of(example("linear", f"{m},16,7168")) for m in (rows, 5))
    families = [configured(case.program).families[0].name for case in (few, some)]
    assert families == ["few tokens: a tile a time", "some tokens: K over a cluster"]
    kernels = [
        Kernel(OnCpu(kernel, case.program, 1), "k", _facts(kernel), case, "cpu")
        for case, kernel in ((case, compiled(case.program)) for case in (few, some))
    ]
    assert parity(*kernels)["equal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "pattern", "instead", "where"),
    [
        (
            "step: layers.0.attn_res_blocks",
            r"(shfl\.sync\.bfly\.b32[^;]*), 16, 31",
            r"\1, 8, 31",
            0,
        ),
        ("step: layers.0.attn_res_blocks", r"cp\.async\.wait_[^;]*;", "", 0),
        ("step: layers.0.self_attn.kda_core", r"bar\.sync\s+0;", "", -1),
        ("step: layers.0.self_attn.o_proj", r"\{ \.reg \.pred done[^}]*\}", "", 0),
        ("step: layers.0.self_attn.o_proj", r"(st\.volatile\.global\S*\s+\[%rd\d+)\]", r"\1+8]", 0),
        ("example: slots_norm 4,2,2048", r"barrier\.cluster\.wait[^;]*;", "", 0),
    ],
    ids=["partner", "copies", "barrier", "mbarrier", "address", "cluster"],
)
def test_a_kernel_that_is_wrong_in_one_place_is_found(
    dsl: None, case: str, pattern: str, instead: str, where: int
) -> None:
    program = program_of(*CASES[IDS.index(case)])
    kernel = compiled(program)
    match = list(re.finditer(pattern, kernel.ptx))[where]
    ptx = kernel.ptx[: match.start()] + match.expand(instead) + kernel.ptx[match.end() :]
    assert any(faults_of(program, replace(kernel, ptx=ptx), seed) for seed in range(4))


class PeerLost(OnCpu):
    """Empties the mailbox, value 0, before the launch."""

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[[int], None]:
        ring = self.program.values[0].ring
        assert ring is not None
        words = ring.stages * ring.stage_bytes // 4
        memory_at(arguments["v0"], "f32", (words,)).fill_(-0.0)
        return super().bind(name, arguments)


def test_a_lost_peer_ends_a_debug_build_with_a_record(
    dsl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = importlib.import_module("k3fuse.kernels.device.context")
    monkeypatch.setattr(context, "DEBUG_SPINS", 3)
    build = importlib.import_module("k3fuse.kernels.device.launch").build
    config = configure(example("slots_norm", "2,1,64"), get_target("sm_90a"), debug=True)
    kernel = build(config, "sm_90a")
    params = [{"name": p.name, "kind": p.kind} for p in kernel.params]
    folder = PeerLost(kernel, config.program, seed=1)
    facts = {"params": params, "scratch": config.scratch_bytes}
    found = check(folder, "k", facts, config.program, device="cpu", seed=1, replays=0)
    (record,) = (f for f in found.faults if f.startswith("a spin was given up"))
    numbers = [int(n) & 0xFFFFFFFF for n in re.findall(r"-?\d+", record)]
    assert numbers[0] > 0  # spins given up
    assert numbers[6] == 0  # CTA
    assert numbers[8] == 0  # the mailbox, value 0 of the program
    assert numbers[10] == 0x80000000  # the word seen: empty


def result_of(body: str, words: int = 32, ctas: int = 1, threads: int = 32) -> list[int]:
    """Words of memory, zeros at first, after instructions that have its address in %rd1."""
    data = torch.zeros(words, dtype=torch.int32)
    ptx = f""".entry k( .param .u64 k_param_0 ) {{
        .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .b16 %rs<9>;
        ld.param.b64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;
        add.s64 %rd2, %rd1, %rd2; {body} ret; }}"""
    memory = GlobalMemory([Region("data", data.data_ptr(), 4 * words)])
    machine = Machine(
        ptx, [data.data_ptr()], memory, ctas=ctas, threads=threads, smem=256, limit=20_000
    )
    machine.run()
    return [int(word) for word in data]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "st.global.b32 [%rd2+4], %r1;",
            r"st.global.b32 \[%rd2\+4\].*: out of bounds: data \+ 128",
        ),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd2];", "ld.global.v2.b32.*: misaligned"),
        ("mov.b32 %r2, 16; st.shared.b32 [%r2], %r1;", "st.shared.b32.*: out of bounds: shared"),
        ("again: bra again;", "a hang"),
        ("setp.eq.b32 %p1, %r1, 0; @%p1 bar.sync 0;", "bar.sync 0: not all lanes"),
        ("bar.sync 0, 64;", "deadlock: 32 lanes wait, the first at bar.sync 0, 64"),
    ],
)
def test_faults_name_the_instruction(body: str, fault: str) -> None:
    with pytest.raises(Fault, match=fault):
        result_of(body)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("mov.b64 %rd3, -6; mul.hi.s64 %rd3, %rd3, 6148914691236517206; mov.b64 %rd4, %rd3;", -3),
        ("mov.b64 %rd3, -1; mul.hi.u64 %rd4, %rd3, 7;", 6),
        ("mov.b32 %r2, 0x33221100; prmt.b32 %r2, %r2, 0x77665544, 0x7250; @@", 0x77225500),
        ("mov.b32 %r2, 0x12345678; shf.l.wrap.b32 %r2, %r2, 0xabcd, 8; @@", 0xABCD12),
        ("mov.b32 %r2, -7; div.s32 %r2, %r2, 2; @@", -3),
        ("mov.b32 %r2, -7; shr.s32 %r2, %r2, 40; @@", -1),
        ("mov.b16 %rs1, -5; mul.wide.s16 %r2, %rs1, 1000; @@", -5000),
        ("mov.b32 %r2, 0f3F808000; cvt.rn.bf16x2.f32 %r2, 0f3F818000, %r2; @@", 0x3F823F80),
        ("shfl.sync.up.b32 %r2, %r1, 1, 0, -1; shfl.sync.idx.b32 %r2, %r2, 5, 31, -1; @@", 4),
        ("setp.lt.u32 %p1, %r1, 3; vote.sync.ballot.b32 %r2, %p1, -1; @@", 7),
    ],
)
def test_instructions_compute_what_ptx_says(body: str, wanted: int) -> None:
    body = body.replace("@@", "cvt.s64.s32 %rd4, %r2;")
    assert result_of(f"{body} st.global.b32 [%rd2], %rd4;")[0] == wanted


def test_ctas_count_together() -> None:
    assert result_of("atom.global.acq_rel.add.u32 %r2, [%rd1], 1;", 1, 3, 64) == [192]
