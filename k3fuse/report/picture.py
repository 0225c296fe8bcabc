"""The launch schedule of one layer as data for an SVG: a lane a stream, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3fuse.report.summary import STREAMS, LaunchRow
from k3fuse.report.units import human_bytes, human_us
from k3fuse.schedule.edges import parse_edge

_LEFT = 76  # room for lane names
_LANE = 58
_BOX = 40
_TOP = 12
_MIN_BOX = 26.0  # a box of the main stream holds at least its number
_WIDTH = (1200.0, 4000.0)  # least and most, in pixels
_CHARACTER = 6.4  # of the label font, in pixels


@dataclass(frozen=True)
class Box:
    """A launch: position and size in pixels, label lines that fit, and the full story."""

    x: float
    y: float
    width: float
    height: float
    label: str
    time: str  # empty when it does not fit
    number: int
    bound: str
    title: str


@dataclass(frozen=True)
class Arrow:
    """An edge between streams, as an SVG path."""

    path: str
    title: str


@dataclass(frozen=True)
class Picture:
    """All of an SVG's parts; ticks are (x, label) and lanes (y, stream)."""

    width: float
    height: float
    axis_y: float
    lanes: tuple[tuple[float, str], ...]
    ticks: tuple[tuple[float, str], ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def draw(rows: Sequence[LaunchRow], layer: int) -> Picture:
    """Draw a layer out of all launches of a step: its main stream, and what runs beside it.

    A side stream may run ahead: a launch that serves a layer can lie many layers before it, and is
    drawn where it runs. The scale is one for the whole picture: the shortest launch of the main
    stream holds its number, unless the picture would grow past what scrolls well.
    """
    rows = _beside(rows, layer)
    prefix = f"layers.{layer}."
    streams = [s for s in STREAMS if any(row.stream == s for row in rows)]
    begin = min(row.start_us for row in rows if row.stream == streams[0])
    end = max(row.start_us + row.predicted_us for row in rows)
    scale = _scale(rows, max(end - begin, 1e-3))
    boxes: dict[str, Box] = {}
    for row in rows:
        y = _TOP + _LANE * streams.index(row.stream)
        start = max(row.start_us, begin)
        width = max((row.start_us + row.predicted_us - start) * scale, 2.0)
        boxes[row.name] = _box(row, _LEFT + (start - begin) * scale, y, width, prefix)
    axis_y = _TOP + _LANE * len(streams)
    return Picture(
        width=round(_LEFT + (end - begin) * scale + 24),
        height=axis_y + 26,
        axis_y=axis_y,
        lanes=tuple((_TOP + _LANE * i + _BOX / 2, s) for i, s in enumerate(streams)),
        ticks=tuple(_ticks(end - begin, scale)),
        boxes=tuple(boxes.values()),
        arrows=tuple(_arrows(rows, boxes)),
    )


def _beside(rows: Sequence[LaunchRow], layer: int) -> list[LaunchRow]:
    """The layer's launches on the main stream, and those of other streams that run meanwhile."""
    main = [row for row in rows if row.layer == layer and row.stream == "main"]
    if not main:
        return [row for row in rows if row.layer == layer]
    begin, end = main[0].start_us, main[-1].start_us + main[-1].predicted_us
    ids = {row.number for row in main}
    return [
        row
        for row in rows
        if row.number in ids
        or (
            row.stream != "main" and row.start_us <= end and row.start_us + row.predicted_us > begin
        )
    ]


def _scale(rows: Sequence[LaunchRow], duration: float) -> float:
    shortest = min((r.predicted_us for r in rows if r.stream == "main"), default=0.0)
    least, most = _WIDTH
    wanted = max(least / duration, _MIN_BOX / shortest if shortest > 0 else 0.0)
    return min(wanted, most / duration)


def _box(row: LaunchRow, x: float, y: float, width: float, prefix: str) -> Box:
    room = int((width - 6) / _CHARACTER)
    name = row.name.removeprefix(prefix)
    labels = (name, name.rpartition(".")[2], str(row.number))
    fitting = [label for label in labels if len(label) <= room]
    time = human_us(row.predicted_us)
    title = "\n".join(
        [
            f"#{row.number} {row.name} ({row.stream})",
            f"{time}, bound by {row.bound}",
            f"weights {human_bytes(row.weight_bytes)}, state {human_bytes(row.state_bytes)}, "
            f"activations {human_bytes(row.activation_bytes)}",
            f"ops: {', '.join(row.ops)}",
            f"after: {', '.join(row.after) or 'nothing'}",
        ]
    )
    return Box(
        round(x, 1),
        y,
        round(width, 1),
        _BOX,
        fitting[0] if fitting else "",
        time if fitting and len(time) <= room else "",
        row.number,
        row.bound,
        title,
    )


def _ticks(duration: float, scale: float) -> list[tuple[float, str]]:
    """At most 12 round steps; labels count from the start of the picture."""
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e9) if duration / s <= 12)
    return [
        (round(_LEFT + i * step * scale, 1), f"{i * step:g}")
        for i in range(int(duration / step) + 1)
    ]


def _arrows(rows: Sequence[LaunchRow], boxes: dict[str, Box]) -> list[Arrow]:
    stream = {row.name: row.stream for row in rows}
    arrows: list[Arrow] = []
    for row in rows:
        for edge in map(parse_edge, row.after):
            if edge.source in boxes and stream[edge.source] != row.stream:
                path = _curve(boxes[edge.source], boxes[row.name])
                arrows.append(Arrow(path, f"{edge.kind}: {edge.source} before {row.name}"))
    return arrows


def _curve(source: Box, to: Box) -> str:
    """From the end of one box to the start of the other, along the lanes' near sides."""
    down = to.y > source.y
    x1, y1 = source.x + source.width, source.y + (source.height if down else 0)
    x2, y2 = to.x + min(4.0, to.width / 2), to.y + (0 if down else to.height)
    middle = (y1 + y2) / 2
    return f"M{x1 - 1:.1f} {y1:g} C{x1:.1f} {middle:g} {x2:.1f} {middle:g} {x2:.1f} {y2:g}"
