"""A schedule on simulated ranks with clocks of their own, in orders drawn at random.

Whatever the schedule leaves unordered may happen in any order, at the grain of single actions of
a launch: a read takes the bytes that lie there at that moment. So a schedule that orders too
little computes a wrong number or waits for ever in some order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from k3fuse.errors import InputError, VerifyError
from k3fuse.ir import Environment, Graph, Value, run_node, shard_tensor
from k3fuse.ir.interpreter import Ranks
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.ir.state import state_roots
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.rank_body import Layout, Payload, RankBody, Written, layout_of
from k3fuse.runtime.storage import POISON, WIDEN
from k3fuse.schedule.edges import launches_of
from k3fuse.schedule.model import Action, MailboxRule, Schedule
from k3fuse.schedule.random_order import (
    CompiledSchedule,
    OrderFailure,
    RandomOrder,
    Running,
    Store,
)

MEMO_LIMIT = 50_000
"""Results of launches that are kept, by what they were computed from."""

StepTensors = Mapping[str, Tensor]
"""Global step inputs by the last part of their binding: tokens, lengths, block_table, slots."""


@dataclass
class RandomRun:
    """What one order gave. `failure` is empty when it ended with the reference's numbers on every
    rank; `outputs` has what rank 0 returned, by output name, for each step that it completed."""

    ok: bool
    outputs: list[dict[str, Tensor]]
    failure: str = ""


@dataclass(frozen=True)
class _Expected:
    outputs: list[dict[str, list[bytes]]]  # step -> value -> rank -> bytes
    states: dict[str, Ranks]
    inputs: list[dict[str, Ranks]]  # step -> value name -> ranks


class RandomExecutor:
    """Runs any schedule of the launches of one plan, again and again.

    `graph` is what the plan was lowered from, `weights` the static values as the recipe gives them,
    `states` the ranks' states at the start by binding (zeros by default). Launches that read the
    same bytes as before are not computed again. Raises VerifyError when plan and graph differ.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        weights: Mapping[str, Ranks],
        states: Mapping[str, Ranks] | None = None,
    ) -> None:
        nodes = launches_of(graph)
        if [launch.name for launch in plan.launches] != [node.name for node in nodes]:
            raise VerifyError("the plan and its graph differ: compile again")
        self.plan, self.graph, self.weights, self.tp = plan, graph, weights, plan.tp
        self.roots = state_roots(graph)
        self.bodies = {n.name: RankBody(n, graph, weights, self.roots) for n in nodes}
        self.layouts = {v.name: layout_of(v, graph) for v in graph.values()}
        self.pushed = {
            (launch.name, o.storage, o.use): o.value
            for launch in plan.launches
            for o in launch.operands
            if o.access == "mailbox"
        }
        self.places = {value: (ring, use) for (_, ring, use), value in self.pushed.items()}
        self.states = {
            value.name: states[value.binding] if states is not None else self._zeros(value)
            for value in graph.inputs
            if value.kind == "state"
        }
        self.memo: dict[tuple[object, ...], tuple[Written, object]] = {}
        self._expected: tuple[Sequence[StepTensors], _Expected] | None = None

    def run(self, schedule: Schedule, inputs: Sequence[StepTensors], seed: int) -> RandomRun:
        """Run one order of as many steps as there are inputs, on the ranks of the plan.

        Raises InputError for a schedule of other launches, or inputs that are not the plan's.
        """
        names = {launch.name for launch in self.plan.launches}
        if {launch.name for launch in schedule.launches} != names:
            raise InputError(f"schedule {schedule.name} does not have the launches of the plan")
        expected = self._reference(inputs)
        machine = _Machine(self, schedule, expected)
        order = RandomOrder(CompiledSchedule(schedule), machine, self.tp, len(inputs), seed)
        try:
            order.run()
            machine.check_states()
        except OrderFailure as failure:
            return RandomRun(False, machine.outputs, str(failure))
        return RandomRun(True, machine.outputs)

    def _zeros(self, value: Value) -> Ranks:
        layout = layout_of(value, self.graph)
        return [torch.zeros(layout.shape, dtype=layout.dtype) for _ in range(self.tp)]

    @torch.no_grad()
    def _reference(self, inputs: Sequence[StepTensors]) -> _Expected:
        """All ranks in lockstep, node by node, without arena and mailboxes."""
        if self._expected is not None and self._expected[0] is inputs:
            return self._expected[1]
        env = _Lockstep(self)
        values = [value for value in self.graph.inputs if value.kind == "input"]
        outputs: list[dict[str, list[bytes]]] = []
        cut: list[dict[str, Ranks]] = []
        for step, tensors in enumerate(inputs):
            given: dict[str, Ranks] = {}
            for value in values:
                name = value.binding.rpartition(".")[2]
                if name not in tensors:
                    raise InputError(f"step {step} has no input '{name}'")
                given[value.name] = shard_tensor(tensors[name], value.type, self.tp)
            cut.append(given)
            env.begin({id(value): given[value.name] for value in values})
            for launch in launches_of(self.graph):
                for leaf in launch.body:
                    run_node(leaf, env, self.tp, self.graph.dims)
            outputs.append(
                {
                    name: [self.layouts[name].encode(t) for t in env.read(self.graph.value(name))]
                    for _, name in self.plan.outputs
                }
            )
        found = _Expected(outputs, env.states, cut)
        self._expected = (inputs, found)
        return found


