"""What the compiler made of the kernels: the PTX audit, and the limits of an SM."""

from __future__ import annotations

import pytest

from k3fuse.kernels.build import Built
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.schedule.audit import audit_kernel, pdl_use
from k3fuse.schedule.ptx import read_kernel
from k3fuse.schedule.ptx_access import access_of
from k3fuse.schedule.ptx_origins import KernelOperand
from k3fuse.target import get_target
from tests.kernels.conftest import ARCHES, CASES

INDICES = range(len(ARCHES) * len(CASES))


@pytest.fixture(params=INDICES)
def compiled(built: Built, request: pytest.FixtureRequest) -> CompiledKernel:
    return built.kernels[int(request.param)]


def test_the_audit_finds_nothing(compiled: CompiledKernel) -> None:
    operands = [KernelOperand(p.name, p.access, i) for i, p in enumerate(compiled.params)]
    assert (
        audit_kernel(
            compiled.ptx,
            compiled.symbol,
            operands,
            pdl=compiled.pdl,
            declared_smem=compiled.smem,
            dynamic_smem=compiled.smem,
            trigger=True,
        )
        == []
    )


def test_weights_are_asked_for_above_the_wait(compiled: CompiledKernel) -> None:
    (wait,) = pdl_use(compiled.ptx, compiled.symbol).waits
    early = [
        item
        for item in read_kernel(compiled.ptx, compiled.symbol).instructions()
        if item.line < wait and (a := access_of(item)) and a.kind == "read" and a.space == "global"
    ]
    assert early
    assert all(".v4." in item.opcode or "cp.async" in item.opcode for item in early)


def test_nothing_spills_and_everything_fits(compiled: CompiledKernel) -> None:
    target = get_target(compiled.arch)
    threads = compiled.block[0]
    assert compiled.stack == 0
    assert compiled.registers * threads <= 65536
    assert compiled.smem <= target.smem_per_block
    assert compiled.code < 16 * 1024  # of the 32 KB that stay in the instruction cache
