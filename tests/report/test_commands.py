from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from k3fuse.cli import diff, inspect
from k3fuse.errors import InputError
from k3fuse.passes.pipeline import PIPELINE

app = typer.Typer()
inspect.register(app)
diff.register(app)


def call(*arguments: object) -> tuple[int, str]:
    """Exit code and stdout; errors for the user are raised, as the entry point catches them."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout


def call_json(*arguments: object) -> dict[str, Any]:
    code, text = call(*arguments, "--json")
    assert code == 0
    data = json.loads(text)
    return cast("dict[str, Any]", data)


def test_summary(bundle: Path) -> None:
    data = call_json("inspect", bundle)
    buckets = data["buckets"]
    assert [(b["batch"], b["kind"]) for b in buckets] == [
        (batch, kind) for batch in (1, 2) for kind in ("step", "verify", "commit")
    ]
    step = buckets[0]
    assert set(step["launches"]) == {"main", "aux", "prefetch"}
    assert step["share_of_floor"] == pytest.approx(step["floor_us"] / step["predicted_us"])
    assert buckets[2]["floor_us"] is None
    assert step["memory"]["weights"] > 0
    assert step["mailboxes"][0]["stages"] == 3
    code, text = call("inspect", bundle)
    assert code == 0
    assert "KDA+dense" in text
    assert "push_partial" in text


def test_one_bucket(bundle: Path) -> None:
    (bucket,) = call_json("inspect", bundle, "--batch", 2, "--verify")["buckets"]
    assert (bucket["batch"], bucket["kind"], bucket["rows_per_request"]) == (2, "verify", 2)


def test_layer(bundle: Path) -> None:
    data = call_json("inspect", bundle, "--layer", 3)
    assert [x["layer"] for x in data["launches"]] == [3] * len(data["launches"])
    assert {"name", "ops", "operands", "after", "wait_op", "trigger", "bound"} <= set(
        data["launches"][0]
    )
    assert all(f"fused @{launch['name']} " in data["ir"] for launch in data["launches"])
    _, text = call("inspect", bundle, "--layer", 3)
    assert "main stream" in text
    assert "mla_attend_latent" in text


def test_pass(bundle: Path) -> None:
    by_name = call_json("inspect", bundle, "--pass", "shard-stock")
    assert call_json("inspect", bundle, "--pass", by_name["index"]) == by_name
    assert by_name["ir"].startswith("graph decode")
    change = call_json("inspect", bundle, "--pass", "shard-stock", "--diff", "--layer", 1)
    assert change["diff"].startswith("--- absorb-mla\n+++ shard-stock\n")
    assert "layers.2." not in change["diff"]
    assert call("inspect", bundle, "--pass", 0, "--diff") == (0, "trace: no change\n")
    assert call_json("inspect", bundle, "--pass", 0, "--diff")["diff"] == ""


def test_refusals(bundle: Path) -> None:
    data = call_json("inspect", bundle, "--refusals")
    assert sum(group["count"] for group in data["refusals"]) == data["total"] > 0
    assert {g["pass_name"] for g in data["refusals"]} <= {item.name for item in PIPELINE}
    _, text = call("inspect", bundle, "--refusals")
    assert data["refusals"][0]["pass_name"] in text


def test_html(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    data = call_json("inspect", bundle, "--html", file, "--batch", 2)
    assert data == {"bucket": "step_b2_q1", "file": str(file), "bytes": file.stat().st_size}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--batch", "3"], r"--batch 3: .* it has batch 1, batch 1 \(--verify\), batch 2"),
        (["--layer", "8"], r"--layer 8: .* 0 to 7"),
        (["--pass", "8", "--layer", "99"], "--layer 99"),
        (["--pass", "fuse"], r"--pass fuse: .*0 trace, 1 canonicalize"),
        (["--pass", "99"], "--pass 99"),
        (["--diff"], "--diff .* --pass"),
        (["--refusals", "--layer", "1"], "one at a time"),
        (["--html", "no/such/folder.html"], "--html no/such/folder.html"),
    ],
)
def test_bad_flags(bundle: Path, flags: list[str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        call("inspect", bundle, *flags)


def test_no_verify_bucket(other_bundle: Path) -> None:
    with pytest.raises(InputError, match="--verify"):
        call("inspect", other_bundle, "--verify")


def test_diff_of_equal_things(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    assert call("diff", bundle, copy) == (0, "")
    for file in ("plans/step_b1_q1.json", "recipe.ir"):
        assert call("diff", bundle / file, copy / file) == (0, "")
    assert call_json("diff", bundle, copy)["equal"] is True


def test_diff_of_bundles(bundle: Path, other_bundle: Path) -> None:
    code, text = call("diff", bundle, other_bundle)
    assert code == 1
    assert "option prefetch: True -> False" in text
    assert f"bucket step_b2_q1: only in {bundle}" in text
    assert "  - embed_tokens.prefetch" in text
    code, raw = call("diff", bundle, other_bundle, "--json")
    data = json.loads(raw)
    assert code == 1
    assert data["options"]["prefetch"] == [True, False]
    plan = data["plans"]["step_b1_q1"]
    assert not plan["added"]
    assert set(plan["totals"]) == {"launches", "memory"}
    assert "step_b2_q1" in data["only"]["a"]


def test_diff_of_texts(bundle: Path, tmp_path: Path) -> None:
    step, verify = (bundle / f"ir/step_b1_q{q}.ir" for q in (1, 2))
    code, text = call("diff", step, verify)
    assert code == 1
    assert text.startswith(f"--- {step}\n+++ {verify}\n@@")
    spaced = tmp_path / "spaced.ir"
    spaced.write_text("// a comment\n" + step.read_text())
    assert call("diff", step, spaced) == (0, "")
    code, text = call("diff", bundle / "plans/step_b1_q1.json", bundle / "plans/step_b2_q1.json")
    assert code == 1
    assert '+ "batch": 2,' in text


def test_diff_of_bad_input(bundle: Path, tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.ir", tmp_path / "binary"
    broken.write_text("graph g {\n  what\n}\n")
    binary.write_bytes(b"\xff\xfe\x00")
    good = bundle / "recipe.ir"
    for bad, complaint in (
        (broken, "broken.ir, line 2"),
        (binary, "not text"),
        (tmp_path / "missing", "missing: No such file"),
        (tmp_path, "no bundle"),
        (bundle / "plans/step_b1_q1.json", "two of a kind"),
    ):
        partner = bundle if bad == tmp_path else good
        with pytest.raises(InputError, match=complaint):
            call("diff", partner, bad)
