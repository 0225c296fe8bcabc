"""Traced calls -> IR ops, one row each. Model-level functions name their op themselves."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx
from torch.nn import functional as torch_functional

from k3fuse.functional import UNROUNDED
from k3fuse.ir import Attr, all_ops
from k3fuse.tensor_type import TensorType, dtype_of


@dataclass(frozen=True)
class Call:
    """One IR op to create: operands are traced values, attributes are plain data."""

    op: str
    operands: list[fx.Proxy]
    attrs: dict[str, Attr] = field(default_factory=dict[str, Attr])


class NoOp(Exception):  # noqa: N818 - not an error: the caller lists it with its source line
    """The call has no row in the table, or has arguments that no IR op covers."""


Row = Callable[..., Call | fx.Proxy]


def translate(
    target: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> Call | fx.Proxy:
    """The IR op for a traced call, or an operand when the call changes nothing.

    Raises NoOp when there is none.
    """
    row = _ROWS.get(target)
    if row is not None:
        try:
            return row(*args, **kwargs)
        except TypeError as error:
            raise NoOp(f"arguments not supported ({error})") from None
    name = getattr(target, "__name__", "")
    if callable(target) and hasattr(target, "__wrapped__") and name in all_ops():
        return _model_op(target, name, args, kwargs)
    raise NoOp("no IR op for it")


def _model_op(
    function: Callable[..., object],
    name: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Call:
    """Tensor arguments become operands in order, keyword-only ones attributes."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    operands: list[fx.Proxy] = []
    attrs: dict[str, Attr] = {}
    lists: list[fx.Proxy] = []
    for key, value in bound.arguments.items():
        if isinstance(value, fx.Proxy | torch.Tensor):  # the caller refuses a plain tensor
            operands.append(cast(fx.Proxy, value))
        elif isinstance(value, list | tuple):
            lists.extend(cast("Sequence[fx.Proxy]", value))
        elif isinstance(value, torch.dtype):
            attrs |= _rounding(value)
        elif value is not None or key in all_ops()[name].attrs:
            attrs[key] = cast(Attr, value)
    return Call(name, operands + lists, {k: v for k, v in attrs.items() if k != "out_dtype"})


def _rounding(out_dtype: torch.dtype) -> dict[str, Attr]:
    """Attributes for an `out_dtype`: an unrounded result is f32 in the graph, and says so."""
    if out_dtype == UNROUNDED:
        return {"out": "f32", "unrounded": True}
    return {"out": str(dtype_of(out_dtype))}


def _type(proxy: fx.Proxy) -> TensorType:
    return cast(TensorType, proxy.node.meta["type"])


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Proxy)


def _linear(x: fx.Proxy, weight: fx.Proxy, bias: object = None) -> Call:
    if bias is not None:
        raise NoOp("a bias is not supported")
    return Call("linear", [x, weight])


def _embedding(tokens: fx.Proxy, weight: fx.Proxy, *rest: object, **_: object) -> Call:
    return Call("embedding", [tokens, weight])


def _rms_norm(
    x: fx.Proxy, shape: Sequence[int], weight: object = None, eps: float | None = None
) -> Call:
    if not _is_tensor(weight) or eps is None or len(shape) != 1:
        raise NoOp("rms_norm needs a weight, an eps and one normalised dimension")
    return Call("rms_norm", [x, cast(fx.Proxy, weight)], {"eps": eps})


def _binary(op: str) -> Row:
    def row(a: object, b: object, **kwargs: object) -> Call:
        if not (_is_tensor(a) and _is_tensor(b)) or kwargs:
            raise NoOp(f"{op} of a tensor and a number is not supported")
        return Call(op, [cast(fx.Proxy, a), cast(fx.Proxy, b)])

    return row


def _unary(op: str) -> Row:
    def row(x: fx.Proxy, inplace: bool = False, **_: object) -> Call:
        if inplace:
            raise NoOp(f"{op} in place is not supported")
        return Call(op, [x])

    return row


