"""Launches go on their streams in the plan's order, behind the events that they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3fuse.runtime.gpu.step import BoundLaunch, BoundStep

Log = list[tuple[str, ...]]


class Stream:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log, self.cuda_stream = name, log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(("wait", self.name, event.after))


class Launched:
    """A launch that notes its stream, and fails if it is told to."""

    def __init__(self, name: str, log: Log, error: Exception | None = None) -> None:
        self.name, self.log, self.error = name, log, error

    def __call__(self, stream: str) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(("launch", stream, self.name))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found: Log = []

    class Event:
        after = ""

        def record(self, stream: Stream) -> None:
            self.after = found[-1][2] if found else "start"
            found.append(("record", stream.name, self.after))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def step(log: Log, *, broken: Exception | None = None) -> BoundStep:
    def launch(name: str, stream: str, *events: str, error: Exception | None = None) -> BoundLaunch:
        made: Any = Launched(name, log, error)
        return BoundLaunch(name, stream, events, made)

    streams: Any = {name: Stream(name, log) for name in ("main", "aux", "prefetch")}
    launches = [
        launch("a", "main"),
        launch("side", "aux", "a"),
        launch("b", "main", error=broken),
        launch("c", "main", "side"),
    ]
    return BoundStep(launches, streams)


def test_order_and_events(log: Log) -> None:
    made = step(log)
    made.begin()
    for position in range(4):
        made.put(position)
    assert log == [
        ("record", "main", "start"),
        ("wait", "aux", "start"),  # of the streams that the step uses
        ("launch", "main", "a"),
        ("record", "main", "a"),  # awaited by the side stream
        ("wait", "aux", "a"),
        ("launch", "aux", "side"),
        ("record", "aux", "side"),
        ("launch", "main", "b"),  # nobody waits for it
        ("wait", "main", "side"),
        ("launch", "main", "c"),
    ]


def test_a_broken_capture_ends_and_keeps_its_reason(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    class Graph:
        def capture_begin(self, *, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"

        def capture_end(self) -> None:
            ends.append("end")
            raise RuntimeError("the capture was invalidated")

    class Current:
        def __init__(self, stream: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    with pytest.raises(ValueError, match="cannot launch"):
        step(log, broken=ValueError("cannot launch")).capture()
    assert ends == ["end"]