def run_random(
    schedule: Schedule,
    plan: Plan,
    graph: Graph,
    weights: Mapping[str, Ranks],
    inputs: Sequence[StepTensors],
    seed: int,
) -> RandomRun:
    """Run one order of a schedule from zero states; `RandomExecutor` for many orders."""
    return RandomExecutor(plan, graph, weights).run(schedule, inputs, seed)


class _Lockstep(Environment):
    """Values of all ranks, states as their latest version; pushed values have no -0.0."""

    def __init__(self, executor: RandomExecutor) -> None:
        super().__init__()
        self._executor = executor
        self.states = dict(executor.states)

    def begin(self, inputs: dict[int, Ranks]) -> None:
        self._values = dict(inputs)

    def read(self, value: Value) -> Ranks:
        if (root := self._executor.roots.get(id(value))) is not None:
            return self.states[root.name]
        if id(value) in self._values:
            return self._values[id(value)]
        return self._executor.weights[value.name]

    def write(self, value: Value, ranks: Ranks) -> None:
        if (root := self._executor.roots.get(id(value))) is not None:
            self.states[root.name] = ranks
            return
        if value.producer is not None and value.producer.op in PUSHES:
            ranks = [t + 0.0 if t.is_floating_point() else t for t in ranks]
        super().write(value, ranks)


_Slot = tuple[int, Payload] | None
"""The words of one sender in a stage: the use that they belong to and what they are."""


