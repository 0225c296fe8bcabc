"""What one launch computes on one rank, from the bytes that it read to those that it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.errors import VerifyError
from k3fuse.ir import Graph, Node, Value, op_named
from k3fuse.ir.interpreter import Ranks
from k3fuse.ir.op import Context
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.tensor_type import DType

Payload = bytes | None
"""What one rank stores into its place of one peer's stage; None: words that look empty."""

Seen = Mapping[str, object]
"""What reads found, by name: bytes of activations, tensors of states, payloads of mailboxes."""


@dataclass(frozen=True)
class Layout:
    """How a value lies in storage on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def encode(self, tensor: Tensor) -> bytes:
        held = tensor.to(self.dtype).contiguous()
        return held.flatten().view(torch.uint8).numpy().tobytes()

    def decode(self, held: bytes) -> Tensor:
        if not held:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(held), dtype=self.dtype).view(self.shape)


def layout_of(value: Value, graph: Graph) -> Layout:
    """Unrounded f32 terms of a sum are kept in float64, as the reference does (Op.wide)."""
    dims = graph.dims
    local = value.type.local_shape(graph.tp)
    shape = tuple(dims[d] if isinstance(d, str) else d for d in local)
    wide = value.producer is not None and op_named(value.producer.op).wide
    dtype = torch.float64 if wide and value.type.dtype == DType.F32 else value.type.dtype.to_torch()
    return Layout(shape, dtype)


@dataclass(frozen=True)
class Written:
    """All results of a launch on one rank, by value name (states by the name of their storage)."""

    activations: Mapping[str, bytes]
    states: Mapping[str, Tensor]
    payloads: Mapping[str, Sequence[Payload]]  # for each receiver


class RankBody:
    """A launch's body, run for one rank at a time. `reads` names all that it needs of `Seen`."""

    def __init__(
        self, node: Node, graph: Graph, weights: Mapping[str, Ranks], roots: Mapping[int, Value]
    ) -> None:
        self._node, self._graph, self._roots, self._tp = node, graph, roots, graph.tp
        self._weights: dict[int, Ranks] = {}
        self._reads: list[tuple[Value, str]] = []
        for value in node.inputs():
            root = roots.get(id(value))
            if root is not None:
                self._reads.append((value, root.name))
            elif value.kind != "input" and value.name in weights:
                self._weights[id(value)] = weights[value.name]
            else:
                self._reads.append((value, value.name))
        self.reads = list(dict.fromkeys(name for _, name in self._reads))
        self._writes = [v for v in node.outputs(graph) if id(v) not in roots]
        for leaf in node.body:
            if op_named(leaf.op).is_collective and leaf.op not in PUSHES:
                raise VerifyError(f"@{node.name}: {leaf.op} is no half of an exchange")

    def compute(self, rank: int, seen: Seen) -> Written:
        """Run the body on what the launch has read. Raises what an op raises on bad values."""
        env: dict[int, Tensor] = {i: ranks[rank] for i, ranks in self._weights.items()}
        for value, name in self._reads:
            env[id(value)] = self._value(value, seen[name])
        payloads: dict[str, Sequence[Payload]] = {}
        for leaf in self._node.body:
            if leaf.op in PUSHES:
                payloads[leaf.result.name] = self._payloads(leaf, env[id(leaf.operands[0])])
                continue
            op = op_named(leaf.op)
            assert op.reference is not None
            shape = layout_of(leaf.results[0], self._graph).shape if leaf.results else ()
            types = tuple(v.type for v in leaf.operands)
            ctx = Context(self._tp, rank, shape, types)
            results = op.reference([env[id(v)] for v in leaf.operands], leaf.attrs, ctx)
            env.update((id(v), t) for v, t in zip(leaf.results, results, strict=True))
        states = {
            root.name: env[id(result)]
            for leaf in self._node.body
            for result in leaf.results
            if (root := self._roots.get(id(result))) is not None
        }
        activations = {
            v.name: layout_of(v, self._graph).encode(env[id(v)])
            for v in self._writes
            if v.name not in payloads
        }
        return Written(activations, states, payloads)

    def _value(self, value: Value, seen: object) -> Tensor:
        if isinstance(seen, Tensor):
            return seen
        layout = layout_of(value, self._graph)
        if isinstance(seen, bytes):
            return layout.decode(seen)
        assert isinstance(seen, tuple)  # one payload a sender
        push = value.producer
        assert push is not None
        part = self._part(push, layout)
        empty = -0.0 if part.dtype.is_floating_point else -1
        parts = [
            part.decode(item)
            if isinstance(item, bytes)
            else torch.full(part.shape, empty, dtype=part.dtype)
            for item in seen  # pyright: ignore[reportUnknownVariableType]
        ]
        if push.op == "push_gather":
            return torch.cat(parts, _dim(push))
        return torch.stack(parts)

    def _part(self, push: Node, whole: Layout) -> Layout:
        """What one sender stores at one receiver."""
        if push.op != "push_gather":
            return Layout(whole.shape[1:], whole.dtype)
        return Layout(layout_of(push.operands[0], self._graph).shape, whole.dtype)

    def _payloads(self, push: Node, sent: Tensor) -> list[Payload]:
        """What travels to each peer; -0.0 means empty, so it travels as +0.0."""
        part = self._part(push, layout_of(push.result, self._graph))
        chunks = push.op == "push_chunks"
        terms = sent.chunk(self._tp, _dim(push)) if chunks else [sent]
        found: list[Payload] = []
        for term in terms:
            words = (term + 0.0 if term.is_floating_point() else term).to(part.dtype)
            empty = (
                torch.signbit(words) & (words == 0) if words.is_floating_point() else words == -1
            )
            found.append(None if bool(empty.any()) else part.encode(words))
        return found if chunks else found * self._tp


def _dim(push: Node) -> int:
    dim = push.attrs["dim"]
    assert isinstance(dim, int)
    return dim
