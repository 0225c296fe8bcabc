"""Who plays the ranks of the group: all of them on one GPU, one that plays its peers, or processes.

A mode says which ranks this process holds, where their mailboxes lie for each sender, and how a
value of all ranks is gathered outside of the plan (prefill, logits).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.runtime.gpu.layout import RingPlace


class RankMode(Protocol):
    """label: how reports call it. tp: ranks of the group. mine: those here. speaks: whether
    this process prints what all found."""

    @property
    def label(self) -> str: ...

    @property
    def tp(self) -> int: ...

    @property
    def mine(self) -> tuple[int, ...]: ...

    @property
    def speaks(self) -> bool: ...

    def allocate_rings(self, size: int, device: torch.device) -> list[Tensor]:
        """`size` bytes for the mailboxes of each rank of this process; remembered for `peers`."""
        ...

    def peers(self, rank: int, ring: RingPlace) -> list[int]:
        """By receiver, the address that `rank` takes for the first byte of the receiver's ring."""
        ...

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What every rank of the group holds, in rank order, from what those here hold."""
        ...

    def barrier(self) -> None:
        """Returns when every rank of the group is here and its GPU has done what it was given."""
        ...


@dataclass
class VirtualRanks:
    """All ranks in this process on one GPU, for tests and for one rank alone."""

    tp: int
    _rings: list[Tensor] = field(default_factory=list[Tensor], repr=False)

    @property
    def label(self) -> str:
        return "one rank" if self.tp == 1 else f"{self.tp} virtual ranks on one GPU"

    @property
    def speaks(self) -> bool:
        return True

    @property
    def mine(self) -> tuple[int, ...]:
        return tuple(range(self.tp))

    def allocate_rings(self, size: int, device: torch.device) -> list[Tensor]:
        self._rings = [torch.empty(size, dtype=torch.uint8, device=device) for _ in self.mine]
        return self._rings

    def peers(self, rank: int, ring: RingPlace) -> list[int]:
        return [base.data_ptr() + ring.offset for base in self._rings]

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def barrier(self) -> None:
        _synchronize(self._rings)


@dataclass
class Loopback:
    """One rank that plays its peers: what it sends to rank p lands in its own mailbox as if p had
    sent it. The work and the bytes are those of the real group; the numbers are not, and no link
    is crossed."""

    tp: int
    rank: int = 0
    _rings: list[Tensor] = field(default_factory=list[Tensor], repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.tp:
            raise InputError(f"--loopback-rank {self.rank}: the group has ranks 0 to {self.tp - 1}")

    @property
    def label(self) -> str:
        return f"loopback: rank {self.rank} of {self.tp} alone, no link crossed, numbers not real"

    @property
    def speaks(self) -> bool:
        return True

    @property
    def mine(self) -> tuple[int, ...]:
        return (self.rank,)

    def allocate_rings(self, size: int, device: torch.device) -> list[Tensor]:
        self._rings = [torch.empty(size, dtype=torch.uint8, device=device)]
        return self._rings

    def peers(self, rank: int, ring: RingPlace) -> list[int]:
        own = self._rings[0].data_ptr() + ring.offset
        return [own + (peer - rank) * ring.slot for peer in range(self.tp)]

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0]] * self.tp

    def barrier(self) -> None:
        _synchronize(self._rings)


@dataclass
class ProcessRanks:
    """One process a GPU, started by torchrun. Mailboxes are torch symmetric memory that peers reach
    by unicast pointers; multicast addresses are never asked for.

    Needs `torch.distributed` initialised with a backend for CUDA tensors.
    """

    tp: int
    rank: int
    _rings: list[Tensor] = field(default_factory=list[Tensor], repr=False)
    _bases: list[int] = field(default_factory=list[int], repr=False)

    @property
    def label(self) -> str:
        return f"rank {self.rank} of {self.tp}, one process a GPU"

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    @property
    def mine(self) -> tuple[int, ...]:
        return (self.rank,)

    def allocate_rings(self, size: int, device: torch.device) -> list[Tensor]:
        symmetric, group = _symmetric_memory(), distributed().group.WORLD
        ring: Tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(ring, group)
        self._rings, self._bases = [ring], [int(base) for base in handle.buffer_ptrs]
        return self._rings

    def peers(self, rank: int, ring: RingPlace) -> list[int]:
        return [base + ring.offset for base in self._bases]

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        own = tensors[0].contiguous()
        parts = [torch.empty_like(own) for _ in range(self.tp)]
        distributed().all_gather(parts, own)
        return parts

    def barrier(self) -> None:
        _synchronize(self._rings)
        distributed().barrier()


def _synchronize(rings: Sequence[Tensor]) -> None:
    for ring in rings:
        if ring.is_cuda:
            torch.cuda.synchronize(ring.device)


def distributed() -> Any:
    """torch.distributed, whose functions have no types."""
    return importlib.import_module("torch.distributed")


def _symmetric_memory() -> Any:
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise InputError(f"torch has no symmetric memory ({error}): use 2.11 or later") from None
