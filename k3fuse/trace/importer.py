"""Two fx traces of one forward, at different sizes, -> one graph with symbolic dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import fx, nn

from k3fuse.errors import TraceError
from k3fuse.ir import Attr, Context, Graph, Node, Origin, Value, op_named
from k3fuse.tensor_type import TensorType
from k3fuse.trace.op_table import Call
from k3fuse.trace.tracer import Arg, ArgTree, Tracer, result_of

_SMALL: dict[str, int] = {"R": 1, "slots": 29, "pages": 37, "table": 43}
_LARGE: dict[str, int] = {"R": 2, "slots": 31, "pages": 41, "table": 47}


def trace(
    root: nn.Module,
    arguments: Mapping[str, ArgTree],
    *,
    outputs: Callable[[Any], Mapping[str, Any]],
    constants: Mapping[str, object] | None = None,
    rows_per_request: int = 1,
    name: str = "decode",
    method: str = "forward",
) -> Graph:
    """Trace `root.forward(**arguments, **constants)`, or another method, into a graph.

    arguments: trees of `Arg`. Dimensions named M (rows), R (requests; M = R * rows_per_request),
    slots, pages and table may be symbolic; every other size is fixed. `outputs` picks the values
    to return, by name, out of what the forward returns; state arguments come back as their last
    versions by themselves.

    Raises TraceError, with module path and source line, for control flow that depends on data,
    for a graph that differs between one and two requests, and for calls that have no IR op.
    """
    traces: list[tuple[Tracer, list[fx.Node]]] = []
    for sizes in (_SMALL, _LARGE):
        rows = sizes["R"] * rows_per_request
        tracer = Tracer(arguments, constants or {}, outputs, {**sizes, "M": rows})
        tracer.traced_func_name = method
        traces.append((tracer, list(tracer.trace(root).nodes)))
    return _Importer(root, traces, rows_per_request, name).graph


class _Importer:
    def __init__(
        self,
        root: nn.Module,
        traces: list[tuple[Tracer, list[fx.Node]]],
        rows_per_request: int,
        name: str,
    ) -> None:
        (_, small_nodes), (large, large_nodes) = traces
        self._args = large.args
        self._modules: dict[str, nn.Module] = dict(
            cast("Iterable[tuple[str, nn.Module]]", root.named_modules())
        )
        self._rows = rows_per_request
        self._values: dict[fx.Node, list[Value]] = {}
        self._names: dict[str, int] = {}
        self._sites: dict[str, int] = {}
        self._symbols = {
            sizes: symbol
            for symbol, sizes in {
                **{k: (_SMALL[k], _LARGE[k]) for k in _SMALL},
                "M": (rows_per_request, 2 * rows_per_request),
            }.items()
        }
        self.graph = Graph(name, {"rows_per_request": rows_per_request})
        for pair in self._pairs(small_nodes, large_nodes):
            self._import(*pair)
        self._finish(large.picked)

    def _pairs(self, small: list[fx.Node], large: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        twin: dict[fx.Node, fx.Node] = {}
        for a, b in zip(small, large, strict=False):
            same = a.op == b.op and _called(a) == _called(b) and len(a.args) == len(b.args)
            if not same and "output" not in (a.op, b.op):
                raise TraceError(
                    f"the graph depends on the number of requests: at "
                    f"'{b.meta.get('path') or 'the root module'}', one request calls "
                    f"{_called(a)} where two call {_called(b)}; a decode graph must be the same "
                    "for every batch"
                )
            if same and [twin[x] for x in _read(a)] != _read(b):
                raise TraceError(
                    f"the graph depends on the number of requests: at "
                    f"'{b.meta.get('path') or 'the root module'}', {_called(b)} reads other values "
                    "for one request than for two; a decode graph must be the same for every batch"
                )
            twin[a] = b
        if len(small) != len(large):
            raise TraceError(
                f"the graph depends on the number of requests: {len(small)} calls for one, "
                f"{len(large)} for two"
            )
        return list(zip(small, large, strict=True))

    def _import(self, small: fx.Node, large: fx.Node) -> None:
        if large.op == "placeholder":
            name = cast(str, large.meta["name"])
            arg = self._args[name]
            self._input(large, name, arg.type, arg.kind)
        elif large.op == "get_attr":
            self._input(large, cast(str, large.meta["name"]), large.meta["type"], "weight")
        elif large.op == "call_function" and "call" in large.meta:
            self._node(small, large)

    def _input(self, fx_node: fx.Node, path: str, type_: TensorType, kind: str) -> None:
        for value in self.graph.inputs:
            if value.binding == path:
                self._values[fx_node] = [value]
                return
        value = Value(self._unique(path.removeprefix("model.")), type_, cast(Any, kind), path)
        self.graph.inputs.append(value)
        self._values[fx_node] = [value]

    def _node(self, small: fx.Node, large: fx.Node) -> None:
        call, path = cast(Call, large.meta["call"]), cast(str, large.meta["path"])
        operands = [self._value(cast(fx.Node, arg)) for arg in large.args]
        attrs = {
            key: self._general(cast(Call, small.meta["call"]).attrs[key], value, operands, path)
            for key, value in call.attrs.items()
        }
        types = op_named(call.op).infer([v.type for v in operands], attrs, Context())
        leaf = path in self._modules and not list(self._modules[path].children())
        short = path.removeprefix("model.")
        base = short if leaf and path else ".".join(p for p in (short, call.op) if p)
        node = Node(call.op, operands, attrs, [], (Origin(self._site(path, call.op)),))
        for index, type_ in enumerate(types):
            name = self._unique(base if index == 0 else f"{base}.{index}")
            node.results.append(Value(name, type_, producer=node))
        for index, value in enumerate(operands):
            value.uses.append((node, index))
        self.graph.nodes.append(node)
        self._values[large] = node.results

    def _general(self, a: Attr, b: Attr, operands: list[Value], path: str) -> Attr:
        """An attribute equal in both traces, or the symbol of the dimension it followed."""
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self._general(x, y, operands, path) for x, y in zip(a, b, strict=True))
        if a == b:
            return b
        symbol = self._symbols.get((a, b)) if isinstance(a, int) and isinstance(b, int) else None
        if symbol is None:
            raise TraceError(
                f"'{path}' computes {a} for one request and {b} for two, which is no dimension of "
                "the arguments: sizes must not depend on the batch"
            )
        used = {d for v in operands for d in v.type.shape if isinstance(d, str)}
        # With one row a request, M and R are equal in both traces: take the one in use.
        return "R" if symbol == "M" and self._rows == 1 and "M" not in used else symbol

    def _value(self, node: fx.Node) -> Value:
        source, index = result_of(node)
        return self._values[source][index]

    def _finish(self, picked: Mapping[str, Any]) -> None:
        graph = self.graph
        graph.attrs["outputs"] = tuple(picked)
        graph.outputs = [self._value(proxy.node) for proxy in picked.values()]
        for value in graph.inputs:
            if value.kind == "state" and (last := _last_version(graph, value)) is not value:
                graph.outputs.append(last)

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}.{count}")

    def _site(self, path: str, op: str) -> str:
        site = f"{path or 'root'}/{op}"
        count = self._sites[site] = self._sites.get(site, 0) + 1
        return site if count == 1 else f"{site}#{count}"


def _last_version(graph: Graph, value: Value) -> Value:
    changed = True
    while changed:
        changed = False
        for node, index in value.uses:
            updates = op_named(node.op).updates
            if index in updates:
                value, changed = node.results[updates[index]], True
                break
    return value


def _read(node: fx.Node) -> list[fx.Node]:
    """The operands of a node in order; of the output node, what it returns."""
    found: list[fx.Node] = []
    for arg in node.args:
        parts = cast("list[object]", arg) if isinstance(arg, list) else [arg]
        found.extend(part for part in parts if isinstance(part, fx.Node))
    return found


def _called(node: fx.Node) -> str:
    call = cast("Call | None", node.meta.get("call"))
    return call.op if call is not None else str(node.target)


__all__ = ["Arg", "trace"]
