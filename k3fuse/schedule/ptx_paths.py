"""Which instructions of a PTX kernel a thread can reach, with and without passing the PDL wait.

Paths whose branches contradict each other are left out: the same condition has one outcome, and
conditions on the thread number leave a set of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3fuse.schedule.ptx import Block, Instruction, Kernel
from k3fuse.schedule.ptx_access import destinations
from k3fuse.schedule.ptx_conditions import Conditions, Expression

WAIT = "griddepcontrol.wait"
TRIGGER = "griddepcontrol.launch_dependents"
MAX_STATES = 20_000
"""States explored with what is known of conditions; beyond it, every branch may go both ways."""

Facts = frozenset[tuple[Expression, bool]]


@dataclass(frozen=True)
class _State:
    """At the top of a block: what is known, and the threads that can be here."""

    block: int
    facts: Facts
    threads: int


@dataclass
class Reached:
    """What an exploration found: instructions, each with the last branches on one path to it.

    exact: contradicting branches were left out; otherwise there were too many paths for that.
    """

    exact: bool = True
    branches: dict[Instruction, tuple[str, ...]] = field(
        default_factory=dict[Instruction, "tuple[str, ...]"]
    )

    def __contains__(self, item: Instruction) -> bool:
        return item in self.branches


def explore(kernel: Kernel, conditions: Conditions, *, pass_waits: bool) -> Reached:
    """Instructions that some thread reaches; without `pass_waits`, only before its wait."""
    found = _Walk(kernel, conditions, pass_waits, tracking=True).run()
    if found is None:
        found = _Walk(kernel, conditions, pass_waits, tracking=False).run()
        assert found is not None
        found.exact = False
    return found


class _Walk:
    def __init__(
        self, kernel: Kernel, conditions: Conditions, pass_waits: bool, *, tracking: bool
    ) -> None:
        self.kernel, self.conditions = kernel, conditions
        self.pass_waits, self.tracking = pass_waits, tracking
        self.shared = _repeated(kernel, conditions)

    def run(self) -> Reached | None:
        """All states from the entry; None when there are too many to track conditions."""
        first = _State(0, frozenset(), self.conditions.all_threads)
        paths: dict[_State, tuple[str, ...]] = {first: ()}
        pending = [first]
        reached = Reached()
        while pending:
            state = pending.pop()
            for following, branch in self._block(state, paths[state], reached):
                if following not in paths:
                    path = paths[state]
                    paths[following] = (*path, branch)[-4:] if branch else path
                    pending.append(following)
            if self.tracking and len(paths) > MAX_STATES:
                return None
        return reached

    def _block(
        self, state: _State, path: tuple[str, ...], reached: Reached
    ) -> Iterator[tuple[_State, str]]:
        block = self.kernel.blocks[state.block]
        here = state
        for item in block.instructions:
            taken = self._assume(here, item, holds=True)
            if taken is None:
                continue
            reached.branches.setdefault(item, path)
            if item.parts[0] in ("bra", "brx"):
                yield from self._branch(block, here, item, taken)
                return
            leaves = item.parts[0] in ("ret", "exit", "trap")
            if leaves or (item.opcode == WAIT and not self.pass_waits):
                past = self._assume(here, item, holds=False)
                if past is None:
                    return
                here = past
            else:
                here = self._forget(here, item)
        for successor in block.successors:
            yield _State(successor, here.facts, here.threads), ""

    def _branch(
        self, block: Block, here: _State, item: Instruction, taken: _State
    ) -> Iterator[tuple[_State, str]]:
        if block.taken < 0:
            for successor in block.successors:
                yield _State(successor, taken.facts, taken.threads), ""
            if not item.guard:
                return
        else:
            branch = f"line {item.line} taken"
            yield _State(block.taken, taken.facts, taken.threads), branch
        past = self._assume(here, item, holds=False)
        if past is not None:
            branch = f"line {item.line} not taken"
            yield _State(block.successors[-1], past.facts, past.threads), branch

    def _assume(self, here: _State, item: Instruction, *, holds: bool) -> _State | None:
        """The state in which the instruction's guard holds (or not); None when it cannot."""
        if not item.guard:
            return here if holds else None
        condition = self.conditions.of(item.guard)
        truth = holds != item.negated
        value = truth != condition.negated  # of the key
        threads, facts = here.threads, here.facts
        mask = self.conditions.threads(condition)
        if mask is not None:
            chosen = threads & (mask if truth else ~mask)
            return (
                _State(here.block, facts, chosen if self.tracking else threads) if chosen else None
            )
        if (condition.key, not value) in facts:
            return None
        if self.tracking and condition.key in self.shared:
            facts = facts | {(condition.key, value)}
        return _State(here.block, facts, threads)

    def _forget(self, here: _State, item: Instruction) -> _State:
        """Drop what was known of predicates that the instruction writes."""
        if not here.facts:
            return here
        dead = {("register", name) for name in destinations(item)}
        facts = frozenset(fact for fact in here.facts if fact[0] not in dead)
        return _State(here.block, facts, here.threads) if facts != here.facts else here


def _repeated(kernel: Kernel, conditions: Conditions) -> set[Expression]:
    """Conditions that guard more than one instruction: only these relate branches."""
    seen: set[Expression] = set()
    twice: set[Expression] = set()
    for item in kernel.instructions():
        if item.guard:
            key = conditions.of(item.guard).key
            (twice if key in seen else seen).add(key)
    return twice


@dataclass(frozen=True)
class Loop:
    """A natural loop: its blocks, and the guards of branches that leave it."""

    blocks: frozenset[int]
    exits: tuple[Instruction, ...]


def loops(kernel: Kernel) -> list[Loop]:
    """Natural loops, those with the same header joined (Aho et al., Compilers, 9.6)."""
    blocks = kernel.blocks
    before: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for successor in block.successors:
            before[successor].append(block.index)
    dominators = _dominators(blocks, before)
    bodies: dict[int, set[int]] = {}
    for block in blocks:
        for header in block.successors:
            if dominators[block.index] >> header & 1:
                body = bodies.setdefault(header, {header})
                pending = [block.index]
                while pending:
                    index = pending.pop()
                    if index not in body:
                        body.add(index)
                        pending += before[index]
    return [Loop(frozenset(body), tuple(_exits(blocks, body))) for body in bodies.values()]


def _exits(blocks: tuple[Block, ...], body: set[int]) -> Iterator[Instruction]:
    for index in sorted(body):
        block = blocks[index]
        leaves = any(successor not in body for successor in block.successors)
        if leaves and block.instructions and block.instructions[-1].guard:
            yield block.instructions[-1]


def _dominators(blocks: tuple[Block, ...], before: list[list[int]]) -> list[int]:
    """Bit sets: the blocks on every path from the entry. Unreachable blocks keep all bits."""
    every = (1 << len(blocks)) - 1
    result = [every] * len(blocks)
    result[0] = 1
    changed = True
    while changed:
        changed = False
        for block in blocks[1:]:
            common = every
            for index in before[block.index]:
                common &= result[index]
            common |= 1 << block.index
            if before[block.index] and common != result[block.index]:
                result[block.index] = common
                changed = True
    return result
