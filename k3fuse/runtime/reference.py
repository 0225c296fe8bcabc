"""The plan on the CPU: N simulated ranks in lockstep, launch by launch, in the plan's own bytes.

Slow, exact in what it means, and without a GPU: every other executor is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.errors import InputError, VerifyError
from k3fuse.ir import Graph
from k3fuse.ir.interpreter import (
    Ranks,
    assemble,
    bind_dims,
    check_bit_equal,
    run_node,
    shard_tensor,
)
from k3fuse.models.kimi import DecodeState, KimiModel, Mode, StepInputs
from k3fuse.runtime.bundle import Bundle, Kind
from k3fuse.runtime.executor import Capacity, StepResult
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.states import ShardedState, state_bindings
from k3fuse.runtime.stock import StockExecutor
from k3fuse.runtime.storage import PlannedStorage, ValueStorage
from k3fuse.runtime.weights import evaluate_recipe
from k3fuse.schedule.edges import launches_of
from k3fuse.tensor_type import TensorType


@dataclass(frozen=True)
class Program:
    """One bucket of a bundle: its plan, the graph it was lowered from, and its static values.

    kind "step" runs rows (as drafts when there is more than one a request), "commit" advances the
    states by accepted rows. `weights` has what launches read, by value name, for each rank.
    """

    kind: Kind
    plan: Plan
    graph: Graph
    weights: Mapping[str, Ranks]


class ReferenceExecutor:
    """Runs the programs of one bundle on a common state.

    `model` gives prefill and, where there is no commit program for a batch, the commit. A float64
    model, with float64 weights in the programs, makes the run exact: nothing is rounded, and values
    live outside the arena, whose bytes are sized for the plan's dtypes. `check_ranks` compares
    every replicated value on all ranks, bit by bit.

    Raises VerifyError for a plan that is not of its graph, and while running for a value that its
    plan gives no storage, a mailbox word that has not arrived or was not re-armed, and ranks that
    differ; InputError for a batch that no program was compiled for.
    """

    def __init__(
        self,
        model: KimiModel,
        capacity: Capacity,
        programs: Sequence[Program],
        *,
        check_ranks: bool = True,
    ) -> None:
        if not programs:
            raise InputError("the bundle has no bucket to run")
        self.model, self._capacity, self._check_ranks = model, capacity, check_ranks
        self.tp = programs[0].plan.tp
        exact = model.model.embed_tokens.weight.dtype == torch.float64
        state = model.new_state(capacity.slots, capacity.pages, capacity.page_size, capacity.rows)
        self._state = ShardedState(state, _state_types(programs, state), self.tp)
        self._programs: dict[tuple[str, int, int], Program] = {}
        self._storage: dict[tuple[str, int, int], ValueStorage] = {}
        for program in programs:
            plan, graph = program.plan, program.graph
            key = (program.kind, plan.batch, plan.rows_per_request)
            names = [launch.name for launch in launches_of(graph)]
            if plan.tp != self.tp or [launch.name for launch in plan.launches] != names:
                raise VerifyError(f"the plan of {key} and its graph differ: compile again")
            self._programs[key] = program
            self._storage[key] = (
                ValueStorage(graph, program.weights, self._state)
                if exact
                else PlannedStorage(graph, plan, program.weights, self._state)
            )

    @classmethod
    def load(
        cls, bundle: Bundle, model: KimiModel, *, check_ranks: bool = True
    ) -> ReferenceExecutor:
        """Every bucket of a bundle with the parameters of `model`, bf16 or float64.

        InputError when a parameter has not the shape that the bundle was compiled for.
        """
        weights = evaluate_recipe(bundle.recipe(), lambda path: model.get_parameter(path).detach())
        programs = [
            Program(bucket.kind, bundle.plan(bucket), bundle.graph(bucket), weights)
            for bucket in bundle.buckets
        ]
        return cls(model, Capacity.of(bundle.options), programs, check_ranks=check_ranks)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def load_state(self, state: DecodeState) -> None:
        """Cut a global state over the ranks, into their storages."""
        self._state.load(state)

    def read_state(self) -> DecodeState:
        """A copy of the state as one global one; VerifyError when ranks differ in a shared part."""
        return self._state.read()

    def prefill(self, inputs: StepInputs, rows_per_request: int) -> StepResult:
        """As `Executor.prefill`: the stock forward on the whole state."""
        stock = self._stock()
        result = stock.prefill(inputs, rows_per_request)
        self.load_state(stock.state)
        return result

    def step(self, inputs: StepInputs, rows_per_request: int, mode: Mode) -> StepResult:
        """As `Executor.step`, for the batches and rows that programs were compiled for."""
        if (mode == "verify") != (rows_per_request > 1):
            raise InputError(f"mode {mode} with {rows_per_request} rows a request is not compiled")
        key = ("step", inputs.slots.shape[0], rows_per_request)
        if key not in self._programs:
            have = sorted(k[1:] for k in self._programs if k[0] == "step")
            raise InputError(
                f"no bucket for {key[1]} requests of {key[2]} rows; compiled: {have} (requests, "
                "rows): compile with --batch and --verify-rows for it"
            )
        out = self._run(key, inputs._asdict())
        return StepResult(out["logits"], out["tokens"], out["hidden"])

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """As `Executor.commit`."""
        batch = slots.shape[0]
        for key in self._programs:
            if key[:2] == ("commit", batch):
                self._run(key, {"slots": slots, "accepted": accepted})
                return
        stock = self._stock()
        stock.commit(slots, accepted)
        self.load_state(stock.state)

    def reset(self, slots: Sequence[int]) -> None:
        """As `Executor.reset`."""
        stock = self._stock()
        stock.reset(slots)
        self.load_state(stock.state)

    def _stock(self) -> StockExecutor:
        return StockExecutor(self.model, self._capacity, self.read_state())

    @torch.no_grad()
    def _run(self, key: tuple[str, int, int], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a program on step inputs by the last part of their binding; outputs by name."""
        graph, storage = self._programs[key].graph, self._storage[key]
        values = [value for value in graph.inputs if value.kind == "input"]
        tensors = [inputs[value.binding.rpartition(".")[2]] for value in values]
        dims = graph.dims
        for name, size in bind_dims([v.type for v in values], [t.shape for t in tensors]).items():
            if dims[name] != size:
                raise InputError(f"the inputs have {name} = {size}, the plan {dims[name]}")
        storage.begin_step(
            {
                id(value): shard_tensor(tensor, value.type, self.tp)
                for value, tensor in zip(values, tensors, strict=True)
            }
        )
        for position, launch in enumerate(launches_of(graph)):
            for leaf in launch.body:
                run_node(leaf, storage, self.tp, dims)
                if self._check_ranks:
                    for result in leaf.results:
                        if result.type.placement.is_replicate:
                            check_bit_equal(storage.read(result), result.name)
            storage.end_launch(position)
        names = graph.attrs.get("outputs", ())
        assert isinstance(names, tuple)
        outputs = {
            str(name): assemble(storage.read(value), value.type, value.name).clone()
            for name, value in zip(names, graph.outputs, strict=False)
        }
        storage.end_step()
        return outputs


def _state_types(programs: Sequence[Program], state: DecodeState) -> dict[str, TensorType]:
    """How every state tensor is cut, which all programs must agree on, as on its sizes."""
    tensors = dict(state_bindings(state))
    types: dict[str, TensorType] = {}
    for program in programs:
        for value in program.graph.inputs:
            if value.kind != "state":
                continue
            if types.setdefault(value.binding, value.type) != value.type:
                raise VerifyError(f"{value.binding} is {value.type} and {types[value.binding]}")
            if value.binding in tensors:
                found = bind_dims([value.type], [tensors[value.binding].shape])
                wrong = {d: s for d, s in found.items() if program.graph.dims[d] != s}
                if wrong:
                    raise InputError(
                        f"{value.binding}: the state has {wrong}, the plan {program.graph.dims}"
                    )
    return types
