"""What a launch moves, and how long that should take.

Bytes are those of one rank. A static value is read once a launch, however many leaves read it, and
again by every further launch. Of routed experts a launch reads the distinct ones that M rows are
expected to choose; of the embedding, M rows; of a state, the slots or rows in use. An L2 prefetch
moves bytes that another launch is charged for, so it counts none.

    time of a launch = launch_edge_us
                     + cold_start_us                       if it fetches weights or state
                     + (weight + state bytes) / read_bandwidth
                     + activation bytes / l2_bandwidth
                     + hop_us                              if it reads a mailbox

with the figures of the Target row. Activation bytes are all operands that are neither static nor
state: they are small and were just written, so L2 serves them. An exchange is charged to its
reader: the pusher does not wait. Launches overlap only as far as launch_edge_us says, which was
measured with a PDL edge. A prefetch takes the time of its bytes, on its own stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from k3fuse.errors import K3FuseError
from k3fuse.expected import expected_distinct_experts
from k3fuse.ir import Graph, Node, Value
from k3fuse.lowering.mailboxes import is_pushed
from k3fuse.target import Target
from k3fuse.tensor_type import DType

STOCK_EXPERT_ROWS = 256
"""Stock engines pad a rank's share of a packed expert's intermediate rows to at least this."""

_MICROSECONDS = 1e6


@dataclass(frozen=True)
class StateAccess:
    """How often a leaf reads and writes a state operand, of which part."""

    part: Literal["slots", "rows", "context"]  # R slots; M cache rows; R * context cache rows
    reads: int = 0
    writes: int = 0


_READ = StateAccess("slots", reads=1)
_WRITE = StateAccess("slots", writes=1)
_BOTH = StateAccess("slots", reads=1, writes=1)
_CONTEXT = StateAccess("context", reads=1)

STATE_ACCESS: Mapping[str, Mapping[int, StateAccess]] = {
    "kda_step": {10: _BOTH, 11: _BOTH},
    "kda_verify": {10: _READ, 11: _READ, 13: _WRITE, 14: _WRITE, 15: _WRITE},
    "kda_commit": {0: _READ, 1: _READ, 2: _READ, 8: _BOTH, 9: _BOTH},
    "mla_append": {0: StateAccess("rows", writes=1)},
    "mla_attend": {1: _CONTEXT},
    "mla_attend_latent": {1: _CONTEXT},
}
"""Op -> operand index -> access, for every op that takes a state."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in a launch."""

    weights: int
    state: int
    activations: int


class CostModel:
    """Bytes and times of a graph's launches, with the graph's dims bound.

    The graph attributes `rows_per_request` and `context` (cached rows a request that attention
    reads, default 1) count.
    """

    def __init__(self, graph: Graph, roots: Mapping[int, Value]) -> None:
        self.graph = graph
        self._static = graph.static_values()
        self._states = roots
        self.requests = graph.dims["R"]
        self.rows_per_request = _integer(graph, "rows_per_request")
        self.rows = self.requests * self.rows_per_request
        self.context = _integer(graph, "context")

    def is_static(self, value: Value) -> bool:
        return id(value) in self._static

    def local_bytes(self, value: Value) -> int:
        """What one rank holds of a value."""
        return value.type.local_bytes(self.graph.tp, self.graph.dims)

    def traffic(self, node: Node) -> Traffic:
        """Bytes of a launch, or of a leaf that is run as a launch of its own."""
        if all(leaf.op == "l2_prefetch" for leaf in node.leaves):
            return Traffic(0, 0, 0)
        moved = [v for v in (*node.inputs(), *node.outputs(self.graph)) if self._is_activation(v)]
        return Traffic(
            weights=self._weight_bytes(node.leaves),
            state=sum(self._state_bytes(leaf) for leaf in node.leaves),
            activations=sum(self.local_bytes(v) for v in moved),
        )

    def expert_padding(self, leaf: Node) -> int:
        """Zeros that stock engines read beside the experts of a packed moe_experts leaf."""
        if leaf.op != "moe_experts" or leaf.operands[3].type.dtype != DType.U8:
            return 0
        rows = leaf.operands[3].type.local_shape(self.graph.tp)[1]
        assert isinstance(rows, int)
        missing = max(0, STOCK_EXPERT_ROWS - rows)
        return round(sum(self._read_bytes(leaf, i) for i in range(3, 9)) * missing / rows)

    def predicted_us(self, node: Node, traffic: Traffic, target: Target) -> float:
        """Time of a launch by the formula of this module, in microseconds."""
        cold = traffic.weights + traffic.state
        if (hint := node.leaves[0]).op == "l2_prefetch":
            size = hint.attrs["bytes"]
            assert isinstance(size, int)
            return target.launch_edge_us + size / target.read_bandwidth * _MICROSECONDS
        waits = any(is_pushed(v) for v in node.inputs())
        return (
            target.launch_edge_us
            + (target.cold_start_us if cold else 0.0)
            + cold / target.read_bandwidth * _MICROSECONDS
            + traffic.activations / target.l2_bandwidth * _MICROSECONDS
            + (target.hop_us if waits else 0.0)
        )

    def _is_activation(self, value: Value) -> bool:
        return id(value) not in self._static and id(value) not in self._states

    def _weight_bytes(self, leaves: Iterable[Node]) -> int:
        sizes: dict[int, float] = {}
        for leaf in leaves:
            for index, value in enumerate(leaf.operands):
                if id(value) in self._static:
                    size = self._read_bytes(leaf, index)
                    sizes[id(value)] = max(sizes.get(id(value), 0), size)
        return round(sum(sizes.values()))

    def _read_bytes(self, leaf: Node, index: int) -> float:
        """Bytes that a leaf reads of one static operand."""
        value = leaf.operands[index]
        size = self.local_bytes(value)
        if leaf.op == "moe_experts":
            experts, top_k = value.type.shape[0], leaf.operands[1].type.shape[1]
            assert isinstance(experts, int)
            assert isinstance(top_k, int)
            return expected_distinct_experts(experts, top_k, self.rows) * (size // experts)
        if leaf.op == "embedding":
            width = value.type.shape[1]
            assert isinstance(width, int)
            return self.rows * width * value.type.dtype.itemsize
        return size

    def _state_bytes(self, leaf: Node) -> int:
        total = 0
        for index, value in enumerate(leaf.operands):
            if id(value) not in self._states:
                continue
            access = STATE_ACCESS.get(leaf.op, {}).get(index)
            if access is None:
                raise K3FuseError(
                    f"what {leaf.op} moves of its state operand {index} is not known: add it to "
                    "STATE_ACCESS"
                )
            total += (access.reads + access.writes) * self._part_bytes(access, value)
        return total

    def _part_bytes(self, access: StateAccess, value: Value) -> int:
        if access.part == "slots":
            one = value.type.local_bytes(self.graph.tp, {**self.graph.dims, "slots": 1})
            return self.requests * one
        width = value.type.shape[-1]
        assert isinstance(width, int)
        rows = self.rows if access.part == "rows" else self.requests * self.context
        return rows * width * value.type.dtype.itemsize


def _integer(graph: Graph, key: str) -> int:
    value = graph.attrs.get(key, 1)
    assert isinstance(value, int)
    return value
