"""Small models with random weights, and the programs that the pipeline makes of them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from k3fuse.ir import Graph, parse_graph, print_graph
from k3fuse.lowering.lower import lower
from k3fuse.lowering.recipe import weight_recipe
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.passes.pipeline import PIPELINE, STOCK
from k3fuse.runtime.bundle import Kind
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.reference import Program, ReferenceExecutor
from k3fuse.runtime.stock import StockExecutor
from k3fuse.runtime.weights import evaluate_recipe
from k3fuse.trace import trace_commit, trace_step

CAPACITY = Capacity(slots=4, pages=24, page_size=8, table=6, rows=4)
NAME = "kimi-k3-tiny"


def tiny_model(name: str = NAME, *, exact: bool = False, pinned: bool = False) -> KimiModel:
    """Weights drawn as the checkpoint's rules say, in its dtypes or in float64.

    `pinned` spreads the router biases so far that every row takes the same experts: without trained
    margins, rounding flips an expert every few rows, and then there is nothing left to compare.
    """
    return _tiny_model(name, exact, pinned)


@functools.cache
def _tiny_model(name: str, exact: bool, pinned: bool) -> KimiModel:
    model = KimiModel(BUILTIN_CONFIGS[name])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            shape = parameter.shape
            if parameter.dtype == torch.uint8:
                low, high = (122, 125) if path.endswith("_scale") else (0, 256)
                parameter.copy_(torch.randint(low, high, shape, generator=generator))
                continue
            noise = torch.randn(shape, generator=generator)
            if "norm" in path:
                noise = 1 + 0.1 * noise
            elif path.endswith(("A_log", "conv1d.weight")):
                noise = 0.5 * noise
            elif path.endswith("e_score_correction_bias"):
                noise = 4.0 * noise.argsort() if pinned else 0.1 * noise
            elif not path.endswith("dt_bias"):
                noise = noise / math.sqrt(shape[-1])
            parameter.copy_(noise)
    return model.double() if exact else model


class Lowered(NamedTuple):
    graph: Graph
    plan: Plan


@functools.cache
def lowered(name: str, tp: int, batch: int, rows: int, kind: Kind = "step") -> Lowered:
    """Trace a bucket, run the whole pipeline, lower it."""
    model, capacity = KimiModel(BUILTIN_CONFIGS[name], "meta"), CAPACITY
    page_size = capacity.page_size
    if kind == "commit":
        graph = trace_commit(model, rows_per_request=rows, page_size=page_size)
    else:
        mode = "verify" if rows > 1 else "commit"
        graph = trace_step(model, rows_per_request=rows, mode=mode, page_size=page_size)
    graph.attrs.update(
        {
            "model": name,
            "tp": tp,
            "target": "gb300",
            "dim.M": batch * rows,
            "dim.R": batch,
            "dim.slots": capacity.slots,
            "dim.pages": capacity.pages,
            "dim.table": capacity.table,
        }
    )
    before = graph
    for item in PIPELINE:
        item.run(graph)
        if item.name == STOCK:
            before = parse_graph(print_graph(graph))
    return Lowered(graph, lower(graph, before))


def program(
    model: KimiModel, name: str, tp: int, batch: int, rows: int, kind: Kind = "step"
) -> Program:
    """A bucket with the model's own weights, in the model's dtypes."""
    graph, plan = lowered(name, tp, batch, rows, kind)
    weights = evaluate_recipe(weight_recipe(graph), lambda path: model.get_parameter(path).detach())
    return Program(kind, plan, graph, weights)


@functools.cache
def _programs(
    name: str, tp: int, exact: bool, pinned: bool, commit: bool, shapes: tuple[tuple[int, int], ...]
) -> list[Program]:
    model = tiny_model(name, exact=exact, pinned=pinned)
    made = [program(model, name, tp, batch, rows) for batch, rows in shapes]
    if commit:
        verified = [shape for shape in shapes if shape[1] > 1]
        made += [program(model, name, tp, batch, rows, "commit") for batch, rows in verified]
    return made


def fused(
    tp: int,
    *shapes: tuple[int, int],
    commit: bool = False,
    exact: bool = False,
    pinned: bool = False,
    name: str = NAME,
) -> ReferenceExecutor:
    """A fresh executor with a bucket for each (batch, rows), if asked with its commit program."""
    model = tiny_model(name, exact=exact, pinned=pinned)
    made = _programs(name, tp, exact, pinned, commit, shapes)
    return ReferenceExecutor(model, CAPACITY, made)


def stock(*, exact: bool = False, pinned: bool = False, name: str = NAME) -> StockExecutor:
    """A fresh stock executor on the same weights."""
    return StockExecutor(tiny_model(name, exact=exact, pinned=pinned), CAPACITY)


def prompt(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, 512, (count,), generator=generator)]
