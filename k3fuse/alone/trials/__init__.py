"""Trials of kernels: inputs on which kernels of this field went wrong, with the right answers.

Numbers such as B32 are those of the published faults that the tests name too. A trial launches
the kernels of its cases and yields what is wrong, in words. One file a kind of kernel.
"""

from __future__ import annotations

from k3fuse.alone.trials import cache, experts, kda, padding, pushes, routing, sums
from k3fuse.alone.trials.padding import padding_trial
from k3fuse.alone.trials.trial import ELSEWHERE, Trial

__all__ = ["ELSEWHERE", "Trial", "padding_trial", "trials"]


def trials() -> tuple[Trial, ...]:
    """All trials whose programs are made by hand, by fault."""
    kinds = (pushes, routing, experts, padding, kda, cache, sums)
    return tuple(sorted((t for kind in kinds for t in kind.trials()), key=lambda t: t.fault))
