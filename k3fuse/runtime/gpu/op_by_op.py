"""The step op by op in torch, on the weights and states that the launches use: for prefill.

It runs the graph that a bucket was lowered from with any number of rows, so it needs no second
copy of the weights. Correct, not fast: every op is its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from k3fuse.errors import VerifyError
from k3fuse.ir import Graph, Value, run_node, shard_tensor
from k3fuse.ir.interpreter import Environment, Gather, Ranks, assemble, bind_dims
from k3fuse.ir.state import state_roots

ROWS = "rows_per_request"


class OpByOp:
    """Runs a graph on what some ranks of the group hold of weights and states, by value name.

    `weights`, `states`: lists over `ranks`; states are overwritten in place. `gather`: what all
    ranks hold of a value, from what these hold.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Ranks],
        states: Mapping[str, Ranks],
        ranks: Sequence[int],
        gather: Gather,
    ) -> None:
        self._graph, self._ranks, self._gather = graph, list(ranks), gather
        self._env = _Held(state_roots(graph), weights, states)
        static = graph.static_values()  # computed at load: by name in `weights`
        self._nodes = [
            node
            for node in graph.leaves()
            if node.results and not all(id(r) in static for r in node.results)
        ]
        self._last_use = {id(v): node for node in self._nodes for v in node.operands}

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], rows_per_request: int) -> dict[str, Tensor]:
        """Run one step; outputs by name, whole. inputs: by the last part of their binding, on the
        device; M = R * rows_per_request rows."""
        graph, env = self._graph, self._env
        values = [value for value in graph.inputs if value.kind == "input"]
        tensors = [inputs[value.binding.rpartition(".")[2]] for value in values]
        dims = {**graph.dims, **bind_dims([v.type for v in values], [t.shape for t in tensors])}
        for value, tensor in zip(values, tensors, strict=True):
            whole = shard_tensor(tensor, value.type, graph.tp)
            env.write(value, [whole[rank] for rank in self._ranks])
        keep = {id(v) for v in graph.outputs}
        for node in self._nodes:
            if ROWS in node.attrs:
                node.attrs[ROWS] = rows_per_request
            run_node(node, env, graph.tp, dims, ranks=self._ranks, gather=self._gather)
            for value in node.operands:
                if self._last_use[id(value)] is node and id(value) not in keep:
                    env.forget(value)
        names = graph.attrs.get("outputs", ())
        assert isinstance(names, tuple)
        found = {
            str(name): assemble(self._gather(env.read(value)), value.type, value.name)
            for name, value in zip(names, graph.outputs, strict=False)
        }
        env.clear()
        return found


class _Held(Environment):
    """Weights by name; all versions of a state in its storage."""

    def __init__(
        self, roots: Mapping[int, Value], weights: Mapping[str, Ranks], states: Mapping[str, Ranks]
    ) -> None:
        super().__init__()
        self._roots, self._weights, self._states = roots, weights, states

    def clear(self) -> None:
        self._values.clear()

    def read(self, value: Value) -> Ranks:
        if (root := self._roots.get(id(value))) is not None:
            return self._states[root.name]
        if id(value) in self._values:
            return self._values[id(value)]
        if value.name in self._weights:
            return self._weights[value.name]
        raise VerifyError(f"%{value.name} is neither computed nor a weight of the bundle")

    def write(self, value: Value, ranks: Ranks) -> None:
        root = self._roots.get(id(value))
        if root is None:
            super().write(value, ranks)
            return
        for storage, tensor in zip(self._states[root.name], ranks, strict=True):
            storage.copy_(tensor)
