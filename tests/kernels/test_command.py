"""`k3fuse kernel`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from k3fuse.cli import kernel as command
from k3fuse.errors import InputError


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setenv("K3FUSE_CACHE", str(tmp_path))
    made = typer.Typer()
    command.register(made)
    made.callback()(lambda: None)
    return made


def call(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["kernel", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.usefixtures("dsl")
def test_a_kernel_is_compiled_once_and_described(app: typer.Typer) -> None:
    arguments = ("rms_norm", "--shape", "2,264", "--target", "gb300", "--json")
    first, second = (json.loads(call(app, *arguments)) for _ in range(2))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["launch"] == second["launch"]
    assert first["launch"]["arch"] == "sm_103a"
    assert first["bytes_moved"] == 264 * 2 + 2 * 2 * 264 * 2
    assert "registers, stack" in call(app, "rms_norm", "--shape", "2,264", "--target", "gb300")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("projection", "--shape", "1,3216"), "projection takes M,N,K"),
        (("projection", "--shape", "1,a,64"), "projection takes M,N,K"),
        (("projection", "--shape", "9,3216,7168"), "M=9: holds 1 to 8 tokens"),
        (("nope", "--shape", "1"), "unknown kernel 'nope'"),
        (("rms_norm", "--shape", "1,64", "--target", "h100"), "unknown target"),
    ],
)
def test_wrong_use_is_named(app: typer.Typer, arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        call(app, *arguments)


@pytest.mark.usefixtures("dsl")
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_run_needs_a_gpu(app: typer.Typer) -> None:
    with pytest.raises(InputError, match="--run needs a CUDA GPU"):
        call(app, "rms_norm", "--shape", "1,64", "--run")


@pytest.mark.gpu
@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize(
    ("name", "shape"),
    [("projection", "3,3216,7168"), ("rms_norm", "2,7168"), ("slots_rms_norm", "2,7168,16")],
)
def test_run_on_a_gpu(app: typer.Typer, name: str, shape: str) -> None:
    assert json.loads(call(app, name, "--shape", shape, "--run", "--json"))["run"]["ok"]
