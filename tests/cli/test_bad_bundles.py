"""A bundle that somebody cut, edited or mixed up is not run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import refused


def edited(**fields: Any) -> Callable[[Path], None]:
    """Writes fields into the manifest."""

    def spoil(bundle: Path) -> None:
        path = bundle / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return spoil


def gone(bundle: Path) -> None:
    shutil.rmtree(bundle)


def no_json(bundle: Path) -> None:
    (bundle / "manifest.json").write_bytes(b"\xff\xfe\x00{")


def changed_plan(bundle: Path) -> None:
    plan = bundle / "plans" / "step_b1_q1.json"
    plan.write_text(plan.read_text().replace("1", "2", 1))


def missing_plan(bundle: Path) -> None:
    (bundle / "plans" / "step_b1_q1.json").unlink()


def stray_file(bundle: Path) -> None:
    (bundle / "stray.txt").write_text("")


def link_outside(bundle: Path) -> None:
    recipe = bundle / "recipe.ir"
    recipe.rename(bundle.parent / "recipe.ir")
    recipe.symlink_to(bundle.parent / "recipe.ir")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (gone, ["is no bundle"]),
        (no_json, ["manifest.json", "not JSON"]),
        (edited(version=9), ["version 9", "compile again"]),
        (edited(format="zip"), ["not the manifest of a k3fuse bundle"]),
        (edited(files={"../secret": "0"}), ["'../secret'", "outside the bundle"]),
        (edited(buckets=[]), ["no bucket"]),
        (edited(options={}), ["options", "target", "compile again"]),
        (edited(model="llama"), ["unknown model 'llama'"]),
        (changed_plan, ["plans/step_b1_q1.json", "SHA-256"]),
        (missing_plan, ["plans/step_b1_q1.json", "compile again"]),
        (stray_file, ["stray.txt", "remove it"]),
        (link_outside, ["recipe.ir", "outside the bundle"]),
    ],
)
def test_run(small: Path, tmp_path: Path, spoil: Callable[[Path], None], words: list[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(small, bundle)
    spoil(bundle)
    message = refused("run", bundle, "--prompt-ids", "1")
    assert all(word in message for word in words), message
