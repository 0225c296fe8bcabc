"""Small models with random weights, and the programs that the pipeline makes of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from k3fuse.ir import Graph, parse_graph, print_graph
from k3fuse.lowering.lower import lower
from k3fuse.lowering.recipe import weight_recipe
from k3fuse.models.kimi import DecodeState, KimiModel, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.passes.pipeline import PIPELINE, STOCK
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.reference import Program, ReferenceExecutor
from k3fuse.runtime.states import state_bindings
from k3fuse.runtime.weights import evaluate_recipe
from k3fuse.tensor_type import DType, TensorType, dtype_of
from k3fuse.trace import Arg, trace

CAPACITY = Capacity(slots=4, pages=24, page_size=8, table=6, rows=4)
NAME = "kimi-k3-tiny"


@functools.cache
def tiny_model(name: str = NAME, *, exact: bool = False) -> KimiModel:
    """Weights drawn as the checkpoint's rules say, in its dtypes or in float64."""
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
                noise = 0.1 * noise
            elif not path.endswith("dt_bias"):
                noise = noise / math.sqrt(shape[-1])
            parameter.copy_(noise)
    return model.double() if exact else model


class Commit(nn.Module):
    """The commit of a model as a forward that can be traced."""

    def __init__(self, model: KimiModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, state: DecodeState, slots: torch.Tensor, accepted: torch.Tensor
    ) -> DecodeState:
        return self.model.commit(state, slots, accepted)


Kind = Literal["step", "commit"]


class Lowered(NamedTuple):
    graph: Graph
    plan: Plan


def _arg(dtype: DType, *shape: int | str) -> Arg:
    return Arg(TensorType(dtype, shape))


@functools.cache
def lowered(name: str, tp: int, batch: int, rows: int, kind: Kind = "step") -> Lowered:
    """Trace a bucket, run the whole pipeline, lower it."""
    model = KimiModel(BUILTIN_CONFIGS[name], "meta")
    capacity = CAPACITY
    state = model.new_state(capacity.slots, capacity.pages, capacity.page_size, capacity.rows)
    sizes = {capacity.slots: "slots", capacity.pages: "pages"}
    args = {
        binding: Arg(TensorType(dtype_of(t.dtype), (sizes[t.shape[0]], *t.shape[1:])), "state")
        for binding, t in state_bindings(state)
    }
    tree = [
        type(layer)(*(args[f"state.{index}.{field}"] for field in layer._fields))  # pyright: ignore
        for index, layer in enumerate(state)
    ]
    requests = _arg(DType.I32, "R")
    if kind == "step":
        table = _arg(DType.I32, "R", "table")
        inputs: Any = StepInputs(_arg(DType.I64, "M"), requests, table, requests)  # pyright: ignore
        outputs: Callable[[Any], dict[str, Any]] = lambda o: {  # noqa: E731
            "logits": o.logits,
            "tokens": o.tokens,
            "hidden": o.hidden,
        }
        constants = {"rows_per_request": rows, "mode": "verify" if rows > 1 else "commit"}
        graph = trace(
            model,
            {"inputs": inputs, "state": tree},
            outputs=outputs,
            constants=constants,
            rows_per_request=rows,
        )
    else:
        graph = trace(
            Commit(model),
            {"state": tree, "slots": requests, "accepted": requests},
            outputs=lambda _: {},
        )
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
    stock = graph
    for item in PIPELINE:
        item.run(graph)
        if item.name == STOCK:
            stock = parse_graph(print_graph(graph))
    return Lowered(graph, lower(graph, stock))


def program(
    model: KimiModel, name: str, tp: int, batch: int, rows: int, kind: Kind = "step"
) -> Program:
    """A bucket with the model's own weights, in the model's dtypes."""
    graph, plan = lowered(name, tp, batch, rows, kind)
    root = model if kind == "step" else Commit(model)
    weights = evaluate_recipe(weight_recipe(graph), lambda path: root.get_parameter(path).detach())
    return Program(kind, plan, graph, weights)


Shape = tuple[int, int] | tuple[int, int, Kind]


@functools.cache
def programs(name: str, tp: int, exact: bool, shapes: tuple[Shape, ...]) -> list[Program]:
    model = tiny_model(name, exact=exact)
    return [program(model, name, tp, *shape) for shape in shapes]


def fused(
    tp: int,
    *shapes: Shape,
    exact: bool = False,
    arena: bool = True,
    name: str = NAME,
) -> ReferenceExecutor:
    """A fresh executor with a bucket for each (batch, rows[, kind])."""
    model = tiny_model(name, exact=exact)
    made = programs(name, tp, exact, shapes)
    return ReferenceExecutor(model, CAPACITY, made, arena=arena and not exact)


def prompt(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, 512, (count,), generator=generator)]
