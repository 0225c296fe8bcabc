"""One self-contained page for a bucket: no network, no server, readable in light and dark."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby

import jinja2

from k3fuse.report.contents import BucketReport
from k3fuse.report.layers import representative_layers
from k3fuse.report.picture import draw
from k3fuse.report.slides import make_slides
from k3fuse.report.summary import group_refusals, launch_rows, summarize
from k3fuse.report.units import human_bytes, human_us


def render_html(report: BucketReport) -> str:
    """The page: totals, schedule, IR by pass and launches of chosen layers, refusals, memory.

    Every text from the bundle is escaped. A few layers stand for all (`representative_layers`), so
    a full K3 stays under about 3 MB; the launch table has every layer.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("k3fuse.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=human_bytes, us=human_us, mb=_megabytes, runs=_runs)
    layers = representative_layers(report.plan)
    rows = launch_rows(report)
    pictures = {layer: draw(rows, layer) for layer in layers}
    slides = make_slides(report, layers)
    summary = summarize(report)
    usual = [layer for layer in layers if layer in summary.kinds[0].layers]
    return environment.get_template("page.html.j2").render(
        summary=summary,
        default_layer=usual[len(usual) // 2],
        layers=layers,
        pictures=pictures,
        rows=rows,
        slides=dataclasses.asdict(slides),
        passes=slides.passes,
        refusals=group_refusals(report.refusals),
    )


def _megabytes(count: int) -> str:
    """MB with digits enough to see small launches; empty for none."""
    return f"{count / 1e6:.3f}" if count else ""


def _runs(ops: Sequence[str]) -> str:
    """Ops with repeats counted: "rms_norm, 6 linear"."""
    counted = ((op, len(list(group))) for op, group in groupby(ops))
    return ", ".join(op if count == 1 else f"{count} {op}" for op, count in counted)
