"""What a plan's launches compute when nothing can go wrong: all ranks node by node, in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.ir import Environment, Graph, Value, run_node, shard_tensor
from k3fuse.ir.interpreter import Ranks
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.ir.state import state_roots
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.rank_body import layout_of
from k3fuse.schedule.edges import launches_of

StepTensors = Mapping[str, Tensor]
"""Global step inputs by the last part of their binding: tokens, lengths, block_table, slots."""


@dataclass(frozen=True)
class Expected:
    """What every step must give, what the states must be at the end, and what each rank gets."""

    outputs: list[dict[str, list[bytes]]]  # step -> value -> rank -> bytes
    states: dict[str, Ranks]
    inputs: list[dict[str, Ranks]]  # step -> value name -> ranks


@torch.no_grad()
def run_lockstep(
    plan: Plan,
    graph: Graph,
    weights: Mapping[str, Ranks],
    states: Mapping[str, Ranks],
    inputs: Sequence[StepTensors],
) -> Expected:
    """Run as many steps as there are inputs, from `states` (by value name), without arena and
    mailboxes. Raises InputError for an input that is missing."""
    env = _Lockstep(state_roots(graph), weights, states)
    values = [value for value in graph.inputs if value.kind == "input"]
    leading = [graph.value(name) for _, name in plan.outputs]
    outputs: list[dict[str, list[bytes]]] = []
    cut: list[dict[str, Ranks]] = []
    for step, tensors in enumerate(inputs):
        given: dict[str, Ranks] = {}
        for value in values:
            name = value.binding.rpartition(".")[2]
            if name not in tensors:
                raise InputError(f"step {step} has no input '{name}'")
            given[value.name] = shard_tensor(tensors[name], value.type, plan.tp)
        cut.append(given)
        env.begin({id(value): given[value.name] for value in values})
        for launch in launches_of(graph):
            for leaf in launch.body:
                run_node(leaf, env, plan.tp, graph.dims)
        outputs.append(
            {v.name: [layout_of(v, graph).encode(t) for t in env.read(v)] for v in leading}
        )
    return Expected(outputs, env.states, cut)


class _Lockstep(Environment):
    """Values of all ranks, states as their latest version; pushed values have no -0.0."""

    def __init__(
        self,
        roots: Mapping[int, Value],
        weights: Mapping[str, Ranks],
        states: Mapping[str, Ranks],
    ) -> None:
        super().__init__()
        self._roots, self._weights = roots, weights
        self.states = dict(states)

    def begin(self, inputs: dict[int, Ranks]) -> None:
        self._values = dict(inputs)

    def read(self, value: Value) -> Ranks:
        if (root := self._roots.get(id(value))) is not None:
            return self.states[root.name]
        if id(value) in self._values:
            return self._values[id(value)]
        return self._weights[value.name]

    def write(self, value: Value, ranks: Ranks) -> None:
        if (root := self._roots.get(id(value))) is not None:
            self.states[root.name] = ranks
            return
        if value.producer is not None and value.producer.op in PUSHES:
            ranks = [t + 0.0 if t.is_floating_point() else t for t in ranks]
        super().write(value, ranks)
