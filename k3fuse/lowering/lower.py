"""Graph -> plan: launches with their operands, memory, bytes and predicted times."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal, cast

from k3fuse.errors import InputError
from k3fuse.ir import Graph, Node, Value, op_named, state_roots
from k3fuse.lowering.assign_buffers import arena_bytes, assign_buffers, check_buffers
from k3fuse.lowering.cost import CostModel
from k3fuse.lowering.mailboxes import Place, assign_mailboxes
from k3fuse.lowering.recipe import weights_read
from k3fuse.runtime.plan import (
    Access,
    Buffer,
    Launch,
    Memory,
    Operand,
    Plan,
    State,
    Weight,
)
from k3fuse.schedule.edges import launches_of, stream_of
from k3fuse.schedule.roles import BULK_OPS, VIEW_OPS
from k3fuse.target import Target, get_target

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?=[./#]|$)")

_Mode = Literal["read", "write", "update"]


def lower(graph: Graph, stock: Graph) -> Plan:
    """The plan of a graph on which the whole pipeline has run.

    `stock` is the same graph as it was after sharding, before any fusion: with one launch an op it
    is what the plan is compared with. Both carry the bucket in their attributes (target, tp,
    rows_per_request, dim.*; context: cached tokens a request that bytes are stated for). Raises
    `InputError` for a graph that still has ops outside launches.
    """
    _require_launches(graph)
    roots = state_roots(graph)
    cost = CostModel(graph, roots)
    target = get_target(str(graph.attrs["target"]))
    buffers = assign_buffers(graph)
    check_buffers(buffers)
    mailboxes, places = assign_mailboxes(graph)
    homes = _Homes(graph, cost, roots, {b.value: b for b in buffers}, places)
    launches = tuple(_launch(node, homes, cost, target) for node in launches_of(graph))
    states = tuple(_state(v, cost) for v in graph.inputs if v.kind == "state")
    weights = tuple(_weight(v, cost) for v in weights_read(graph))
    stock_cost = CostModel(stock, state_roots(stock))
    leaves = [n for n in stock.leaves() if not all(stock_cost.is_static(v) for v in n.operands)]
    traffic = [stock_cost.traffic(leaf) for leaf in leaves]
    padding = sum(stock_cost.expert_padding(leaf) for leaf in leaves)
    return Plan(
        model=str(graph.attrs.get("model", graph.name)),
        target=target.name,
        tp=graph.tp,
        batch=cost.requests,
        rows_per_request=cost.rows_per_request,
        launches=launches,
        arena=buffers,
        mailboxes=mailboxes,
        states=states,
        weights=weights,
        outputs=_outputs(graph),
        memory=Memory(
            weights=sum(w.bytes for w in weights),
            state=sum(s.bytes for s in states),
            arena=arena_bytes(buffers),
            mailboxes=sum(m.stages * m.stage_bytes for m in mailboxes),
        ),
        stock_launches=_launches_by_layer(leaves),
        stock_bytes=sum(t.weights + t.state for t in traffic) + padding,
        stock_padding_bytes=padding,
    )


def layer_of(node: Node) -> int:
    """The decoder layer that a launch works for, -1 when it lies outside the layers.

    That is the layer of its last bulk work: a prologue can belong to the layer before. A launch of
    row-wise work alone finishes the layer whose sums it reads, the earliest of its ops; work done
    ahead for several layers belongs to the first of them.
    """
    bulk = [leaf for leaf in node.leaves if leaf.op in BULK_OPS]
    layers = [_layer(leaf) for leaf in bulk or node.leaves]
    if all(leaf.op == "attn_res_blocks" for leaf in node.leaves):
        return min((layer for layer in layers if layer >= 0), default=-1)
    return layers[-1] if bulk else min(layers)


def _layer(leaf: Node) -> int:
    found = (match for o in leaf.origins for match in _LAYER.finditer(o.site))
    return max((int(match[1]) for match in found), default=-1)


class _Homes:
    """Knows for each value of a graph what it is and where it lives."""

    def __init__(
        self,
        graph: Graph,
        cost: CostModel,
        roots: dict[int, Value],
        buffers: dict[str, Buffer],
        places: dict[int, Place],
    ) -> None:
        self.graph = graph
        self._cost = cost
        self._roots = roots
        self._buffers = buffers
        self._places = places

    def operands(self, node: Node) -> tuple[Operand, ...]:
        """What a launch reads, then what it writes; an updated state once, as its new version."""
        updated = self._updated(node)
        found: list[Operand] = []
        for value in node.inputs():
            root = self._roots.get(id(value))
            if root is None or id(root) not in updated:
                found.append(self._operand(value, "read"))
        found += [self._operand(version, "update") for version in updated.values()]
        found += [
            self._operand(value, "write")
            for value in node.outputs(self.graph)
            if id(value) not in self._roots
        ]
        return tuple(found)

    def _updated(self, node: Node) -> dict[int, Value]:
        """id of the root of each state that a launch updates -> the version it leaves."""
        versions: dict[int, Value] = {}
        for leaf in node.leaves:
            for result in op_named(leaf.op).updates.values():
                version = leaf.results[result]
                versions[id(self._roots[id(version)])] = version
        return versions

    def _operand(self, value: Value, mode: _Mode) -> Operand:
        access, storage, offset, use = self._home(value)
        return Operand(
            value=value.name,
            access=access,
            mode=mode,
            type=str(value.type),
            bytes=self._cost.local_bytes(value),
            storage=storage,
            offset=offset,
            use=use,
        )

    def _home(self, value: Value) -> tuple[Access, str, int, int]:
        """Access class, storage, arena offset, mailbox use."""
        if (root := self._roots.get(id(value))) is not None:
            return "state", root.name, 0, 0
        if self._cost.is_static(value):
            return "weight", value.name, 0, 0
        if value.kind == "input":
            return "host", value.binding or value.name, 0, 0
        if (place := self._places.get(id(value))) is not None:
            return "mailbox", place.mailbox, 0, place.use
        buffer = self._buffers[value.name]
        return "activation", buffer.value, buffer.offset, 0


def _launch(node: Node, homes: _Homes, cost: CostModel, target: Target) -> Launch:
    traffic = cost.traffic(node)
    after, wait = node.attrs["after"], node.attrs["wait"]
    assert isinstance(after, tuple)
    assert isinstance(wait, int)
    return Launch(
        name=node.name,
        ops=tuple(leaf.op for leaf in node.body),
        stream=cast(Literal["main", "aux", "prefetch"], stream_of(node)),
        after=tuple(str(edge) for edge in after),
        wait=wait,
        trigger=str(node.attrs["trigger"]),
        layer=layer_of(node),
        operands=homes.operands(node),
        weight_bytes=traffic.weights,
        state_bytes=traffic.state,
        activation_bytes=traffic.activations,
        predicted_us=cost.predicted_us(node, traffic, target),
    )


def _state(value: Value, cost: CostModel) -> State:
    return State(value.name, value.binding, str(value.type), cost.local_bytes(value))


def _weight(value: Value, cost: CostModel) -> Weight:
    return Weight(value.name, value.binding, str(value.type), cost.local_bytes(value))


def _outputs(graph: Graph) -> tuple[tuple[str, str], ...]:
    """The named outputs; the states behind them are advanced in place."""
    names = graph.attrs.get("outputs", ())
    assert isinstance(names, tuple)
    return tuple((str(name), v.name) for name, v in zip(names, graph.outputs, strict=False))


def _launches_by_layer(leaves: list[Node]) -> tuple[tuple[int, int], ...]:
    counts = Counter(layer_of(leaf) for leaf in leaves if leaf.op not in VIEW_OPS)
    return tuple(sorted(counts.items()))


def _require_launches(graph: Graph) -> None:
    static = graph.static_values()
    for node in graph.nodes:
        plain = not node.is_fused and not all(id(r) in static for r in node.results)
        if plain or (node.is_fused and "after" not in node.attrs):
            raise InputError(
                f"{node} is in no scheduled launch: run the passes up to insert-pdl before lowering"
            )
