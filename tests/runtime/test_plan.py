from __future__ import annotations

import json
from dataclasses import replace

import pytest

from k3fuse.errors import ParseError
from k3fuse.runtime.plan import PLAN_VERSION, Plan, read_plan
from tests.lowering.compiled import compiled


@pytest.fixture
def plan() -> Plan:
    return compiled("kimi-k3-tiny", 2, 2).plan


def test_text_reads_back_to_an_equal_plan(plan: Plan) -> None:
    text = plan.to_json()
    again = read_plan(text, "plan.json")
    assert again == plan
    assert again.to_json() == text
    assert again.hash() == plan.hash()
    assert len(plan.hash()) == 64


def test_every_change_changes_the_hash(plan: Plan) -> None:
    last = plan.launches[-1]
    for changed in (
        replace(plan, tp=4),
        replace(plan, launches=plan.launches[:-1]),
        replace(plan, launches=(*plan.launches[:-1], replace(last, predicted_us=0.25))),
        replace(plan, mailboxes=(replace(plan.mailboxes[0], rearm=1), *plan.mailboxes[1:])),
    ):
        assert changed.hash() != plan.hash()


def test_sums(plan: Plan) -> None:
    assert plan.planned_bytes == sum(x.weight_bytes + x.state_bytes for x in plan.launches)
    assert plan.rows == 2
    assert 0 < plan.predicted_us < 1000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ("{}", "version None"),
        (json.dumps({"version": PLAN_VERSION + 1}), "compile the bundle again"),
        (json.dumps({"version": PLAN_VERSION}), "not a plan"),
    ],
)
def test_other_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ParseError, match=rf"here\.json.*{complaint}"):
        read_plan(text, "here.json")


def test_a_bad_field_is_refused(plan: Plan) -> None:
    raw = json.loads(plan.to_json())
    raw["launches"][0]["stream"] = "fourth"
    with pytest.raises(ParseError, match="stream"):
        read_plan(json.dumps(raw), "here.json")
