"""The states of a mailbox protocol and the moves between them: what `protocol` explores.

A rank runs launches one after the other; all stores of a launch are visible before the next one
goes on, and within a launch they become visible in any order. Two blocks of a launch read each use
by themselves: the first also publishes and re-arms, the second may lag. A block's polls of all
senders' words count as one event at the last of them, which loses nothing: a word that is read
late can be wiped or overwritten until then, and a wrong word that it could have read early is
reported the moment it is there. States are kept relative to the slowest rank's turn, so that the
finite graph of states covers every number of uses and replays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from k3fuse.errors import VerifyError

Verdict = Literal["ACCEPT", "REJECT", "NOT PROVEN"]
FindingKind = Literal["", "deadlock", "lost value", "stale value", "overwrite", "sentinel"]

MAX_USES = 70
"""Uses of a ring in one turn that words can tell apart."""


@dataclass(frozen=True)
class Ring:
    """A ring of stages in every rank; each stage has one word a sender.

    The reader of use g empties the stage of use g + rearm. rearm 0: nobody does, and words carry
    the number of their use instead of being told from an empty pattern.
    """

    name: str = field(compare=False)
    stages: int
    rearm: int
    payload_excludes_sentinel: bool = True


@dataclass(frozen=True)
class Op:
    """What a launch does with a ring (by index) and a use of it, counted within one turn.

    A barrier lets no rank pass before the blocks of all have come to it with all stores done.
    """

    kind: Literal["publish", "poll", "rearm", "barrier"]
    ring: int = 0
    use: int = 0


@dataclass(frozen=True)
class Protocol:
    """The launches of one turn, which every rank repeats for ever; `uses` of each ring a turn."""

    name: str = field(compare=False)
    ranks: int
    rings: tuple[Ring, ...]
    launches: tuple[tuple[Op, ...], ...]
    uses: int = 1


_EMPTY = 0
_BIAS = 100
"""Value of a word: 0 empty, else its use relative to the slowest rank's turn, plus this."""

_Store = tuple[int, int]
"""(word, value) that a launch has stored and that is not visible yet; value 0 is a re-arm."""

_Rank = tuple[int, int, int, int, tuple[_Store, ...]]
"""(turn, launch, ops done by the first block, polls done by the second, invisible stores)."""

_State = tuple[tuple[_Rank, ...], bytes]

_Label = tuple[str, int, int, int, int, int]
"""(event, rank, ring, use relative to the slowest turn, other rank, stage)."""


@dataclass(frozen=True)
class Found:
    """The end of an exploration."""

    verdict: Verdict
    kind: FindingKind = ""
    reason: str = ""
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Bad:
    kind: FindingKind
    label: _Label
    reason: str  # with {use}, {other}, {seen} to fill in
    seen: int = 0


