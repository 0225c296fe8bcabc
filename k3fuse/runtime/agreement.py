"""How the ranks of a tensor-parallel group, one process a GPU, start, work and end together.

Either all ranks go on, or all end with the same sentence, which names a rank and a stage; none
waits for ever. What can fail or take long on one rank belongs into a stage, and the whole into
`with group:`, so that a rank says whether it ended well.

    with Group.from_environment(tp=4) as group:
        group.agree("plan", {"plan": plan.hash(), "architecture": "sm_90a"})
        with group.stage("load weights"):
            load()
        with group.stage("decode"), group.watch():
            generate()
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from k3fuse.errors import InputError, K3FuseError, PeerFailedError
from k3fuse.runtime.board import Board
from k3fuse.runtime.rendezvous import Rendezvous

LIMIT = 30.0
"""Seconds without a sign of life after which a rank is lost, and that ranks wait in `agree`."""

_SIGNAL = signal.SIGURG  # ignored where nobody handles it, so that a late one does no harm


def end_process(report: str) -> NoReturn:
    """Write the report to stderr and end this process with exit code 1, whatever it is doing."""
    os.write(2, f"k3fuse: {report}\n".encode())
    os._exit(1)


class Group:
    """The ranks 0 to world - 1, of which this process is one."""

    def __init__(self, rank: int, world: int, board: Board | None) -> None:
        self.rank, self.world = rank, world
        self._board = board
        self._on_lost: Callable[[str], None] | None = None
        self._bodies = 0  # stages that are open
        self._interruptible = False  # the main thread runs a stage's body
        self._ended = False  # this rank has an exception already, its own or a peer's
        self._since: float | None = None  # when the verdict was first acted on

    @classmethod
    def alone(cls) -> Group:
        """A group of this process only: everything agrees and nobody gets lost."""
        return cls(0, 1, None)

    @classmethod
    def from_environment(
        cls,
        tp: int,
        *,
        limit: float = LIMIT,
        name: str = "k3fuse",
        environment: Mapping[str, str] | None = None,
    ) -> Group:
        """The group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name, as torchrun sets them.

        tp: ranks that the bundle was compiled for. limit: seconds, see LIMIT. name: keeps groups
        apart that one store serves one after the other. Raises InputError naming the variable that
        is missing or wrong, and PeerFailedError when the keeper of the store does not answer.
        """
        place = Rendezvous.from_environment(tp, environment)
        if place is None:
            return cls.alone()
        board = Board(place.rank, place.world, limit=limit, keeper=place.keeper, keeps=place.keeps)
        group = cls(place.rank, place.world, board)
        board.start(place.connect(limit), f"{name}/{place.attempt}", group._act)
        atexit.register(board.close)  # threads that are in the store when Python ends would abort
        return group

    def agree(
        self,
        stage: str,
        facts: Mapping[str, str],
        told: Mapping[str, str] | None = None,
        *,
        limit: float | None = None,
    ) -> Sequence[Mapping[str, str]]:
        """Meet the other ranks; all must bring equal facts. Returns what each told, by rank.

        limit: seconds to wait for the last rank; None: the group's. Every rank raises the same
        InputError when facts differ, with the ranks, the key and the values, and the same
        PeerFailedError when a rank fails, is lost or does not come, with its last stage.
        """
        board = self._board
        if board is None:
            return [dict(told or {})]
        self._enter(stage)
        return self._meet(stage, facts, told or {}, board.limit if limit is None else limit)

    @contextmanager
    def stage(self, name: str, *, limit: float | None = None) -> Generator[None]:
        """Work that may fail on one rank; nobody goes on before all ranks have done it.

        When a rank raises, or is lost, all others raise PeerFailedError, also out of the midst of
        the body where that is Python on the main thread. A body that has not come back `LIMIT`
        (the group's) seconds later is blocked, and ends with its process: see `end_process`.
        limit: seconds to wait at the end for the slowest rank; None: while it gives signs of life.
        """
        if self._board is None:
            yield
            return
        self._enter(name)
        try:
            with self._body():
                yield
        except BaseException as error:
            self._fail(f"in stage '{name}'", error)
            raise
        self._meet(name, {}, {}, limit)

    @contextmanager
    def watch(self, on_lost: Callable[[str], None] = end_process) -> Generator[None]:
        """While the block runs, call `on_lost` with the report as soon as a rank fails or is lost.

        For blocks that wait on the GPU, where no exception comes through. `on_lost` runs on another
        thread, once; if it raises, the process ends. A rank 0 that keeps the store lets the others
        read the report first, for the group's limit at most.
        """
        before, self._on_lost = self._on_lost, on_lost
        try:
            yield
        finally:
            self._on_lost = before

    def close(self) -> None:
        """Say that this rank has ended. Rank 0 waits for the others where it keeps the store."""
        if self._board is not None:
            self._board.close()
            atexit.unregister(self._board.close)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; PeerFailedError when all went well here and another rank failed since."""
        board = self._board
        if board is None:
            return
        if error is not None:
            self._fail("between stages", error)
        self.close()
        if error is None and board.verdict:
            raise PeerFailedError(board.verdict)

    def _fail(self, where: str, error: BaseException) -> None:
        assert self._board is not None
        self._ended = True
        text = " ".join(str(error).split())[:500]
        if not isinstance(error, K3FuseError):
            text = f"{type(error).__name__}: {text}"
        self._board.fail(f"rank {self.rank} failed {where}: {text}")

    def _enter(self, stage: str) -> None:
        assert self._board is not None
        if self._board.verdict:
            self._ended = True
            raise PeerFailedError(self._board.verdict)
        with self._uninterrupted():
            self._board.enter(stage)

    def _meet(
        self, stage: str, facts: Mapping[str, str], told: Mapping[str, str], limit: float | None
    ) -> Sequence[Mapping[str, str]]:
        board = self._board
        assert board is not None
        with self._uninterrupted():
            posts = board.meet({"stage": stage, **facts}, dict(told), limit)
        came = [post for post in posts if post is not None]
        if len(came) == self.world:
            complaint = disagreement([post.equal for post in came])
            if complaint:
                self._ended = True
                board.fail(complaint)
                raise InputError(complaint)
            return [post.told for post in came]
        late = [
            f"rank {rank} ({line.place})"
            for rank, (post, line) in enumerate(zip(posts, board.lines, strict=True))
            if post is None
        ]
        self._ended = True
        seconds = "" if limit is None else f" within {limit:g} s"
        board.fail(f"{', '.join(late)} did not get through stage '{stage}'{seconds}")
        raise PeerFailedError(board.verdict)

    @contextmanager
    def _uninterrupted(self) -> Generator[None]:
        """No exception from outside while the block may hold the board's lock."""
        before, self._interruptible = self._interruptible, False
        try:
            yield
        finally:
            self._interruptible = before

    @contextmanager
    def _body(self) -> Generator[None]:
        """Let the verdict interrupt the block, which Python allows on the main thread only."""

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if self._interruptible and not self._ended and self._board is not None:
                self._ended = True  # once: the body may clean up
                raise PeerFailedError(self._board.verdict)

        main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(_SIGNAL, interrupt) if main else None
        before, self._interruptible = self._interruptible, main
        self._bodies += 1
        try:
            yield
        finally:
            self._interruptible = before
            self._bodies -= 1
            if main:
                signal.signal(_SIGNAL, handler or signal.SIG_DFL)

    def _act(self, verdict: str) -> None:
        """What the watching thread does about a verdict; called again until the group closes."""
        try:
            self._end_here(verdict)
        except BaseException:
            end_process(
                f"{verdict}; and what was to be done then failed:\n{traceback.format_exc()}"
            )

    def _end_here(self, verdict: str) -> None:
        board = self._board
        assert board is not None
        now = time.monotonic()
        self._since = self._since or now
        on_lost = self._on_lost
        if on_lost is not None and not self._ended:
            self._on_lost = None
            board.leave()
            on_lost(verdict)
        elif self._bodies and now - self._since > board.limit:
            board.leave()
            end_process(f"{verdict}; this rank's stage was blocked and ended with its process")
        elif self._interruptible and not self._ended:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _SIGNAL)


def disagreement(brought: Sequence[Mapping[str, str]]) -> str:
    """Which facts differ, on which ranks, with the values; empty when all are equal."""
    differences: list[str] = []
    for key in dict.fromkeys(key for facts in brought for key in facts):
        ranks: dict[str, list[str]] = {}
        for rank, facts in enumerate(brought):
            ranks.setdefault(facts.get(key, "missing"), []).append(str(rank))
        if len(ranks) > 1:
            values = [f"{value} on rank {', '.join(at)}" for value, at in ranks.items()]
            differences.append(f"{key} is {' and '.join(values)}")
    if not differences:
        return ""
    return (
        f"ranks disagree in stage '{brought[0]['stage']}': {'; '.join(differences)}: start all "
        "ranks with the same bundle, options and versions, on GPUs of one kind"
    )
