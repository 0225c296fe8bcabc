"""Bulk copies into shared memory and the barriers in shared memory that count them."""

import cutlass.cute as cute
from cutlass import Int32

from k3fuse.kernels.device import instructions as ins


def start(barrier, count):
    """Make a barrier of `count` arrivals a phase."""
    ins.asm("mbarrier.init.shared.b64 [{$r0}], {$r1};", read_only_args=[barrier, Int32(count)])


def arrive(barrier):
    """One arrival."""
    ins.asm("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier])


def expect(barrier, size):
    """One arrival, and `size` bytes that copies will bring in this phase."""
    ins.asm(
        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, size]
    )


def copy(shared, source, size, barrier):
    """Start a copy of `size` bytes; all three are multiples of 16."""
    ins.asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, size, barrier],
    )


def after_others():
    """Between accesses of the CTA's threads to memory and bulk copies into it."""
    ins.asm("fence.proxy.async.shared::cta;")


def passed(barrier, parity):
    """Nonzero when the phase of this parity is over; waits a while for it."""
    return ins.asm(
        "{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [{$r0}], {$r1}; "
        "selp.b32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[barrier, parity],
    )


@cute.jit
def wait(barrier: Int32, parity: Int32):
    """Wait for the end of the phase of this parity."""
    over = passed(barrier, parity)
    while over == 0:
        over = passed(barrier, parity)
