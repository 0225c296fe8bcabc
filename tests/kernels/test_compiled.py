"""What the compiler made of real launches: the PTX audit, and the limits of an SM."""

from __future__ import annotations

import pytest

from k3fuse.kernels.build import Built
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.schedule.audit import audit_kernel
from k3fuse.schedule.ptx_origins import KernelOperand
from k3fuse.target import get_target


def audit(kernel: CompiledKernel) -> list[str]:
    operands = [KernelOperand(p.name, p.access, i) for i, p in enumerate(kernel.params)]
    found = audit_kernel(
        kernel.ptx,
        kernel.symbol,
        operands,
        pdl=kernel.pdl,
        declared_smem=kernel.smem,
        dynamic_smem=kernel.smem,
        trigger=True,
    )
    return [f"{kernel.name} {kernel.arch}: {item}" for item in found]


@pytest.mark.slow
def test_the_audit_finds_nothing(built: Built) -> None:
    assert [finding for kernel in built.kernels for finding in audit(kernel)] == []


@pytest.mark.slow
def test_nothing_spills_and_everything_fits(built: Built) -> None:
    for kernel in built.kernels:
        assert kernel.stack == 0, kernel.name
        assert kernel.registers * kernel.block[0] <= 65536, kernel.name
        assert kernel.smem <= get_target(kernel.arch).smem_per_block, kernel.name
        assert kernel.code < 96 * 1024, kernel.name
