"""Sums over ranks: their order, any terms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3fuse.alone.launching import Case, Kernel, Sketch, same_bits
from k3fuse.alone.reference import evaluate
from k3fuse.alone.trials.trial import Kernels, Trial
from k3fuse.kernels.examples import example


def sum_case(ranks: int, rows: int, width: int, dtype: str, out: str) -> Case:
    """A sum of the ranks' terms, [ranks, rows, width], rounded to `out`."""
    s = Sketch(ranks)
    s.ring("slots", dtype, ranks, rows, width, place="mailbox")
    s.value("sum", out, rows, width)
    s.step("sum_slots", ["slots"], ["sum"], out=out)
    return s.case()


def _norm_of_sum(rows: int) -> Case:
    case = Case.of(example("slots_norm", f"4,{rows},7168"))
    return Case(case.program, {**case.names, "slots": case.names["v0"], "sum": case.names["v3"]})


def _sums() -> dict[str, Case]:
    found = {f"4 ranks, {rows} rows": sum_case(4, rows, 64, "f32", "f32") for rows in (1, 8, 64)}
    found["4 ranks, to bf16"] = sum_case(4, 3, 96, "f32", "bf16")
    found["4 ranks of bf16"] = sum_case(4, 3, 96, "bf16", "bf16")
    found["4 ranks of bf16, to f32"] = sum_case(4, 2, 7168, "bf16", "f32")
    found["16 ranks"] = sum_case(16, 2, 7168, "f32", "bf16")
    found |= {f"row norm, {rows} rows": _norm_of_sum(rows) for rows in (1, 8)}
    return found


def _sum_inputs(kernel: Kernel, slots: Tensor) -> dict[str, Tensor]:
    x = {name: t for name, t in kernel.draw(1).items() if name not in ("v0", "v1")}
    if "v1" in kernel.case.names:
        x["v1"] = torch.zeros(slots.shape[1:])
    return {**x, "slots": slots}


def _order(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        held = kernel.program.values[kernel.case.names["slots"]]
        terms = torch.zeros(held.shape)
        # 2^27 is 1e8's neighbour that bf16 holds too.
        large = 1e8 if held.dtype == "f32" else 2.0**27
        for rank, term in enumerate((large, 1, -large, 1)):
            terms[rank] = term
        sums = kernel(_sum_inputs(kernel, terms))["sum"]
        if not bool((sums == 1).all()):
            yield f"{name}: {sums.flatten()[0].item()} instead of 1"


def _any_terms(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        held = kernel.program.values[kernel.case.names["slots"]]
        torch.manual_seed(11)  # pyright: ignore[reportUnknownMemberType]
        terms = torch.randn(held.shape) * 10.0 ** torch.randint(-3, 4, held.shape)
        x = _sum_inputs(kernel, kernel.tensor("slots", terms) + 0.0)
        index = {kernel.case.names[n]: kernel.tensor(n, t) for n, t in x.items()}
        total = kernel.case.names["sum"]
        wanted = evaluate(kernel.program, index, wanted={total}).values[total]
        if not same_bits(kernel(x)["sum"], wanted):
            yield f"{name}: other bits than the reference"


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    sums = _sums()
    in_order = {n: case for n, case in sums.items() if not n.startswith("16")}
    return (
        Trial("B56", "order of a sum over ranks", "1e8 + 1 - 1e8 + 1 is 1", in_order, _order),
        Trial("B56", "any terms over ranks", "the bits of the reference", sums, _any_terms),
    )
