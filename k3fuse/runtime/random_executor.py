"""A schedule on simulated ranks with clocks of their own, in orders drawn at random.

Whatever the schedule leaves unordered may happen in any order, at the grain of single actions of
a launch: a read takes the bytes that lie there at that moment. So a schedule that orders too
little reads what it should not, computes a wrong number or waits for ever in some order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from k3fuse.errors import InputError, VerifyError
from k3fuse.ir import Graph, Value
from k3fuse.ir.interpreter import Ranks
from k3fuse.ir.state import state_roots
from k3fuse.runtime.lockstep import Expected, StepTensors, run_lockstep
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.rank_body import Layout, Payload, RankBody, Written, layout_of
from k3fuse.runtime.storage import POISON, WIDEN
from k3fuse.runtime.versions import THE_STEP, ExpectedVersions, Version, Versions
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


@dataclass
class RandomRun:
    """What one order gave. `failure` is empty when it ended with the reference's numbers on every
    rank; `outputs` has what rank 0 returned, by output name, for each step that it completed."""

    ok: bool
    outputs: list[dict[str, Tensor]]
    failure: str = ""


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
        self.pushed: dict[tuple[str, str], dict[int, str]] = {}  # (launch, ring) -> use -> value
        self.places: dict[str, tuple[str, int]] = {}  # value -> ring, use
        for launch in plan.launches:
            for o in launch.operands:
                if o.access == "mailbox":
                    self.pushed.setdefault((launch.name, o.storage), {})[o.use] = o.value
                    self.places[o.value] = (o.storage, o.use)
        self.states = {
            value.name: states[value.binding] if states is not None else self._zeros(value)
            for value in graph.inputs
            if value.kind == "state"
        }
        self.memo: dict[tuple[object, ...], tuple[Written, object]] = {}
        self._expected: tuple[Sequence[StepTensors], Expected] | None = None
        self._compiled: tuple[Schedule, CompiledSchedule, ExpectedVersions] | None = None

    def run(self, schedule: Schedule, inputs: Sequence[StepTensors], seed: int) -> RandomRun:
        """Run one order of as many steps as there are inputs, on the ranks of the plan.

        Raises InputError for a schedule of other launches, or inputs that are not the plan's.
        """
        names = {launch.name for launch in self.plan.launches}
        if {launch.name for launch in schedule.launches} != names:
            raise InputError(f"schedule {schedule.name} does not have the launches of the plan")
        expected = self._reference(inputs)
        if self._compiled is None or self._compiled[0] is not schedule:
            self._compiled = (schedule, CompiledSchedule(schedule), ExpectedVersions(schedule))
        _, compiled, versions = self._compiled
        machine = _Machine(self, schedule, expected, Versions(versions, self.tp))
        order = RandomOrder(compiled, machine, self.tp, len(inputs), seed)
        try:
            order.run()
            machine.check_states()
        except OrderFailure as failure:
            return RandomRun(False, machine.outputs, str(failure))
        return RandomRun(True, machine.outputs)

    def _zeros(self, value: Value) -> Ranks:
        layout = layout_of(value, self.graph)
        return [torch.zeros(layout.shape, dtype=layout.dtype) for _ in range(self.tp)]

    def _reference(self, inputs: Sequence[StepTensors]) -> Expected:
        if self._expected is None or self._expected[0] is not inputs:
            found = run_lockstep(self.plan, self.graph, self.weights, self.states, inputs)
            self._expected = (inputs, found)
        return self._expected[1]


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


_Slot = tuple[int, Payload] | None
"""The words of one sender in a stage: the use that they belong to and what they are."""


@dataclass
class _Machine:
    """The memory of all ranks: arenas as bytes, rings as words of each sender, states."""

    executor: RandomExecutor
    schedule: Schedule
    expected: Expected
    versions: Versions
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
            self._check_version(run.rank, run.step, run.launch.name, action.target)
            run.seen[action.target] = self._seen(run, action)
        elif action.kind == "write":
            return self._write(run, action)
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
            if wrong := self.versions.wrong(run.rank, run.step, run.launch.name, name):
                raise OrderFailure(
                    f"step {run.step} rank {run.rank} @{run.launch.name}: {name} changed before "
                    f"all blocks had read it: the last one {wrong}"
                )

    def finish(self, rank: int, step: int) -> None:
        if rank == 0:
            self.outputs.append({})
        for name, value in self.executor.plan.outputs:
            layout = self.executor.layouts[value]
            self._check_version(rank, step, THE_STEP, value)
            held = self._read(rank, value, THE_STEP)
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
        """The value that a launch sends or awaits; a poll of another use gives it other words."""
        key = (run.launch.name, action.target)
        values = self.executor.pushed.get(key, {})
        if action.use in values:
            return values[action.use]
        if action.kind != "poll" or not values:
            raise InputError(f"@{key[0]} has no value in use {action.use} of mailbox {key[1]}")
        return values[min(values, key=lambda use: abs(use - action.use))]

    def _words(self, run: Running, action: Action) -> tuple[Payload, ...]:
        """What lies in the stage of a use; OrderFailure if that is not the use of the value."""
        rule = self._rules[action.target]
        use = run.step * rule.uses + action.use
        stage = self._stage(rule, run.rank, use)
        value = self._pushed(run, action)
        want = run.step * rule.uses + self.executor.places[value][1]
        for sender, slot in enumerate(stage):
            if slot is not None and slot[0] != want:
                raise OrderFailure(
                    f"step {run.step} rank {run.rank} @{run.launch.name}: finds the words of use "
                    f"{slot[0]} of {rule.name} from rank {sender} instead of those of use {want}"
                )
        return tuple(None if slot is None else slot[1] for slot in stage)

    def _check_version(self, rank: int, step: int, launch: str, name: str) -> None:
        if wrong := self.versions.wrong(rank, step, launch, name):
            where = launch if launch == THE_STEP else f"@{launch}"
            raise OrderFailure(f"step {step} rank {rank} {where} {wrong}")

    def _seen(self, run: Running, action: Action) -> object:
        """What a read finds. A weight that the schedule writes has versions and no other bytes."""
        return (
            None
            if action.access == "weight"
            else self._read(run.rank, action.target, f"@{run.launch.name}")
        )

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

    def _write(self, run: Running, action: Action) -> list[Store]:
        """Visible some time before the launch ends; at once if the launch touches it again."""
        name, rank = action.target, run.rank
        version = Version(run.step, run.launch.name, name)
        written = None if action.access == "weight" else self._computed(run)
        if written and name not in written.states and name not in written.activations:
            raise InputError(f"@{run.launch.name} does not compute {name}, which it is to write")

        def store() -> None:
            self.versions.write(rank, version)
            if written is None:
                return
            if name in written.states:
                self._states[rank][name] = written.states[name]
                return
            held, (offset, _) = written.activations[name], self._places[name]
            self._arenas[rank][offset : offset + len(held)] = held

        if any(later.target == name for later in run.program[run.done :]):
            store()
            return []
        return [store]

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
