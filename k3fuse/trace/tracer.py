"""torch.fx over a forward, with a type on every proxy so that shapes can be asked for.

Shapes are concrete while tracing. Whether the forward depends on the number of rows is found by
tracing at two sizes and comparing (`trace.importer`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from k3fuse.errors import TraceError
from k3fuse.ir import Context, TypeRuleError, op_named
from k3fuse.tensor_type import TensorType, dtype_of
from k3fuse.trace.op_table import Call, NoOp, translate

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Arg:
    """One tensor argument of a forward: its type (symbolic dimensions by name), its kind."""

    type: TensorType
    kind: str = "input"  # or "state"


ArgTree = Any
"""An Arg, or a NamedTuple, tuple, list or dict of trees."""


def concrete(type_: TensorType, sizes: Sizes) -> TensorType:
    """The type with symbolic dimensions replaced by the sizes of one trace."""
    shape = tuple(sizes[d] if isinstance(d, str) else d for d in type_.shape)
    return TensorType(type_.dtype, shape, type_.placement)


class TypedProxy(fx.Proxy):
    """A proxy that answers questions about its shape, and refuses questions about its data."""

    @property
    def type_(self) -> TensorType:
        return cast(TensorType, self.node.meta["type"])

    @property
    def shape(self) -> torch.Size:
        return torch.Size(cast("tuple[int, ...]", self.type_.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.type_.dtype.to_torch()

    @property
    def ndim(self) -> int:
        return len(self.type_.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise self._refuse("branches on the data of a tensor (data-dependent control flow)")

    def __iter__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise self._refuse("loops over a tensor")

    def item(self) -> float:
        raise self._refuse("reads a tensor's data with .item()")

    def tolist(self) -> list[object]:
        raise self._refuse("reads a tensor's data with .tolist()")

    def __int__(self) -> int:
        raise self._refuse("reads a tensor's data as a number")

    __float__ = __index__ = __int__  # pyright: ignore[reportAssignmentType]

    def _refuse(self, what: str) -> TraceError:
        tracer = cast(Tracer, self.tracer)
        return TraceError(
            f"{tracer.here()} {what}; a decode graph must not: compute it with an op, or decide it "
            "before the forward"
        )


class Tracer(fx.Tracer):
    """Traces one forward at one choice of sizes. Every node gets meta: type, call, path."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        arguments: Mapping[str, ArgTree],
        constants: Mapping[str, object],
        outputs: Callable[[Any], Mapping[str, Any]],
        sizes: Sizes,
    ) -> None:
        super().__init__()
        self._arguments = arguments
        self._constants = constants
        self._outputs = outputs
        self._sizes = sizes
        self._paths: list[str] = [""]
        self.args: dict[str, Arg] = {}
        self.picked: Mapping[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def here(self) -> str:
        """Module path and source line of the code being traced."""
        frame = inspect.currentframe()
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("torch.", "k3fuse.trace", "k3fuse.functional.model_op")):
                path = self._paths[-1] or "the root module"
                return f"{path}, {frame.f_code.co_filename}:{frame.f_lineno},"
            frame = frame.f_back
        return self._paths[-1]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # fx searches all parameters for every access, which takes minutes for a real model.
        name = self._names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._paths.append(self.path_of_module(m))
        try:
            return forward(*args, **kwargs)
        finally:
            self._paths.pop()

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        root, constants = self.root, self._constants
        self._tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}

        placed = {name: self._place(name, tree) for name, tree in self._arguments.items()}

        def call() -> Any:
            self.picked = self._outputs(root_fn(root, **placed, **constants))
            return list(self.picked.values())

        return call, []

    def _place(self, name: str, tree: ArgTree) -> Any:
        if isinstance(tree, Arg):
            self.args[name] = tree
            proxy = self.create_proxy("placeholder", name.replace(".", "_"), (), {}, name)
            return proxy
        if isinstance(tree, dict):
            items = cast("dict[str, ArgTree]", tree).items()
            return {key: self._place(f"{name}.{key}", sub) for key, sub in items}
        fields = getattr(tree, "_fields", None)
        if fields is not None:
            parts = zip(cast("Sequence[str]", fields), tree, strict=True)
            return type(tree)(*(self._place(f"{name}.{key}", sub) for key, sub in parts))
        if isinstance(tree, list | tuple):
            subs = cast("Sequence[ArgTree]", tree)
            return [self._place(f"{name}.{index}", sub) for index, sub in enumerate(subs)]
        raise TraceError(f"argument {name}: expected Arg, NamedTuple, list or dict, got {tree!r}")

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        if kind in ("call_function", "call_method"):
            return self._call(target, args, kwargs)
        node = self.create_node(kind, target, (), {}, None)
        if kind == "placeholder":
            assert name is not None
            node.meta["type"] = concrete(self.args[name].type, self._sizes)
            node.meta["name"] = name
        else:
            tensor = self._tensors[target]
            node.meta["type"] = TensorType(dtype_of(tensor.dtype), tuple(tensor.shape))
            node.meta["name"] = target
        return TypedProxy(node, self)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            call = translate(target, args, kwargs)
        except NoOp as reason:
            name = getattr(target, "__name__", str(target))
            raise TraceError(
                f"{self.here()} calls {name}: {reason}. Supported calls are the rows of "
                "k3fuse/trace/op_table.py and the functions of k3fuse.functional"
            ) from None
        if isinstance(call, fx.Proxy):
            return call
        types = self._infer(call)
        operands = tuple(proxy.node for proxy in call.operands)
        node = self.create_node("call_function", _op, operands, {}, None)
        node.meta.update(call=call, types=types, path=self._paths[-1])
        if len(types) == 1:
            node.meta["type"] = types[0]
            return TypedProxy(node, self)
        results: list[TypedProxy] = []
        for index, type_ in enumerate(types):
            part = self.create_node("call_function", _result, (node, index), {}, None)
            part.meta["type"] = type_
            results.append(TypedProxy(part, self))
        return tuple(results)

    def _infer(self, call: Call) -> list[TensorType]:
        for operand in call.operands:
            if not isinstance(operand, TypedProxy):
                raise TraceError(
                    f"{self.here()} passes {type(operand).__name__} to {call.op}; only arguments "
                    "and parameters of the module can be operands"
                )
        types = [cast(TypedProxy, p).type_ for p in call.operands]
        try:
            return op_named(call.op).infer(types, call.attrs, Context())
        except (TypeRuleError, KeyError) as error:
            raise TraceError(f"{self.here()} {error}") from None


def _op(*operands: object) -> None:
    """Stands in an fx graph for an IR op; the node's meta says which."""


def _result(node: object, index: int) -> None:
    """Stands in an fx graph for one result of an op that has several."""


def result_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The op node and result index that an fx node stands for."""
    if node.target is _result:
        source, index = node.args
        return cast(fx.Node, source), cast(int, index)
    return node, 0
