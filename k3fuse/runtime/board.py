"""What the ranks of a group know of one another: a board in a store, with one line a rank.

Each rank writes its own line and reads all of them, over and over, from a thread of its own, so a
rank in a long load is heard like any other. A line counts its own writings; a peer whose count has
stood still for `limit` seconds is lost. No clocks are compared, and time in which this process
itself stood still hardly counts. A second thread never touches the store: it notices when the
store blocks, and acts on a verdict, the one sentence that ends a group. Whoever finds one writes it
into its line, and all others take it over; of several the first in the store counts, so that all
ranks end with the same words.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_QUICK = 0.03  # seconds from one reading to the next while somebody waits


@dataclass(frozen=True)
class Post:
    """What a rank brought to its `number`-th meeting: what must be equal, and what it tells."""

    number: int
    equal: dict[str, str]
    told: dict[str, str]


@dataclass(frozen=True)
class Line:
    """One rank: stage is the last that it entered, entered how many it did; left: it has ended.

    posts: the last two, since no rank is more than one meeting behind one that has gone on.
    """

    beat: int = 0  # 0: the rank has not started
    stage: str = "start"
    entered: int = 0
    posts: tuple[Post, ...] = ()
    verdict: str = ""
    left: bool = False

    @property
    def reached(self) -> int:
        """Meetings that it came to."""
        return self.posts[-1].number if self.posts else 0

    @property
    def place(self) -> str:
        """Where it was last seen, in words."""
        return f"last in stage '{self.stage}'" if self.beat else "not started"

    def post(self, number: int) -> Post | None:
        return next((post for post in self.posts if post.number == number), None)


def _read(text: bytes) -> Line:
    if not text:
        return Line()
    raw: dict[str, Any] = json.loads(text)
    raw["posts"] = tuple(Post(**post) for post in raw["posts"])
    return Line(**raw)


class Silence:
    """Seconds since a count last changed; one look adds `most` at the most."""

    def __init__(self, most: float) -> None:
        self.seconds = 0.0
        self._most, self._count, self._last = most, 0, time.monotonic()

    def look(self, count: int) -> None:
        now = time.monotonic()
        passed = min(now - self._last, self._most)
        self.seconds = self.seconds + passed if count == self._count else 0.0
        self._count, self._last = count, now


class Board:
    """The board as one rank sees it.

    limit: seconds without a sign after which a peer, or the store, is lost. keeper: who keeps the
    store, for messages ("rank 0 at host:port"). keeps: this process does, and so leaves last.
    """

    def __init__(
        self, rank: int, world: int, *, limit: float, keeper: str, keeps: bool = False
    ) -> None:
        self.rank, self.limit = rank, limit
        self.lines = [Line()] * world
        self._own, self._written = Line(), Line()
        self._keeper, self._keeps = keeper, keeps
        self._silence = [Silence(limit / 4) for _ in range(world)]
        self._changed, self._wake = threading.Condition(), threading.Event()
        self._waiting = 0
        self._closed = self._cut = self._settled = False
        self._threads: list[threading.Thread] = []

    @property
    def verdict(self) -> str:
        """Why the group cannot go on; empty while it can, and until it is settled which of several
        sentences counts, on all ranks."""
        return self._own.verdict if self._settled or self._cut else ""

    def start(self, store: Store, prefix: str, act: Callable[[str], None]) -> None:
        """Begin to write and read. `act` is called with the verdict, again and again until
        `close`, on the thread that does not touch the store."""
        for name, body in (
            ("k3fuse-board", lambda: self._talk(store, prefix)),
            ("k3fuse-watch", lambda: self._watch(act)),
        ):
            thread = threading.Thread(target=body, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def enter(self, stage: str) -> None:
        """Say that this rank begins a stage, which ends with a meeting."""
        with self._changed:
            self._change(stage=stage, entered=self._own.entered + 1)

    def meet(
        self, equal: dict[str, str], told: dict[str, str], limit: float | None
    ) -> Sequence[Post | None]:
        """Come to the next meeting, and return what each rank brought, in rank order.

        A rank that has not come within `limit` seconds (None: as long as it gives signs of life),
        or before there was a verdict, has None.
        """
        with self._changed:
            number = self._own.reached + 1
            self._change(posts=(*self._own.posts[-1:], Post(number, equal, told)))
        posts: list[Post | None] = []

        def ready() -> bool:
            posts[:] = [line.post(number) for line in self.lines]
            return self.verdict != "" or None not in posts

        self._wait_for(ready, limit)
        return posts

    def fail(self, verdict: str) -> None:
        """End the group with this sentence, unless it has one already; back when it is settled."""
        with self._changed:
            self._change(verdict=self._own.verdict or verdict)
        self._wait_for(lambda: self.verdict != "", self.limit)

    def leave(self) -> None:
        """Say that this rank ends, and wait until that is written. Who keeps the store waits until
        all others have left too, at most `limit` seconds once there is a verdict."""
        with self._changed:
            self._change(left=True)
        self._wait_for(lambda: self._cut or self._written.left, self.limit)
        if self._keeps:
            self._wait_for(lambda: self.verdict != "" or self._alone(), None)
            self._wait_for(self._alone, self.limit)

    def close(self) -> None:
        """Leave, and end the threads. Calling it again does nothing."""
        if self._closed:
            return
        self.leave()
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        self._wake.set()
        for thread in self._threads:
            thread.join(1.0)  # one that the store blocks stays behind, a daemon

    def _change(self, **changes: Any) -> None:
        self._own = replace(self._own, **changes)
        self._changed.notify_all()
        self._wake.set()

    def _wait_for(self, ready: Callable[[], bool], limit: float | None) -> None:
        with self._changed:
            self._waiting += 1
            self._wake.set()
            try:
                self._changed.wait_for(ready, limit)
            finally:
                self._waiting -= 1

    def _others(self) -> list[tuple[int, Line]]:
        return [(rank, line) for rank, line in enumerate(self.lines) if rank != self.rank]

    def _alone(self) -> bool:
        silent = self._silence
        return self._cut or all(
            line.left or silent[rank].seconds >= self.limit for rank, line in self._others()
        )

    def _talk(self, store: Store, prefix: str) -> None:
        try:
            keys = [f"{prefix}/{rank}" for rank in range(len(self.lines))]
            # Lines of ranks that are not there yet are made too, so that all can be read at once.
            if [store.compare_set(key, "", "") for key in keys][self.rank]:
                self._lose(
                    f"the store has a group named '{prefix}' already: name this one otherwise"
                )
                return
            while not self._closed:
                self._round(store, keys)
                if self._own.verdict and not self._settled:
                    self._settle(store, f"{prefix}/verdict")
                hurry = self._waiting > 0 or self._own.verdict != ""
                self._wake.wait(_QUICK if hurry else min(1.0, self.limit / 10))
                self._wake.clear()
        except RuntimeError as error:  # what torch raises when a connection breaks
            reason = (str(error).splitlines() or ["no reason given"])[0]
            self._lose(f"{self._keeper} was lost: the store is gone ({reason})")
        except Exception as error:
            self._lose(f"rank {self.rank} cannot read the board: {error!r}")

    def _lose(self, verdict: str) -> None:
        """The store is cut off, which is no fault once this rank has left: its keeper may too."""
        self._cut = True
        if not self._own.left:
            self.fail(verdict)

    def _round(self, store: Store, keys: list[str]) -> None:
        with self._changed:
            self._own = own = replace(self._own, beat=self._own.beat + 1)
        store.set(keys[self.rank], json.dumps(asdict(own)))
        lines = [_read(text) for text in store.multi_get(keys)]
        with self._changed:
            self.lines, self._written = lines, own
            for silence, line in zip(self._silence, lines, strict=True):
                silence.look(line.beat)
            if not self._own.verdict and (verdict := self._judge()):
                self._change(verdict=verdict)
            self._changed.notify_all()

    def _settle(self, store: Store, key: str) -> None:
        """The first sentence that reaches the store is that of all ranks."""
        found: str | bytes = store.compare_set(key, "", self._own.verdict)
        with self._changed:
            self._settled = True
            self._change(verdict=found if isinstance(found, str) else found.decode())

    def _judge(self) -> str:
        found: list[str] = []
        for rank, line in self._others():
            if line.verdict:
                return line.verdict
            if self._silence[rank].seconds >= self.limit and not line.left:
                found.append(
                    f"rank {rank} ({line.place}) was lost: no sign of life for {self.limit:g} s"
                )
            elif line.left and line.reached < self._own.entered:
                found.append(
                    f"rank {rank} ({line.place}) has ended, rank {self.rank} is in stage "
                    f"'{self._own.stage}'"
                )
        return "; ".join(found)

    def _watch(self, act: Callable[[str], None]) -> None:
        store = Silence(self.limit / 4)
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.verdict != "", self.limit / 10)
            if self._closed:
                return
            store.look(self._own.beat)
            if store.seconds >= self.limit and not self._cut:
                self._lose(
                    f"{self._keeper} was lost: the store has not answered for {self.limit:g} s"
                )
            if self.verdict:
                act(self.verdict)
                time.sleep(_QUICK)
