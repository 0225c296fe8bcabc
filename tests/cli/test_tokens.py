"""From a checkpoint to tokens: the fused plan says what the stock forward says, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from tests.cli.command import call_ok
from tests.cli.conftest import Compiled

pytestmark = pytest.mark.e2e

PROMPTS = ("5", "17,3,99,3,99", "1,2,3,4,5,6,7,8")


def check_run(
    bundle: Path, folder: Path, rows: int = 1, dtype: str = "bf16", prompts: int = 3
) -> None:
    """Both executors on prompts of different lengths; three are more than a step holds."""
    tokens: list[object] = []
    logits: list[dict[str, torch.Tensor]] = []
    for executor in ("reference", "stock"):
        file = folder / f"{executor}.safetensors"
        outcome = call_ok(
            *("run", bundle, "--executor", executor, "--max-new-tokens", 12, "--json"),
            *("--rows-per-request", rows, "--dtype", dtype, "--logits", file),
            *(word for prompt in PROMPTS[:prompts] for word in ("--prompt-ids", prompt)),
        )
        assert outcome.data["executor"] == executor
        tokens.append(outcome.data["tokens"])
        logits.append(load_file(file))
    assert tokens[0] == tokens[1]
    assert logits[0].keys() == logits[1].keys()
    for name, found in logits[0].items():
        assert torch.equal(found, logits[1][name]), name


@pytest.mark.parametrize(("rows", "prompts"), [(1, 3), (8, 2)])
def test_kimi_k3(compiled: Compiled, tmp_path: Path, rows: int, prompts: int) -> None:
    check_run(compiled.bundle, tmp_path, rows, prompts=prompts)


def test_kimi_linear(linear: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    data = call_ok(
        *("compile", "kimi-linear", linear, "--tp", 2, "--batch", "1,2", "--no-kernels"),
        *("-o", bundle, "--json"),
    ).data
    assert data["proofs"]["numerics"].startswith("checked: ")
    check_run(bundle, tmp_path)


def test_float64(small: Path, tmp_path: Path) -> None:
    check_run(small, tmp_path, dtype="float64")


def test_text_output(small: Path) -> None:
    out = call_ok("run", small, "--prompt-ids", "5,6", "--max-new-tokens", 2).out
    prompt, new = out.strip().split(" -> ")
    assert prompt == "5,6"
    assert len(new.split(",")) == 2


def test_a_checkpoint_that_moved(small: Path, k3: Path, tmp_path: Path) -> None:
    """The path in a bundle is a hint; --checkpoint overrides it."""
    there = tmp_path / "moved"
    there.symlink_to(k3, target_is_directory=True)
    outcome = call_ok(
        *("run", small, "--prompt-ids", "5", "--max-new-tokens", 1, "--json"),
        *("--checkpoint", there),
    )
    assert len(outcome.data["tokens"][0]) == 1
