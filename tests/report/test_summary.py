from __future__ import annotations

import dataclasses

import pytest

from k3fuse.errors import InputError
from k3fuse.passes.base import Refusal
from k3fuse.report.contents import BucketReport
from k3fuse.report.layers import OUTSIDE, layer_kinds, representative_layers
from k3fuse.report.picture import draw
from k3fuse.report.summary import group_refusals, launch_rows, summarize
from k3fuse.report.timeline import bound_of, timeline
from k3fuse.report.units import human_bytes, human_us
from k3fuse.runtime.plan import Launch
from k3fuse.schedule.edges import parse_edge
from k3fuse.target import get_target


def test_kinds_follow_the_configuration(report: BucketReport) -> None:
    kinds = layer_kinds(report.plan)
    assert kinds[OUTSIDE] == "ends"
    decoder = [kinds[n] for n in range(8)]
    moe = ["KDA+MoE", "KDA+MoE", "MLA+MoE", "KDA+MoE", "KDA+MoE", "KDA+MoE", "MLA+MoE"]
    assert decoder == ["KDA+dense", *moe]


def test_representatives_are_first_last_and_one_of_each_kind(report: BucketReport) -> None:
    chosen = representative_layers(report.plan)
    assert list(chosen) == [0, 4, 7, OUTSIDE]
    assert "first" in chosen[0]
    assert "last" in chosen[7]


def test_kinds_add_up_to_the_step(report: BucketReport) -> None:
    summary = summarize(report)
    plan = report.plan
    assert sum(kind.total_bytes for kind in summary.kinds) == plan.planned_bytes
    assert sum(kind.total_us for kind in summary.kinds) == pytest.approx(plan.predicted_us)
    assert sum(summary.launches.values()) == len(plan.launches)
    assert summary.share_of_floor == pytest.approx(1.0 / plan.predicted_us)
    assert summarize(dataclasses.replace(report, floor_us=None)).share_of_floor is None


def test_time_respects_streams_and_edges(report: BucketReport) -> None:
    spans = timeline(report.plan.launches)
    free: dict[str, float] = {}
    for launch in report.plan.launches:
        span = spans[launch.name]
        assert span.end - span.start == pytest.approx(launch.predicted_us)
        assert span.start >= free.get(launch.stream, 0.0)
        for edge in launch.after:
            assert span.start >= spans[parse_edge(edge).source].end
        free[launch.stream] = span.end


def test_bounds(report: BucketReport) -> None:
    target = get_target("gb300")
    launch = report.plan.launches[0]
    quiet = [o for o in launch.operands if o.access != "mailbox"]
    idle = dataclasses.replace(
        launch, operands=tuple(quiet), weight_bytes=0, state_bytes=0, predicted_us=0.7
    )
    assert bound_of(idle, target) == "edge"
    busy = dataclasses.replace(idle, weight_bytes=10**8, predicted_us=15.0)
    assert bound_of(busy, target) == "memory"
    heard: Launch = next(x for x in report.plan.launches if bound_of(x, target) == "exchange")
    assert any(o.access == "mailbox" and o.mode == "read" for o in heard.operands)


def test_rows_of_a_layer_that_is_not_there(report: BucketReport) -> None:
    with pytest.raises(InputError, match=r"--layer 8.*0 to 7"):
        launch_rows(report, 8)


def test_boxes_of_a_lane_do_not_overlap(report: BucketReport) -> None:
    picture = draw(launch_rows(report), 3)
    assert "main" in {stream for _, stream in picture.lanes}
    lanes: dict[float, float] = {}
    for box in picture.boxes:
        assert box.x >= lanes.get(box.y, 0.0) - 0.2
        assert box.x + box.width <= picture.width
        lanes[box.y] = box.x + box.width
    assert picture.arrows
    main = [box for box in picture.boxes if "(main)" in box.title]
    assert len(main) == 8
    assert all(box.label for box in main)
    assert "mla_value" in {box.label.rpartition(".")[2] for box in main}


def test_refusals_are_grouped_over_layers() -> None:
    refusals = [
        Refusal("dce", f"model.layers.{n}.mlp/add", "kept", f"%layers.{n}.mlp.add")
        for n in range(5)
    ]
    groups = group_refusals([*refusals, Refusal("dce", "model.norm/rms_norm", "kept")])
    assert [(g.site, g.value, g.count) for g in groups] == [
        ("model.layers.*.mlp/add", "%layers.*.mlp.add", 5),
        ("model.norm/rms_norm", "", 1),
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (8.76e9, "8.76 GB"), (3.5e12, "3500.00 GB")],
)
def test_bytes_are_readable(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_times_are_readable() -> None:
    assert [human_us(t) for t in (0.74, 999.0, 3184.6)] == ["0.7 us", "999.0 us", "3.18 ms"]
