"""When each launch is predicted to run, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from k3fuse.runtime.plan import Launch
from k3fuse.schedule.edges import parse_edge
from k3fuse.target import Target

Bound = Literal["memory", "edge", "exchange"]


@dataclass(frozen=True)
class Span:
    """Predicted start and end of a launch, in microseconds from the start of the step."""

    start: float
    end: float


def timeline(launches: Iterable[Launch]) -> dict[str, Span]:
    """launch name -> span: after its stream's previous launch and the sources of its edges.

    Sources that are not among the launches count as done at the start.
    """
    spans: dict[str, Span] = {}
    free: dict[str, float] = {}
    for launch in launches:
        sources = [parse_edge(edge).source for edge in launch.after]
        ready = [spans[source].end for source in sources if source in spans]
        start = max([free.get(launch.stream, 0.0), *ready])
        end = start + launch.predicted_us
        spans[launch.name] = Span(start, end)
        free[launch.stream] = end
    return spans


def bound_of(launch: Launch, target: Target) -> Bound:
    """What takes most of a launch: moving bytes, starting at all, or waiting for peers.

    Of the predicted time (`lowering.cost`) an exchange takes one hop, a start the launch edge and,
    where weights or state are fetched, the cold start; the rest moves bytes.
    """
    exchange = target.hop_us if reads_mailbox(launch) else 0.0
    cold = bool(launch.weight_bytes or launch.state_bytes)
    edge = target.launch_edge_us + (target.cold_start_us if cold else 0.0)
    parts: dict[Bound, float] = {
        "memory": launch.predicted_us - exchange - edge,
        "edge": edge,
        "exchange": exchange,
    }
    return max(parts, key=lambda part: parts[part])


def reads_mailbox(launch: Launch) -> bool:
    """Whether a launch waits for what peers send."""
    return any(o.access == "mailbox" and o.mode == "read" for o in launch.operands)
