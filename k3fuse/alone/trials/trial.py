"""What a trial is, and faults that are tried elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from k3fuse.alone.launching import Case, Kernel, Tensors, same_bits

Kernels = Mapping[str, Kernel]


@dataclass(frozen=True)
class Trial:
    """fault: the number of the published fault. right: the right answer in words.

    run: launches the kernels of the cases, by the same names, and yields what is wrong.
    """

    fault: str
    name: str
    right: str
    cases: Mapping[str, Case]
    run: Callable[[Kernels], Iterator[str]]

    @property
    def title(self) -> str:
        return f"{self.fault} {self.name}"


ELSEWHERE: Mapping[str, str] = {
    "B40": "tests/checkpoint/test_transformers_checkpoint.py::test_in_memory_layout_is_refused",
    "B44": "tests/lowering/test_select.py::test_a_refusal_keeps_its_reason",
    "B50": "tests/lowering/test_assign_buffers.py"
    "::test_k3_snapshots_keep_their_bytes_until_their_last_reader",
}
"""Faults that are not a kernel's matter, and where they are tested."""


def integers(tensor: Tensor) -> list[int]:
    """The elements in order."""
    return [int(number) for number in tensor.flatten()]


def different(a: Tensors, b: Tensors, names: Iterable[str], what: str) -> Iterator[str]:
    """Values of these names whose bits are not equal."""
    for name in names:
        if not same_bits(a[name], b[name]):
            yield f"{what}: other bits of {name}"


def pick(given: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of these names."""
    return {name: given[name] for name in names}
