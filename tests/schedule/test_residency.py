from __future__ import annotations

import pytest

from k3fuse.errors import InputError
from k3fuse.schedule.model import ScheduledLaunch
from k3fuse.schedule.proof import prove
from k3fuse.schedule.residency import Residency, largest_grid, prove_residency
from k3fuse.schedule.text import parse_schedule
from k3fuse.target import get_target


def residency(launches: str, target: str = "h200") -> Residency:
    return prove_residency(parse_schedule(f'schedule s {{target="{target}"}}\n{launches}'))


def messages(launches: str, target: str = "h200") -> list[str]:
    return [str(finding) for finding in residency(launches, target).findings]


def launch(cluster: int = 1, ctas_per_sm: int = 1) -> ScheduledLaunch:
    return ScheduledLaunch("x", "main", (), (), 1, cluster, ctas_per_sm=ctas_per_sm)


@pytest.mark.parametrize(
    ("cluster", "held", "ctas_per_sm", "target", "largest"),
    [
        (1, 0, 1, "h200", 132),
        (1, 1, 1, "h200", 131),
        (2, 1, 1, "h200", 130),
        (2, 3, 1, "b200", 142),  # each of the three takes one SM of another pair
        (2, 0, 2, "h200", 264),
        (4, 0, 1, "gb300", 152),
        (2, 148, 1, "b200", 0),
    ],
)
def test_largest_grid(cluster: int, held: int, ctas_per_sm: int, target: str, largest: int) -> None:
    assert largest_grid(launch(cluster, ctas_per_sm), held, get_target(target)) == largest


def test_pdl_neighbours_take_nothing_from_each_other() -> None:
    """A launch starts by PDL once all CTAs of the one before are there, and those will finish."""
    text = """
      launch a on main {grid=132, spins=true}
        trigger
      launch b on main after pdl:a {grid=132, spins=true}
      launch c on main after pdl:b {grid=132, spins=true}
    """
    assert messages(text) == []
    (first, *_) = messages(text.replace("after pdl:b ", ""))
    assert "co-residency: @a spins and needs 132 SMs" in first
    assert "has 0 of 132 on h200 (@c holds 132)" in first


def test_launches_that_follow_one_another_are_counted_once() -> None:
    side = """
      launch start on main {grid=1}
      launch p on prefetch after event:start {grid=4}
      launch q on prefetch after full:p {grid=6}
      launch r on aux after event:start {grid=2}
      launch spin on main after pdl:start {grid=GRID, spins=true}
      launch end on main after pdl:spin event:q event:r {grid=132}
    """
    assert messages(side.replace("GRID", "124")) == []
    (found,) = messages(side.replace("GRID", "125"))
    assert found == (
        "co-residency: @spin spins and needs 125 SMs for its grid of 125, has 124 of 132 on h200 "
        "(@q holds 6, @r holds 2): the largest grid that fits is 124"
    )


def test_a_side_stream_that_waits_for_the_spinning_launch() -> None:
    text = """
      launch spin on main {grid=132, spins=true}
      launch side on aux after event:spin {grid=132}
      launch end on main after event:side {grid=132}
    """
    assert messages(text) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("grid=1, threads=1025", "threads: @a: 1025 threads a CTA, 1024 fit"),
        ("grid=1, cluster=17", "cluster: @a: clusters of 17, 16 fit"),
        ("grid=3, cluster=2", "cluster: @a: grid 3 is not a multiple of its cluster 2"),
        ("grid=1, smem=232449", "shared memory: @a on h200: needs 227.1 KB, has 227"),
        (
            "grid=264, ctas_per_sm=2, smem=116000, spins=true",
            "shared memory: @a on h200: 2 CTAs an SM need 228.6 KB, has 228",
        ),
        (
            "grid=1, ctas_per_sm=3, threads=1024",
            "threads: @a on h200: 3 CTAs an SM need 3072 threads, has 2048",
        ),
        (
            "grid=133, spins=true",
            "co-residency: @a spins and needs 133 SMs for its grid of 133, has 132 of 132 on h200: "
            "the largest grid that fits is 132",
        ),
        (
            'grid=1, smem=300, smem_parts={"rows": 300, "scales": 40}',
            "shared memory: @a asks for 300 bytes, its parts need 340 (rows 300 + scales 40)",
        ),
    ],
)
def test_one_launch(fields: str, message: str) -> None:
    found = messages(f"launch a on main {{{fields}}}")
    assert message in found


EXCHANGES = """
  mailbox box {stages=3, rearm=2, uses=1}
  launch send on main {grid=132}
    publish box use 0
  launch read on main after pdl:send {grid=140}
    wait
    poll box use 0
  launch side on aux after event:send {grid=8}
  launch end on main after pdl:read event:side {grid=1}
"""


def test_a_launch_that_only_waits_for_peers() -> None:
    """Its CTAs may come one by one, as long as what they wait for was sent by launches before."""
    assert messages(EXCHANGES) == []
    spins = EXCHANGES.replace("{grid=140}", "{grid=140, spins=true}")
    assert "@read spins and needs 140 SMs" in messages(spins)[0]
    assert (
        messages(EXCHANGES.replace("on main after pdl:send {", "on aux after event:send {")) == []
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("after pdl:send {grid=140}", "{grid=140}"),  # nothing orders it behind the sender
        ("poll box use 0", "publish box use 0\n    poll box use 0"),  # peers wait for one another
        ("    publish box use 0\n", ""),  # nobody in this step sends it
    ],
)
def test_exchanges_out_of_turn(old: str, new: str) -> None:
    text = EXCHANGES.replace(old, new)
    if "publish box use 0\n    poll" in new:
        text = text.replace("    publish box use 0\n  launch read", "  launch read")
    assert "@read spins and needs 140 SMs" in messages(text)[0]


def test_two_ctas_an_sm() -> None:
    assert messages("launch a on main {grid=264, ctas_per_sm=2, smem=115000, spins=true}") == []
    assert "needs 264 SMs" in messages("launch a on main {grid=264, spins=true}")[0]
    two = "launch a on main {grid=1, ctas_per_sm=2, threads=1024}"
    assert messages(two) == []
    assert "2048 threads, has 1536" in messages(two, "sm_120a")[0]


def test_a_grid_larger_than_the_gpu_need_not_be_resident() -> None:
    assert messages("launch a on main {grid=4000}") == []


def test_no_kernel_yet() -> None:
    """Open, said apart, and no reason against the order."""
    schedule = parse_schedule('schedule s {target="h200"}\nlaunch a on main {spins=true}')
    proof = prove(schedule)
    assert (proof.verdict, proof.no_resources) == ("ACCEPT", ["a"])
    assert prove_residency(schedule).checked == 0


def test_a_spinning_launch_beside_one_without_a_kernel() -> None:
    text = """
      launch spin on main {grid=132, spins=true}
      launch side on aux
      launch end on main after event:side pdl:spin {grid=1}
    """
    result = residency(text)
    assert result.not_proven == ["co-residency: @spin spins beside @side, which have no grid yet"]


def test_no_target() -> None:
    schedule = parse_schedule("schedule s\nlaunch a on main {grid=1}")
    assert prove(schedule).verdict == "NOT PROVEN"
    with pytest.raises(InputError, match="known: sm_90a"):
        residency("launch a on main", "sm_130")


def test_clusters_of_four_rest_on_an_assumption() -> None:
    assert residency("launch a on main {grid=4, cluster=4, spins=true}").assumptions
    assert not residency("launch a on main {grid=4, cluster=2, spins=true}").assumptions
