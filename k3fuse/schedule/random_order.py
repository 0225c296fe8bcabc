"""Some order that a schedule allows: an event loop over ranks with clocks of their own.

Only what the edges, triggers, waits, polls and barriers of the schedule order is ordered; all else
is left to a seeded picker, which is unfair on purpose. It starves ranks and launches for long,
starts launches early, and lets stores to peers become visible as late as it can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from k3fuse.errors import InputError
from k3fuse.schedule.model import Action, Schedule, ScheduledLaunch
from k3fuse.target import get_target

Store = Callable[[], None]
"""A store that a launch has made and that becomes visible some time before the launch ends."""


class OrderFailure(Exception):  # noqa: N818 - what a run found, which its result reports
    """A deadlock, or what a machine found wrong while it ran."""


@dataclass(eq=False)
class Running:
    """A launch of one rank that has started and not ended. `seen`: what its reads found; `sms`:
    SMs that its CTAs hold."""

    rank: int
    step: int
    position: int
    launch: ScheduledLaunch
    program: tuple[Action, ...]
    done: int = 0
    stores: list[Store] = field(default_factory=list[Store])
    polls: list[Action] = field(default_factory=list[Action])
    triggered: bool = False
    sms: int = 0
    seen: dict[str, object] = field(default_factory=dict[str, object])


class Machine(Protocol):
    """What the events act on."""

    def begin(self, rank: int, step: int) -> None:
        """A rank starts a step."""
        ...

    def missing(self, run: Running, action: Action) -> list[int]:
        """The ranks whose words a poll still waits for."""
        ...

    def act(self, run: Running, action: Action) -> list[Store]:
        """Read, write, publish, poll or re-arm; returns the stores that may become visible later.

        Raises OrderFailure.
        """
        ...

    def poll_again(self, run: Running, action: Action) -> None:
        """Another block of the launch polls the same use: OrderFailure if it sees other words."""
        ...

    def close(self, run: Running) -> None:
        """A launch ends, and with it a block that reads as late as can be: OrderFailure if it sees
        other bytes than the launch has read."""
        ...

    def finish(self, rank: int, step: int) -> None:
        """A rank has completed a step: OrderFailure when its outputs are wrong."""
        ...


class CompiledSchedule:
    """A schedule with its edges as positions, and without the actions that order and move nothing.

    Reads of weights and of host values go: no launch writes them. Raises InputError for an edge
    from a launch that is not there.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        launches = schedule.launches
        at = {launch.name: i for i, launch in enumerate(launches)}
        written = {a.target for x in launches for a in x.program if a.kind == "write"}
        self.programs = [tuple(a for a in x.program if _moves(a, written)) for x in launches]
        self.needs = [len(launch.after) for launch in launches]
        self.trigger = [_trigger_of(launch) for launch in launches]
        self.last_main = max((i for i, x in enumerate(launches) if x.stream == "main"), default=-1)
        self.streams = sorted({launch.stream for launch in launches} - {"main"})
        self.sms = [-(-launch.grid // launch.ctas_per_sm) for launch in launches]
        known = schedule.target and any(self.sms)
        self.sm_count = get_target(schedule.target).sm_count if known else 0
        self.waits_for: list[list[int]] = [[] for _ in launches]
        self.on_trigger: list[list[int]] = [[] for _ in launches]
        self.on_end: list[list[int]] = [[] for _ in launches]
        for i, launch in enumerate(launches):
            for edge in launch.after:
                if edge.source not in at:
                    raise InputError(f"@{launch.name} follows @{edge.source}, which is not there")
                source = at[edge.source]
                (self.on_trigger if edge.kind == "pdl" else self.on_end)[source].append(i)
                if edge.kind == "pdl":
                    self.waits_for[i].append(source)


def _trigger_of(launch: ScheduledLaunch) -> str:
    """Where the next launch may start: at its "start", "inside" it, or at its "end"."""
    kinds = [action.kind for action in launch.program]
    if "trigger" not in kinds:
        return "start"
    return "end" if kinds.index("trigger") == len(kinds) - 1 else "inside"


def _moves(action: Action, written: set[str]) -> bool:
    if action.kind in ("fence", "check"):
        return False
    return not (
        action.kind == "read"
        and action.access in ("weight", "host")
        and action.target not in written
    )


@dataclass(eq=False)
class _Clock:
    """Where one rank is."""

    rank: int
    step: int = -1
    needs: list[int] = field(default_factory=list[int])
    ended: list[bool] = field(default_factory=list[bool])
    ready: list[int] = field(default_factory=list[int])
    running: list[Running] = field(default_factory=list[Running])
    parked: dict[int, list[Running]] = field(default_factory=dict[int, "list[Running]"])
    """Launches at their wait, by the position of the launch that they wait for."""
    left: int = 0
    free_sms: int = 0

    @property
    def resident(self) -> list[Running]:
        """All launches that have started and not ended."""
        return [*self.running, *(run for runs in self.parked.values() for run in runs)]


_Event = tuple[float, Callable[[], None]]


class RandomOrder:
    """One order of `steps` steps on `ranks` ranks, drawn with `seed`, carried out by `run`."""

    def __init__(
        self, compiled: CompiledSchedule, machine: Machine, ranks: int, steps: int, seed: int
    ) -> None:
        self._compiled, self._machine, self._steps = compiled, machine, steps
        self._random = random.Random(seed)
        self._clocks = [_Clock(rank) for rank in range(ranks)]
        self._barriers: dict[tuple[int, str, int], set[int]] = {}
        draw = self._random
        self._uniform = draw.random() < 0.2
        self._start_bias = draw.choice((0.0, 0.0, 10.0))
        self._store_bias = draw.choice((0.0, -10.0, -10.0))
        self._late_bias = draw.choice((0.0, -10.0))
        self._rank_bias = [0.0] * ranks
        self._favour_late = draw.choice((0.0, 0.0, 2.0))  # launches that come later in the list
        self._change = draw.choice((0.0, 0.01, 0.1))
        self._burst = draw.choice((0.0, 0.7, 0.95))
        self._stream_bias = {s: draw.choice((0.0, 0.0, -20.0, 5.0)) for s in compiled.streams}
        self._priority: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Carry out the order. Raises OrderFailure for a deadlock or what the machine found."""
        for clock in self._clocks:
            self._begin(clock)
        while True:
            events = [event for clock in self._clocks for event in self._events(clock)]
            if not events:
                break
            chosen = self._random.choice(events) if self._uniform else max(events, key=_first)
            chosen[1]()
        if any(clock.step < self._steps for clock in self._clocks):
            raise OrderFailure(f"deadlock: {self._stuck()}")

    def _begin(self, clock: _Clock) -> None:
        clock.step += 1
        if clock.step == self._steps:
            return
        draw = self._random
        count = len(self._compiled.programs)
        clock.needs, clock.ended = list(self._compiled.needs), [False] * count
        clock.ready = [i for i, needs in enumerate(clock.needs) if needs == 0]
        clock.left = count
        clock.free_sms = self._compiled.sm_count
        self._rank_bias[clock.rank] = draw.choice((0.0, 0.0, -3.0, 3.0))
        for i in range(count):
            late = self._favour_late * i / count
            late += self._stream_bias.get(self._compiled.schedule.launches[i].stream, 0.0)
            self._priority[clock.rank, i] = draw.random() + late + self._rank_bias[clock.rank]
        self._machine.begin(clock.rank, clock.step)

    def _events(self, clock: _Clock) -> list[_Event]:
        found: list[_Event] = []
        for position in clock.ready:
            priority = self._priority[clock.rank, position] + self._start_bias
            found.append((priority, lambda p=position: self._start(clock, p)))
        for run in clock.running:
            priority = self._priority[clock.rank, run.position]
            if run.done < len(run.program) and self._enabled(clock, run):
                found.append((priority, lambda r=run: self._go_on(clock, r)))
            if run.stores:
                bias = priority + self._store_bias
                found.append((bias, lambda r=run: self._make_visible(clock, r)))
            if run.polls and not self._machine.missing(run, run.polls[0]):
                bias = priority + self._late_bias
                found.append((bias, lambda r=run: self._poll_again(clock, r)))
            if _over(run):
                bias = priority + self._late_bias
                found.append((bias, lambda r=run: self._end(clock, r)))
        return found

    def _enabled(self, clock: _Clock, run: Running) -> bool:
        action = run.program[run.done]
        if run.launch.spins and run.sms < self._compiled.sms[run.position]:
            return False  # its resident CTAs wait for those that find no SM
        if action.kind == "wait":
            return all(clock.ended[i] for i in self._compiled.waits_for[run.position])
        if action.kind == "poll":
            return not self._machine.missing(run, action)
        if action.kind == "rearm":  # before a barrier, once all blocks have read
            return not run.polls or all(a.kind != "barrier" for a in run.program[run.done :])
        if action.kind == "barrier":
            arrived = self._barriers.setdefault((run.step, run.launch.name, run.done), set())
            if not run.stores and not run.polls:
                arrived.add(run.rank)
            return len(arrived) == len(self._clocks)
        return True

    def _start(self, clock: _Clock, position: int) -> None:
        clock.ready.remove(position)
        launch = self._compiled.schedule.launches[position]
        program = self._compiled.programs[position]
        run = Running(clock.rank, clock.step, position, launch, program)
        clock.running.append(run)
        self._share_sms(clock)
        if self._compiled.trigger[position] == "start":
            self._trigger(clock, run)
        self._settle(clock, run)

    def _share_sms(self, clock: _Clock) -> None:
        """Free SMs go to CTAs of any launches that have started, in any mixture."""
        if not clock.free_sms:
            return
        needs = self._compiled.sms
        while clock.free_sms:
            hungry = [run for run in clock.resident if run.sms < needs[run.position]]
            if not hungry:
                return
            run = self._random.choice(hungry)
            most = min(needs[run.position] - run.sms, clock.free_sms)
            given = most if self._random.random() < 0.25 else self._random.randint(1, most)
            run.sms += given
            clock.free_sms -= given

    def _go_on(self, clock: _Clock, run: Running) -> None:
        """At least one action of a launch, and perhaps the next ones too."""
        draw = self._random
        while True:
            action = run.program[run.done]
            run.done += 1
            if action.kind == "trigger":
                if self._compiled.trigger[run.position] == "inside":
                    self._trigger(clock, run)
            elif action.kind not in ("wait", "barrier"):
                run.stores += self._machine.act(run, action)
                if action.kind == "poll":
                    run.polls.append(action)
            if run.done == len(run.program) or not self._enabled(clock, run):
                break
            if draw.random() >= self._burst:
                break
        if self._change and draw.random() < self._change:
            self._priority[clock.rank, run.position] = draw.uniform(-1.0, 1.0)
        self._settle(clock, run)

    def _make_visible(self, clock: _Clock, run: Running) -> None:
        run.stores.pop(self._random.randrange(len(run.stores)))()
        self._settle(clock, run)

    def _poll_again(self, clock: _Clock, run: Running) -> None:
        self._machine.poll_again(run, run.polls.pop(0))
        self._settle(clock, run)

    def _trigger(self, clock: _Clock, run: Running) -> None:
        if not run.triggered:
            run.triggered = True
            self._release(clock, self._compiled.on_trigger[run.position])

    def _release(self, clock: _Clock, positions: list[int]) -> None:
        for position in positions:
            clock.needs[position] -= 1
            if clock.needs[position] == 0:
                clock.ready.append(position)

    def _settle(self, clock: _Clock, run: Running) -> None:
        """End a launch that is over and has read nothing (any other ends by an event of its own);
        park one that has to wait."""
        if _over(run):
            if not run.seen:
                self._end(clock, run)
            return
        if run.stores or run.polls or run.program[run.done].kind != "wait":
            return
        for source in self._compiled.waits_for[run.position]:
            if not clock.ended[source]:
                clock.running.remove(run)
                clock.parked.setdefault(source, []).append(run)
                return

    def _end(self, clock: _Clock, run: Running) -> None:
        self._machine.close(run)
        clock.running.remove(run)
        clock.ended[run.position] = True
        clock.free_sms += run.sms
        self._share_sms(clock)
        for waiting in clock.parked.pop(run.position, []):
            clock.running.append(waiting)
            self._settle(clock, waiting)
        clock.left -= 1
        if run.position == self._compiled.last_main:
            self._joined(clock)
        self._trigger(clock, run)
        self._release(clock, self._compiled.on_end[run.position])
        if clock.left == 0:
            self._machine.finish(clock.rank, clock.step)
            self._begin(clock)

    def _joined(self, clock: _Clock) -> None:
        """The main stream has ended: a side stream that goes on was never waited for."""
        for ended, launch in zip(clock.ended, self._compiled.schedule.launches, strict=True):
            if not ended and launch.stream != "main":
                raise OrderFailure(
                    f"step {clock.step} rank {clock.rank}: the main stream has ended and "
                    f"@{launch.name} on stream {launch.stream} has not"
                )

    def _stuck(self) -> str:
        """What every rank waits for."""
        found: list[str] = []
        for clock in self._clocks:
            where = f"step {clock.step} rank {clock.rank}"
            for run in clock.running:
                if run.launch.spins and run.sms < self._compiled.sms[run.position]:
                    found.append(
                        f"{where} @{run.launch.name}: spins on {run.sms} SMs, its grid needs "
                        f"{self._compiled.sms[run.position]}"
                    )
                    continue
                waiting = [*run.polls, *run.program[run.done : run.done + 1]]
                for action in waiting:
                    what = f"{action.kind} {action.target}".strip()
                    if action.kind == "poll":
                        senders = ", ".join(map(str, self._machine.missing(run, action)))
                        what += f" use {action.use} (no words from rank {senders})"
                    if action.kind != "wait":
                        found.append(f"{where} @{run.launch.name}: {what}")
            if not clock.running and not clock.parked and clock.step < self._steps:
                found.append(f"{where}: no launch may start")
        return "; ".join(found) or "every launch waits for another"


def _over(run: Running) -> bool:
    return run.done == len(run.program) and not run.stores and not run.polls


def _first(event: _Event) -> float:
    return event[0]
