"""How far bf16 logits move when only the accumulation differs: what a tolerance has to allow.

Every step starts from the state of the reference. It runs three times: as the reference does
(float64 sums, rounded where the contract says), with float32 sums, and exactly (float64, nothing
rounded). Differences are over the standard deviation of the row's logits.
"""

from __future__ import annotations

import importlib
import pkgutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from k3fuse import functional
from k3fuse.checkpoint.synth import synthesize
from k3fuse.cli.load import builtin_source, open_source
from k3fuse.models.kimi import DecodeState, KimiModel, StepInputs
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.stock import StockExecutor

MODEL, STEPS = "kimi-k3-tiny", 64
CAPACITY = Capacity(slots=1, pages=4, page_size=32, table=4)


def modules() -> list[ModuleType]:
    names = [item.name for item in pkgutil.iter_modules(functional.__path__)]
    found = [importlib.import_module(f"k3fuse.functional.{name}") for name in names]
    return [module for module in found if hasattr(module, "ACCUMULATE")]


@contextmanager
def accumulating_in(dtype: torch.dtype) -> Generator[None]:
    """Let every op of the stock forward compute in `dtype`."""
    name = "ACCUMULATE"
    saved = [(module, getattr(module, name)) for module in modules()]
    for module, _ in saved:
        setattr(module, name, dtype)
    try:
        yield
    finally:
        for module, before in saved:
            setattr(module, name, before)


def inputs(token: int, length: int) -> StepInputs:
    return StepInputs(
        torch.tensor([token]),
        torch.tensor([length], dtype=torch.int32),
        torch.arange(CAPACITY.table, dtype=torch.int32)[None],
        torch.zeros(1, dtype=torch.int32),
    )


def widened(state: DecodeState) -> DecodeState:
    return [type(layer)(*(tensor.double() for tensor in layer)) for layer in state]


def measure(steps: int = STEPS) -> dict[str, Tensor]:
    """Per step, for the reference and for float32 sums: rms and largest error of the logits."""
    with tempfile.TemporaryDirectory() as folder:
        source = builtin_source(MODEL)
        family, config = source.family, source.config
        synthesize(
            source.specs, family.to_hf(config), Path(folder) / "c", init=family.init(config), seed=0
        )
        opened = open_source("kimi-k3", Path(folder) / "c")
        model, exact_model = opened.module(), opened.module().double()
    assert isinstance(model, KimiModel)
    assert isinstance(exact_model, KimiModel)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (steps,), generator=generator)
    reference = StockExecutor(model, CAPACITY)
    rows: dict[str, list[list[Tensor]]] = {"float32": [], "rounding": [], "both": []}
    for position, token in enumerate(tokens):
        step = inputs(int(token), position)
        narrow = StockExecutor(model, CAPACITY, reference.state)
        exact = StockExecutor(exact_model, CAPACITY, widened(reference.state))
        with accumulating_in(torch.float32):
            other = narrow.step(step, 1, "commit").logits[0].double()
        truth = exact.step(step, 1, "commit").logits[0].double()
        own = reference.step(step, 1, "commit").logits[0].double()
        for name, a, b in (
            ("float32", other, own),
            ("rounding", own, truth),
            ("both", other, truth),
        ):
            error = (a - b) / truth.std()
            same = (a.argmax() == b.argmax()).double()
            rows[name].append([error.square().mean().sqrt(), error.abs().max(), same])
    return {name: torch.tensor(values) for name, values in rows.items()}


def main() -> None:
    torch.set_num_threads(1)
    found = measure()
    print(f"{MODEL}, {STEPS} steps from the reference's state; errors over the logits' deviation")
    print("what differs            rms: median    90 %     worst   largest error   same token")
    labels = {
        "float32": "float32 vs float64 sums",
        "rounding": "reference vs exact",
        "both": "float32 sums vs exact",
    }
    for name, label in labels.items():
        rms, worst, same = found[name].unbind(1)
        print(
            f"{label:24s}{rms.median():11.4f}{rms.quantile(0.9):9.4f}{rms.max():10.4f}"
            f"{worst.max():16.4f}{same.mean():13.0%}"
        )


if __name__ == "__main__":
    main()