def _view(x: fx.Proxy, *sizes: object) -> Call:
    one = sizes[0] if len(sizes) == 1 else None
    flat = cast("Sequence[int]", one if isinstance(one, list | tuple) else sizes)
    shape = list(flat)
    numel = 1
    for extent in _type(x).shape:
        numel *= cast(int, extent)
    if -1 in shape:
        known = -1
        for extent in shape:
            known *= extent
        shape[shape.index(-1)] = numel // known
    return Call("view", [x], {"shape": tuple(shape)})


def _reshaped(x: fx.Proxy, shape: Sequence[int]) -> Call:
    return Call("view", [x], {"shape": tuple(shape)})


def _flatten(x: fx.Proxy, start: int = 0, end: int = -1) -> Call:
    shape = cast("tuple[int, ...]", _type(x).shape)
    stop = end % len(shape) + 1
    merged = 1
    for extent in shape[start:stop]:
        merged *= extent
    return _reshaped(x, (*shape[:start], merged, *shape[stop:]))


def _unsqueeze(x: fx.Proxy, dim: int) -> Call:
    shape = list(cast("tuple[int, ...]", _type(x).shape))
    shape.insert(dim % (len(shape) + 1), 1)
    return _reshaped(x, shape)


def _squeeze(x: fx.Proxy, dim: int) -> Call:
    shape = list(cast("tuple[int, ...]", _type(x).shape))
    if shape[dim] != 1:
        raise NoOp("squeeze of a dimension that is not 1")
    del shape[dim]
    return _reshaped(x, shape)


def _cast(x: fx.Proxy, dtype: object = None, **kwargs: object) -> Call:
    wanted = kwargs.get("dtype", dtype)
    if not isinstance(wanted, torch.dtype):
        raise NoOp("only casts to a dtype are supported, devices are not")
    return Call("cast", [x], {"dtype": str(dtype_of(wanted))})


def _cast_to(dtype: str) -> Row:
    def row(x: fx.Proxy) -> Call:
        return Call("cast", [x], {"dtype": dtype})

    return row


def _same(x: fx.Proxy, *_: object, **__: object) -> fx.Proxy:
    return x


def _getitem(x: fx.Proxy, index: object) -> Call | fx.Proxy:
    parts = list(cast("tuple[object, ...]", index)) if isinstance(index, tuple) else [index]
    shape = cast("tuple[int, ...]", _type(x).shape)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    cuts: list[Call] = []
    for dim, part in enumerate(parts):
        if not isinstance(part, slice):
            raise NoOp(f"index {part!r} is not a slice")
        start, stop, step = part.indices(shape[dim])
        if step != 1:
            raise NoOp("a strided slice is not supported")
        if (start, stop) != (0, shape[dim]):
            cuts.append(Call("slice", [x], {"dim": dim, "start": start, "stop": stop}))
    if len(cuts) > 1:
        raise NoOp("a slice of more than one dimension is not supported: slice one at a time")
    return cuts[0] if cuts else x


def _narrow(x: fx.Proxy, dim: int, start: int, length: int) -> Call:
    dim %= len(_type(x).shape)
    return Call("slice", [x], {"dim": dim, "start": start, "stop": start + length})


_ROWS: dict[object, Row] = {
    torch_functional.linear: _linear,
    torch_functional.embedding: _embedding,
    torch_functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    operator.add: _binary("add"),
    operator.iadd: _binary("add"),  # pyright: ignore[reportUnknownMemberType] - untyped stub
    torch.add: _binary("add"),
    "add": _binary("add"),
    operator.mul: _binary("mul"),
    torch.mul: _binary("mul"),
    "mul": _binary("mul"),
    torch.sigmoid: _unary("sigmoid"),
    torch_functional.sigmoid: _unary("sigmoid"),
    "sigmoid": _unary("sigmoid"),
    torch_functional.silu: _unary("silu"),
    "view": _view,
    "reshape": _view,
    torch.reshape: _view,
    "flatten": _flatten,
    torch.flatten: _flatten,
    "unsqueeze": _unsqueeze,
    torch.unsqueeze: _unsqueeze,
    "squeeze": _squeeze,
    torch.squeeze: _squeeze,
    "to": _cast,
    "type": _cast,
    "float": _cast_to("f32"),
    "double": _cast_to("f64"),
    "bfloat16": _cast_to("bf16"),
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
    operator.getitem: _getitem,
    "narrow": _narrow,
    torch.narrow: _narrow,
}