@dataclass
class Explorer:
    """One exploration. `parents` has each state that was reached, with the move that led to it.

    `reduce`: a publish into an empty word that nobody is about to re-arm is made at once. That
    hides no fault: whatever could happen before it commutes with it, but for a re-arm of the word,
    which is then a fault. Only the shortest counter-example may be longer.
    """

    protocol: Protocol
    reduce: bool = True
    parents: dict[_State, tuple[_State, _Label, int] | None] = field(
        default_factory=dict["_State", "tuple[_State, _Label, int] | None"]
    )

    def __post_init__(self) -> None:
        p = self.protocol
        self.n = p.ranks
        sizes = [self.n * ring.stages * self.n for ring in p.rings]
        self.first = [sum(sizes[:q]) for q in range(len(sizes))]
        # where[word] = (ring, receiver, stage, sender)
        self.where = [
            (q, d, stage, s)
            for q, ring in enumerate(p.rings)
            for d in range(self.n)
            for stage in range(ring.stages)
            for s in range(self.n)
        ]
        self.polls = [[i for i, op in enumerate(ops) if op.kind == "poll"] for ops in p.launches]
        if p.uses > MAX_USES:
            raise VerifyError(
                f"{p.name}: {p.uses} uses before the launches repeat, at most {MAX_USES} can be "
                "told apart"
            )
        # to_read[l][c][q]: bit u is set when use u of ring q is polled in launch l, after its first
        # c polls, or in a later launch of the turn
        self.to_read: list[list[list[int]]] = []
        bits = [0] * len(p.rings)
        for ops, polls in zip(reversed(p.launches), reversed(self.polls), strict=True):
            rows = [list(bits)]
            for i in reversed(polls):
                bits[ops[i].ring] |= 1 << ops[i].use
                rows.append(list(bits))
            self.to_read.append(rows[::-1])
        self.to_read.reverse()
        # passed[l][i]: barriers in a turn before op i of launch l
        self.passed: list[list[int]] = []
        barriers = 0
        for ops in p.launches:
            row = [barriers]
            for op in ops:
                barriers += op.kind == "barrier"
                row.append(barriers)
            self.passed.append(row)
        self.barriers = barriers

    def explore(self, limit: int) -> Found:
        start = self._start()
        self.parents[start] = None
        queue = deque([start])
        while queue:
            state = queue.popleft()
            moved = False
            for label, outcome in self._moves(state):
                moved = True
                if isinstance(outcome, _Bad):
                    return self._rejected(state, outcome)
                after, shift = self._normal(outcome)
                if after not in self.parents:
                    self.parents[after] = (state, label, shift)
                    queue.append(after)
            if not moved:
                return self._deadlock(state)
            if len(self.parents) > limit:
                reason = f"more than {limit} states: try fewer ranks or stages"
                return Found("NOT PROVEN", reason=reason)
        return Found("ACCEPT")

    def _start(self) -> _State:
        ranks = tuple(self._advance((0, 0, 0, 0, ()), r) for r in range(self.n))
        return ranks, bytes(len(self.where))

    def _word(self, ring: int, receiver: int, use: int, sender: int) -> int:
        stages = self.protocol.rings[ring].stages
        return self.first[ring] + (receiver * stages + use % stages) * self.n + sender

    def _advance(self, rank: _Rank, r: int) -> _Rank:
        """Do all that is nobody else's business: issue stores, go to the next launch."""
        turn, launch, done, lag, stores = rank
        while True:
            ops = self.protocol.launches[launch]
            if done == len(ops):
                if lag < len(self.polls[launch]) or stores:
                    return turn, launch, done, lag, stores
                launch, done, lag = launch + 1, 0, 0
                if launch == len(self.protocol.launches):
                    turn, launch = turn + 1, 0
                continue
            op = ops[done]
            use = turn * self.protocol.uses + op.use
            if op.kind == "publish":
                new = [(self._word(op.ring, d, use, r), use + _BIAS) for d in range(self.n)]
            elif op.kind == "rearm" and not self._awaits_blocks(launch, done, lag):
                to = use + self.protocol.rings[op.ring].rearm
                new = [(self._word(op.ring, r, to, s), _EMPTY) for s in range(self.n)]
            else:
                return turn, launch, done, lag, stores
            stores = tuple(sorted((*stores, *new)))
            done += 1

    def _awaits_blocks(self, launch: int, done: int, lag: int) -> bool:
        """A launch that ends in a barrier has all its blocks read before it re-arms."""
        ops = self.protocol.launches[launch]
        behind = any(i < done for i in self.polls[launch][lag:])
        return behind and any(op.kind == "barrier" for op in ops[done:])

    def _unread(self, rank: _Rank, ring: int, use: int) -> bool:
        """Whether a block of a rank has still to read a use."""
        turn, launch, done, lag, _ = rank
        use -= turn * self.protocol.uses
        if not 0 <= use < self.protocol.uses:
            return use >= 0
        leader = sum(i < done for i in self.polls[launch])
        return bool(self.to_read[launch][min(leader, lag)][ring] >> use & 1)

    def _moves(self, state: _State) -> list[tuple[_Label, _State | _Bad]]:
        ranks, memory = state
        if self.reduce and (safe := self._safe_publish(state)) is not None:
            return [self._store(state, *safe)]
        found: list[tuple[_Label, _State | _Bad]] = []
        for r, rank in enumerate(ranks):
            turn, launch, done, lag, stores = rank
            for at in range(len(stores)):
                found.append(self._store(state, r, at))
            ops, polls = self.protocol.launches[launch], self.polls[launch]
            if done < len(ops) and ops[done].kind == "poll":
                after = (turn, launch, done + 1, lag, stores)
                found += self._poll(state, r, ops[done], "first block", after)
            elif done < len(ops) and ops[done].kind == "barrier":
                mine = turn * self.barriers + self.passed[launch][done] + 1
                if all(self._arrived(other) >= mine for other in ranks):
                    label = ("barrier", r, 0, 0, 0, 0)
                    after = self._advance((turn, launch, done + 1, lag, stores), r)
                    found.append((label, (_replaced(ranks, r, after), memory)))
            if lag < len(polls) and not any(op.kind == "barrier" for op in ops[done : polls[lag]]):
                after = (turn, launch, done, lag + 1, stores)
                found += self._poll(state, r, ops[polls[lag]], "second block", after)
        return found

    def _safe_publish(self, state: _State) -> tuple[int, int] | None:
        """The rank of a store that may as well be made at once, and its place in the list."""
        ranks, memory = state
        for r, rank in enumerate(ranks):
            for at, (word, value) in enumerate(rank[4]):
                receiver = self.where[word][1]
                if value and memory[word] == _EMPTY and (word, _EMPTY) not in ranks[receiver][4]:
                    return r, at
        return None

    def _arrived(self, rank: _Rank) -> int:
        """Barriers that a rank has come to: those passed, and one that it stands at, ready."""
        turn, launch, done, lag, stores = rank
        ops = self.protocol.launches[launch]
        ready = done < len(ops) and ops[done].kind == "barrier" and not stores
        ready = ready and all(i > done for i in self.polls[launch][lag:])
        return turn * self.barriers + self.passed[launch][done] + ready

    def _store(self, state: _State, r: int, at: int) -> tuple[_Label, _State | _Bad]:
        ranks, memory = state
        turn, launch, done, lag, stores = ranks[r]
        word, value = stores[at]
        ring, receiver, stage, sender = self.where[word]
        held = memory[word]
        unread = held != _EMPTY and self._unread(ranks[receiver], ring, held - _BIAS)
        if value == _EMPTY:
            label = ("rearm", r, ring, 0, sender, stage)
            if unread:
                reason = "use {seen} from rank {other} is wiped before it is read"
                return label, _Bad("lost value", label, reason, held - _BIAS)
        else:
            label = ("publish", r, ring, value - _BIAS, receiver, stage)
            if unread:
                reason = "use {seen} is overwritten before rank {other} has read it"
                return label, _Bad("overwrite", label, reason, held - _BIAS)
            if not self.protocol.rings[ring].payload_excludes_sentinel:
                reason = "a payload may equal the empty pattern: use {use} looks as if not arrived"
                return label, _Bad("sentinel", label, reason)
        rank = self._advance((turn, launch, done, lag, stores[:at] + stores[at + 1 :]), r)
        changed = bytearray(memory)
        changed[word] = value
        return label, (_replaced(ranks, r, rank), bytes(changed))

    def _poll(
        self, state: _State, r: int, op: Op, block: str, after: _Rank
    ) -> list[tuple[_Label, _State | _Bad]]:
        ranks, memory = state
        use = ranks[r][0] * self.protocol.uses + op.use
        first = self._word(op.ring, r, use, 0)
        words = memory[first : first + self.n]
        stage = use % self.protocol.rings[op.ring].stages
        want = use + _BIAS
        if words == bytes([want]) * self.n:
            label = (block, r, op.ring, use, 0, stage)
            return [(label, (_replaced(ranks, r, self._advance(after, r)), memory))]
        if self.protocol.rings[op.ring].rearm:
            for s, held in enumerate(words):
                if held not in (want, _EMPTY):
                    label = ("stale", r, op.ring, use, s, stage)
                    reason = "use {seen} of rank {other} is taken for use {use}"
                    return [(label, _Bad("stale value", label, reason, held - _BIAS))]
        return []

    def _normal(self, state: _State) -> tuple[_State, int]:
        """The state counted from the slowest rank's turn, and by how many turns it moved."""
        ranks, memory = state
        shift = min(rank[0] for rank in ranks)
        if shift == 0:
            return state, 0
        uses = shift * self.protocol.uses
        moved = [
            self._word(q, d, stage - uses, s) for q, d, stage, s in self.where
        ]  # the stage of use g is now that of use g - uses
        new = bytearray(len(memory))
        for word, held in enumerate(memory):
            new[moved[word]] = max(held - uses, 1) if held else _EMPTY
        return (
            tuple(
                (
                    turn - shift,
                    launch,
                    done,
                    lag,
                    tuple(sorted((moved[w], v - uses if v else _EMPTY) for w, v in stores)),
                )
                for turn, launch, done, lag, stores in ranks
            ),
            bytes(new),
        ), shift

    def _path(self, state: _State) -> tuple[list[str], int]:
        """The steps from the start to a state, and the number of turns that came before it."""
        edges: list[tuple[_Label, int]] = []
        at = self.parents[state]
        while at is not None:
            previous, label, shift = at
            edges.append((label, shift))
            at = self.parents[previous]
        turns = 0
        lines: list[str] = []
        for label, shift in reversed(edges):
            lines.append(self._text(label, turns))
            turns += shift
        return lines, turns

    def _text(self, label: _Label, turns: int) -> str:
        event, r, q, use, other, stage = label
        use += turns * self.protocol.uses
        ring = self.protocol.rings[q]
        stage = (stage + turns * self.protocol.uses) % ring.stages
        of = f" of {ring.name}" if len(self.protocol.rings) > 1 else ""
        if event == "publish":
            return f"rank {r}: publish use {use}{of} -> rank {other} stage {stage}"
        if event == "rearm":
            return f"rank {r}: re-arm stage {stage}{of}, the word of rank {other}"
        if event == "barrier":
            return f"rank {r}: pass the barrier"
        if event == "stale":
            return f"rank {r}: poll use {use}{of} in stage {stage}, the word of rank {other}"
        return f"rank {r}: {event} has read use {use}{of} in stage {stage}"

    def _rejected(self, state: _State, bad: _Bad) -> Found:
        lines, turns = self._path(state)
        lines.append(self._text(bad.label, turns))
        _, r, q, use, other, _ = bad.label
        base = turns * self.protocol.uses
        use, seen = use + base, bad.seen + base
        reason = bad.reason.format(use=use, seen=seen, other=other)
        of = f" of {self.protocol.rings[q].name}" if len(self.protocol.rings) > 1 else ""
        if bad.kind == "lost value":
            lines.append(f"rank {r}: wait for ever for use {seen}{of} from rank {other}")
        elif bad.kind == "sentinel":
            lines.append(f"rank {other}: wait for ever for use {use}{of} from rank {r}")
        elif bad.kind == "stale value":
            lines.append(f"rank {r}: take the words of use {seen}{of} for those of use {use}")
        else:
            lines.append(f"rank {other}: use {seen}{of} is gone before all its blocks have read it")
        return Found("REJECT", bad.kind, reason, _numbered(lines))

    def _deadlock(self, state: _State) -> Found:
        lines, turns = self._path(state)
        for r, (turn, launch, done, lag, _) in enumerate(state[0]):
            ops = self.protocol.launches[launch]
            at = done if done < len(ops) else self.polls[launch][lag]
            what = "at the barrier"
            if ops[at].kind == "poll":
                what = f"for use {(turn + turns) * self.protocol.uses + ops[at].use}"
            lines.append(f"rank {r}: wait for ever {what}")
        return Found("REJECT", "deadlock", "no rank can go on", _numbered(lines))


def _replaced(ranks: tuple[_Rank, ...], r: int, rank: _Rank) -> tuple[_Rank, ...]:
    return (*ranks[:r], rank, *ranks[r + 1 :])


def _numbered(lines: list[str]) -> tuple[str, ...]:
    return tuple(f"{i}. {line}" for i, line in enumerate(lines, start=1))
