"""What a kernel family says of a stage before it is compiled: work, shared memory, threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target


class NotSupported(Exception):  # noqa: N818 (an answer, not a fault)
    """A family does not do this stage; the message is the reason."""


@dataclass(frozen=True)
class StagePlan:
    """items: pieces of work for one CTA each; more CTAs would idle. threads: of a CTA, wanted.

    smem: bytes of shared memory of its own. scratch: bytes of global memory of its own, beside the
    values. options: a frozen dataclass of plain scalars for the device code (None: nothing).
    late: it fills its shared memory only when it runs, not above the wait, so that behind a
    barrier, or of private stages, that may be the memory of stages before. near: it takes operands
    from where private stages and peers left them, shared memory and the mailbox. early: bytes at
    the end of its shared memory that a late stage fills above the wait. askers: of the threads, the
    last ones, which only ask for weights. cluster: CTAs that may share the work that each needs the
    result of.
    """

    items: int
    threads: int = 256
    smem: int = 0
    scratch: int = 0
    options: Any = None
    late: bool = False
    near: bool = False
    early: int = 0
    askers: int = 0
    cluster: int = 1


Plan = Callable[[Program, Stage, Target], StagePlan]
"""Raises NotSupported with the reason."""


def require(condition: bool, reason: str) -> None:
    """Raise NotSupported unless the condition holds."""
    if not condition:
        raise NotSupported(reason)
