"""`k3fuse prove`: schedules as text, plans and bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import call, call_ok, refused

EXAMPLES = Path(__file__).parents[2] / "examples/schedules"
WRONG = {
    "early_read": "read before wait: @norm reads residual above its wait",
    "stage_wiped": "mailbox re-arm: step 0 rank 0 @reduce: rearm partial use 0 may run after",
    "unjoined_prefetch": "unjoined: prefetch on stream prefetch",
}
ONE = "schedule one {ranks=1}\n  launch a on main\n    read weight w\n"


def test_a_safe_schedule() -> None:
    out = call_ok("prove", EXAMPLES / "safe.schedule").out
    for line in (
        "safe: ACCEPT (206 moments, 59 checks, ",
        "proved: 59 pairs of accesses are ordered, over 4 replays and 2 ranks",
        "proved: side streams are joined: prefetch",
        "proved: 4 launches fit gb300",
        "assumed: ",
    ):
        assert line in out
    assert "not proven" not in out


@pytest.mark.parametrize("name", WRONG)
def test_wrong_schedules(name: str) -> None:
    outcome = call("prove", EXAMPLES / f"{name}.schedule")
    assert (outcome.code, outcome.err) == (1, "")
    assert f"{name}: REJECT" in outcome.out
    assert WRONG[name] in outcome.out
    assert call("prove", EXAMPLES / f"{name}.schedule", "--no-strict").code == 1


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == {"safe", *WRONG}


def test_json() -> None:
    data = call("prove", EXAMPLES / "stage_wiped.schedule", "--json").data
    assert data["verdict"] == "REJECT"
    (schedule,) = data["schedules"]
    assert (schedule["name"], schedule["verdict"]) == ("stage_wiped", "REJECT")
    assert schedule["findings"][0]["kind"] == "mailbox re-arm"
    assert "@reduce" in schedule["findings"][0]["message"]
    assert schedule["no_kernel_resources"] == ["reduce"]
    assert {"not_proven", "proved", "moments", "checks", "seconds", "assumptions"} <= set(schedule)


def test_the_limit(tmp_path: Path) -> None:
    """What is too large is not proven: an answer that --strict, the default, does not take."""
    file = tmp_path / "one.schedule"
    file.write_text(ONE)
    assert call("prove", file, "--limit", 6).code == 0
    for flags in ((), ("--strict",)):
        outcome = call("prove", file, "--limit", 5, *flags)
        assert outcome.code == 1
        assert "one: NOT PROVEN" in outcome.out
        assert "not proven: the schedule unrolls to 6 moments" in outcome.out
    assert call("prove", file, "--limit", 5, "--no-strict").code == 0
    assert call("prove", file, "--limit", 5, "--json").data["verdict"] == "NOT PROVEN"


def test_one_wrong_stage_of_several(tmp_path: Path) -> None:
    file = tmp_path / "stages.schedule"
    file.write_text(ONE + (EXAMPLES / "unjoined_prefetch.schedule").read_text())
    outcome = call("prove", file)
    assert outcome.code == 1
    assert "one: ACCEPT" in outcome.out
    assert "unjoined_prefetch: REJECT" in outcome.out


def test_a_bundle_and_a_plan(small: Path) -> None:
    out = call_ok("prove", small).out
    assert "kimi-k3.tp2.b1q1: ACCEPT" in out
    assert "not proven: no kernel resources yet" in out
    (plan,) = (small / "plans").iterdir()
    data = call_ok("prove", plan, "--json").data
    assert data["verdict"] == "ACCEPT"
    assert len(data["schedules"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launch a on main", "bad.schedule, line 1: expected 'schedule NAME"),
        (ONE + "    jump", "bad.schedule, line 4: 'jump' is none of"),
        ("{", "bad.schedule: not JSON"),
        ('schedule s {target="sm_130"}\nlaunch a on main', "unknown target 'sm_130'"),
        ("\udcff", "bad.schedule: neither a schedule nor a plan"),
    ],
)
def test_bad_input(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.schedule"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert message in refused("prove", file)


def test_no_such_file(tmp_path: Path) -> None:
    assert "no such file" in refused("prove", tmp_path / "none")
    assert "manifest.json" in refused("prove", tmp_path)
    assert "--limit" in refused("prove", EXAMPLES / "safe.schedule", "--limit", 0)
