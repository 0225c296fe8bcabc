"""Does the graph still compute what was traced? Float64 interpretation after every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.errors import PassError, VerifyError
from k3fuse.ir import Graph, Value, run
from k3fuse.passes.base import Pass, PassResult
from k3fuse.passes.instruments import Instrument

TOLERANCE = 1e-11
"""Largest relative error of an output in float64: no pass may do more than reorder sums."""

Load = Callable[[Value], Tensor]


@dataclass(frozen=True)
class PassCheck:
    """The outcome for one pass: the worst relative error over all outputs."""

    name: str
    max_rel_err: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.max_rel_err <= self.tolerance


class NumericCheck(Instrument):
    """Compares the float64 outputs after each pass with those of the traced graph.

    The traced graph runs unsharded; later ones on their N simulated ranks, whose replicated values
    must agree in every bit. Raises PassError at the first pass that is off, unless `keep_going`.
    """

    def __init__(self, load: Load, *, seed: int = 0, keep_going: bool = False) -> None:
        self.checks: list[PassCheck] = []
        self._load, self._seed, self._keep_going = load, seed, keep_going
        self._inputs: dict[str, Tensor] = {}
        self._wanted: list[Tensor] = []

    def start(self, graph: Graph, text: str) -> None:
        self._inputs = example_inputs(graph, self._load, seed=self._seed)
        self._wanted = run(graph, self._bound(graph), tp=1)

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        check = self.compare(item.name, graph) if result.changes else self.repeat(item.name)
        if not check.ok and not self._keep_going:
            raise PassError(
                f"outputs differ by {check.max_rel_err:.2e} relative in float64 "
                f"(allowed {TOLERANCE:.0e})"
            )

    def compare(self, name: str, graph: Graph) -> PassCheck:
        """Check one more graph of the same step, for example one read from a dump."""
        error = worst_error(run(graph, self._bound(graph)), self._wanted)
        self.checks.append(PassCheck(name, error, TOLERANCE))
        return self.checks[-1]

    def repeat(self, name: str) -> PassCheck:
        """Enter a pass that changed nothing: it is as right as the one before."""
        error = self.checks[-1].max_rel_err if self.checks else 0.0
        self.checks.append(PassCheck(name, error, TOLERANCE))
        return self.checks[-1]

    def _bound(self, graph: Graph) -> dict[str, Tensor]:
        for value in graph.inputs:
            if value.binding not in self._inputs:
                raise VerifyError(
                    f"input {value.name} is bound to {value.binding}, which the trace has not"
                )
        return {v.name: self._inputs[v.binding] for v in graph.inputs}


def worst_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest |difference| over the largest |wanted| of each output; inf for NaN or integers."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if not b.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else float("inf"))
            continue
        scale = max(b.abs().max().item(), 1e-300)
        error = (a - b).abs().max().item() / scale
        worst = max(worst, error if error == error else float("inf"))  # NaN is not equal to itself
    return worst


def example_inputs(graph: Graph, load: Load, *, seed: int, requests: int = 3) -> dict[str, Tensor]:
    """Random step inputs, states and the given weights, in float64, by binding.

    `requests` requests with different lengths; the last is padding (slot -1), since a padding row
    must not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = graph.attrs.get("rows_per_request", 1)
    assert isinstance(rows, int)
    sizes = {"R": requests, "M": requests * rows, "slots": requests + 1, "pages": 2 * requests + 1}
    sizes["table"] = 2
    tensors: dict[str, Tensor] = {}
    for value in graph.inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in value.type.shape]
        if value.kind == "weight":
            tensor = load(value)
            tensors[value.binding] = tensor.double() if tensor.is_floating_point() else tensor
        elif value.kind == "state":
            tensors[value.binding] = 0.5 * torch.randn(
                shape, generator=generator, dtype=torch.float64
            )
        else:
            tensors[value.binding] = _step_input(graph, value, shape, sizes, rows, generator)
    return tensors


def _step_input(
    graph: Graph,
    value: Value,
    shape: list[int],
    sizes: dict[str, int],
    rows: int,
    generator: torch.Generator,
) -> Tensor:
    what, requests = value.binding.rpartition(".")[2], sizes["R"]
    if what == "tokens":
        vocab = next((n.operands[1].type.shape[0] for n in value.users() if n.op == "embedding"), 2)
        assert isinstance(vocab, int)
        return torch.randint(0, vocab, shape, generator=generator)
    if what == "slots":
        slots = torch.randperm(sizes["slots"], generator=generator)[:requests].to(torch.int32)
        slots[-1] = -1
        return slots
    if what == "block_table":
        pages = torch.randperm(sizes["pages"], generator=generator)[: requests * sizes["table"]]
        table = pages.to(torch.int32).reshape(requests, -1)
        table[-1] = -1
        return table
    if what == "lengths":
        lengths = torch.randint(1, 40, shape, generator=generator).to(torch.int32)
        lengths[-1] = 0
        return lengths
    if what == "accepted":
        return torch.randint(0, rows + 1, shape, generator=generator).to(torch.int32)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
