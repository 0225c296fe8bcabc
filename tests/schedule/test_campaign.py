from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prove_campaign as campaign
from benchmarks.prove_campaign import Case, Result, RunCase


def test_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "results" / "campaign.json"
    cases = (Case("kimi-linear-tiny", 2, 1, sample=1),)
    runs = (RunCase("kimi-linear-tiny", 2, orders=10, sample=1),)
    assert campaign.campaign(cases, runs, report)
    out = capsys.readouterr().out
    assert "kimi-linear-tiny.tp2.b1q1: " in out
    assert "trigger early                    1    1" in out
    assert "0 wrong answers" in out
    outcome = json.loads(report.read_text())
    assert outcome["mutants_shown"] == outcome["mutants_run"] >= 15
    assert len(outcome["commit"]) == 40


def test_what_is_not_shown_is_listed_with_a_reason() -> None:
    result = Result("plan", 3)
    result.tried["widen grid"] = 1
    result.not_shown.append("widen grid to 9 CTAs at launch")
    header, row, listed, why = campaign.table([result])
    assert header.split() == ["mutation", "shown", "of"]
    assert row.split() == ["widen", "grid", "0", "1"]
    assert listed.endswith("plan: widen grid to 9 CTAs at launch")
    assert "SMs" in why
