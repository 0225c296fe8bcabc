"""Trace the step and the commit of a decoder that carries a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import nn

from k3fuse.errors import TraceError
from k3fuse.ir import Graph
from k3fuse.tensor_type import Dim, DType, TensorType, dtype_of
from k3fuse.trace.importer import trace
from k3fuse.trace.tracer import Arg, ArgTree

Mode = Literal["commit", "verify"]

# Leading dimensions that become symbols: unlikely sizes, so that nothing else has them by chance.
_SLOTS, _PAGES = 1009, 1013


class DecodeModule(Protocol):
    """What a stock model offers besides `forward(inputs, state, rows_per_request=, mode=)`."""

    def new_state(self, slots: int, pages: int, page_size: int, rows: int) -> Sequence[Any]: ...

    def commit(self, state: Any, slots: torch.Tensor, accepted: torch.Tensor) -> Sequence[Any]: ...


class StepArguments(NamedTuple):
    """The step inputs by the names that models use for them."""

    tokens: Arg
    lengths: Arg
    block_table: Arg
    slots: Arg


def trace_step(model: nn.Module, *, rows_per_request: int, mode: Mode, page_size: int) -> Graph:
    """The graph of one step: outputs logits, tokens, hidden, then the states that it advances.

    `model` may live on the meta device. Raises TraceError (see `trace.importer.trace`).
    """
    inputs = StepArguments(
        _input(DType.I64, "M"),
        _input(DType.I32, "R"),
        _input(DType.I32, "R", "table"),
        _input(DType.I32, "R"),
    )
    return trace(
        model,
        {"inputs": inputs, "state": _state_tree(model, page_size, rows_per_request)},
        outputs=lambda out: {"logits": out.logits, "tokens": out.tokens, "hidden": out.hidden},
        constants={"rows_per_request": rows_per_request, "mode": mode},
        rows_per_request=rows_per_request,
        name=f"decode_{mode}" if mode == "verify" else "decode",
    )


def trace_commit(model: nn.Module, *, rows_per_request: int, page_size: int) -> Graph:
    """The graph that advances the states by the accepted rows of the last verify step."""
    return trace(
        model,
        {
            "state": _state_tree(model, page_size, rows_per_request),
            "slots": _input(DType.I32, "R"),
            "accepted": _input(DType.I32, "R"),
        },
        outputs=_nothing,
        rows_per_request=rows_per_request,
        name="commit",
        method="commit",
    )


def _nothing(_: object) -> Mapping[str, Any]:
    return {}


def _input(dtype: DType, *shape: Dim) -> Arg:
    return Arg(TensorType(dtype, shape))


def _state_tree(model: nn.Module, page_size: int, rows: int) -> ArgTree:
    with torch.device("meta"):
        state = cast(DecodeModule, model).new_state(_SLOTS, _PAGES, page_size, rows)
    return [_typed(layer) for layer in state]


def _typed(layer: Any) -> ArgTree:
    """A layer's state, a NamedTuple of tensors, with Args in place of the tensors."""
    return type(layer)(*(_state_arg(tensor) for tensor in layer))


def _state_arg(tensor: torch.Tensor) -> Arg:
    names: dict[int, Dim] = {_SLOTS: "slots", _PAGES: "pages"}
    first, *rest = tensor.shape
    if first not in names:
        raise TraceError(f"a state of shape {tuple(tensor.shape)} is not led by slots or pages")
    return Arg(TensorType(dtype_of(tensor.dtype), (names[first], *rest)), "state")