@dataclass
class _Machine:
    """The memory of all ranks: arenas as bytes, rings as words of each sender, states."""

    executor: RandomExecutor
    schedule: Schedule
    expected: _Expected
    outputs: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])

    def __post_init__(self) -> None:
        tp = self.executor.tp
        self._places = {
            s.name: (WIDEN * s.offset, WIDEN * s.bytes)
            for s in self.schedule.storages
            if s.space == "arena"
        }
        size = max((offset + bytes_ for offset, bytes_ in self._places.values()), default=0)
        self._poison = bytes([POISON]) * size
        self._arenas = [bytearray(self._poison) for _ in range(tp)]
        self._rules = {rule.name: rule for rule in self.schedule.mailboxes}
        self._rings: dict[str, list[list[list[_Slot]]]] = {
            rule.name: [[[None] * tp for _ in range(rule.stages)] for _ in range(tp)]
            for rule in self.schedule.mailboxes
        }
        self._states = [
            {name: ranks[r] for name, ranks in self.executor.states.items()} for r in range(tp)
        ]

    def begin(self, rank: int, step: int) -> None:
        self._arenas[rank][:] = self._poison

    def missing(self, run: Running, action: Action) -> list[int]:
        rule = self._rules[action.target]
        use = run.step * rule.uses + action.use
        return [
            s
            for s, slot in enumerate(self._stage(rule, run.rank, use))
            if not _here(rule, slot, use)
        ]

    def act(self, run: Running, action: Action) -> list[Store]:
        if action.kind == "read":
            run.seen[action.target] = self._read(run.rank, action.target, run.launch.name)
        elif action.kind == "write":
            self._write(run, action)
        elif action.kind == "poll":
            name = self._pushed(run, action)
            run.seen[name] = self._words(run, action)
        elif action.kind == "publish":
            return self._publish(run, action)
        elif action.kind == "rearm":
            rule = self._rules[action.target]
            use = run.step * rule.uses + action.use + rule.rearm
            stage = self._stage(rule, run.rank, use)
            return [_setter(stage, s, None) for s in range(len(stage))]
        return []

    def poll_again(self, run: Running, action: Action) -> None:
        if run.seen[self._pushed(run, action)] != self._words(run, action):
            raise OrderFailure(
                f"step {run.step} rank {run.rank} @{run.launch.name}: two blocks polled use "
                f"{action.use} of {action.target} and saw different words"
            )

    def close(self, run: Running) -> None:
        own = {action.target for action in run.program if action.kind == "write"}
        for action in run.program:
            name = action.target
            if action.kind != "read" or name in own:
                continue
            again, seen = self._read(run.rank, name, run.launch.name), run.seen[name]
            if again is not seen and (isinstance(again, Tensor) or again != seen):
                raise OrderFailure(
                    f"step {run.step} rank {run.rank} @{run.launch.name}: {name} changed before "
                    "all blocks had read it"
                )

    def finish(self, rank: int, step: int) -> None:
        if rank == 0:
            self.outputs.append({})
        for name, value in self.executor.plan.outputs:
            layout = self.executor.layouts[value]
            held = self._read(rank, value, "the step")
            assert isinstance(held, bytes)
            if rank == 0:
                self.outputs[-1][name] = layout.decode(held)
            if not _same(held, self.expected.outputs[step][value][rank], layout):
                raise OrderFailure(f"step {step} rank {rank}: output {name} is not the reference's")

    def check_states(self) -> None:
        """After the last step: every state of every rank is the reference's."""
        for name, ranks in self.expected.states.items():
            for rank, want in enumerate(ranks):
                held = self._states[rank][name]
                if held is not want and not _equal(held, want):
                    raise OrderFailure(f"rank {rank}: state {name} is not the reference's")

    def _stage(self, rule: MailboxRule, rank: int, use: int) -> list[_Slot]:
        return self._rings[rule.name][rank][use % rule.stages]

    def _pushed(self, run: Running, action: Action) -> str:
        key = (run.launch.name, action.target, action.use)
        if key not in self.executor.pushed:
            raise InputError(f"@{key[0]} has no value in use {key[2]} of mailbox {key[1]}")
        return self.executor.pushed[key]

    def _words(self, run: Running, action: Action) -> tuple[Payload, ...]:
        rule = self._rules[action.target]
        stage = self._stage(rule, run.rank, run.step * rule.uses + action.use)
        return tuple(None if slot is None else slot[1] for slot in stage)

    def _read(self, rank: int, name: str, reader: str) -> object:
        """The bytes of an activation, or a state (which nobody writes in place)."""
        if name in self._states[rank]:
            return self._states[rank][name]
        if name not in self._places:
            raise InputError(f"{reader} reads {name}, which has no storage in the schedule")
        offset, room = self._places[name]
        size = self.executor.layouts[name].bytes
        if size > room:
            raise InputError(f"{name} has {room // WIDEN} bytes of storage, needs {size // WIDEN}")
        return bytes(self._arenas[rank][offset : offset + size])

    def _write(self, run: Running, action: Action) -> None:
        written = self._computed(run)
        name = action.target
        if name not in written.states and name not in written.activations:
            raise InputError(f"@{run.launch.name} does not compute {name}, which it is to write")
        if name in written.states:
            self._states[run.rank][name] = written.states[name]
            return
        held = written.activations[name]
        offset, _ = self._places[name]
        self._arenas[run.rank][offset : offset + len(held)] = held

    def _publish(self, run: Running, action: Action) -> list[Store]:
        rule = self._rules[action.target]
        use = run.step * rule.uses + action.use
        payloads = self._computed(run).payloads[self._pushed(run, action)]
        return [
            _setter(self._stage(rule, d, use), run.rank, None if sent is None else (use, sent))
            for d, sent in enumerate(payloads)
        ]

    def _computed(self, run: Running) -> Written:
        """What the launch computes from what it has read, worked out at its first write."""
        if (done := run.seen.get("")) is not None:
            return cast(Written, done)
        executor, rank = self.executor, run.rank
        body = executor.bodies[run.launch.name]
        inputs = self.expected.inputs[run.step]
        found: dict[str, object] = {}
        for name in body.reads:
            if name in run.seen:
                found[name] = run.seen[name]
            elif name in inputs:
                found[name] = inputs[name][rank]
            else:  # the schedule has no such read: what lies there now
                found[name] = self._late(run, name)
        parts = tuple(id(v) if isinstance(v, Tensor) else v for v in found.values())
        key = (run.launch.name, rank, *parts)
        hit = executor.memo.get(key)
        if hit is None:
            try:
                with torch.no_grad():
                    written = body.compute(rank, found)
            except (RuntimeError, IndexError, ValueError) as error:
                raise OrderFailure(
                    f"step {run.step} rank {rank} @{run.launch.name} cannot compute: {error}"
                ) from None
            if len(executor.memo) >= MEMO_LIMIT:
                executor.memo.clear()
            hit = executor.memo[key] = (written, found)  # keeps the tensors of the key alive
        run.seen[""] = hit[0]
        return hit[0]

    def _late(self, run: Running, name: str) -> object:
        place = self.executor.places.get(name)
        if place is None:
            return self._read(run.rank, name, f"@{run.launch.name}")
        return self._words(run, Action("poll", place[0], "mailbox", place[1]))


def _here(rule: MailboxRule, slot: _Slot, use: int) -> bool:
    """Whether words have arrived: they are not empty, or on a ring that nobody re-arms, not old."""
    return slot is not None and (rule.rearm > 0 or slot[0] >= use)


def _setter(stage: list[_Slot], sender: int, slot: _Slot) -> Store:
    def store() -> None:
        stage[sender] = slot

    return store


def _same(held: bytes, want: bytes, layout: Layout) -> bool:
    return held == want or _equal(layout.decode(held), layout.decode(want))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Equal numbers; NaN equals NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
