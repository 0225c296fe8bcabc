"""Model-level ops stay whole when torch.fx traces the forward that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar, cast

from torch import fx

_P = ParamSpec("_P")
_R = TypeVar("_R")


def model_op(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make `function` one node of a torch.fx trace instead of its decomposition.

    When any argument, also inside a list or tuple, is an `fx.Proxy`, the call is recorded as a
    `call_function` node whose target is the decorated function; otherwise the function runs.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        proxy = _first_proxy((*args, *kwargs.values()))
        if proxy is None:
            return function(*args, **kwargs)
        node = proxy.tracer.create_proxy("call_function", wrapped, args, kwargs)
        return cast(_R, node)

    return wrapped


def _first_proxy(arguments: Iterable[object]) -> fx.Proxy | None:
    for argument in arguments:
        if isinstance(argument, fx.Proxy):
            return argument
        if isinstance(argument, list | tuple):
            found = _first_proxy(cast(Iterable[object], argument))
            if found is not None:
                return found
    return None
