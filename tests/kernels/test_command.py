"""`k3fuse kernel`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from k3fuse.cli import kernel as command
from k3fuse.errors import InputError, RefusedError
from k3fuse.kernels.examples import EXAMPLES


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
    assert [stage["kind"] for stage in first["stages"]] == ["row"]
    assert "registers, stack" in call(app, "rms_norm", "--shape", "2,264", "--target", "gb300")


@pytest.mark.slow
@pytest.mark.usefixtures("dsl")
def test_a_launch_of_a_plan(app: typer.Typer) -> None:
    arguments = ("--model", "kimi-k3-tiny", "--tp", "2", "--launch", "embed_tokens", "--json")
    found = json.loads(call(app, *arguments))
    assert found["ops"] == "embedding.push_partial"
    assert "rank" in [parameter["name"] for parameter in found["launch"]["params"]]
    with pytest.raises(InputError, match="no launch 'embed_token'; near: embed_tokens"):
        call(app, "--model", "kimi-k3-tiny", "--launch", "embed_token")


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (("linear", "--shape", "1,3216"), InputError, "linear takes M,N,K"),
        (("linear", "--shape", "1,a,64"), InputError, "linear takes M,N,K"),
        (
            ("rms_norm", "--shape", "1,999983"),
            RefusedError,
            "no kernel does rms_norm 1,999983: rows",
        ),
        (("nope", "--shape", "1"), InputError, "unknown example 'nope'"),
        (("rms_norm", "--shape", "1,64", "--target", "h100"), InputError, "unknown target"),
        ((), InputError, "name one"),
        (("linear", "--model", "kimi-k3-tiny"), InputError, "name one"),
    ],
)
def test_wrong_use_is_named(
    app: typer.Typer, arguments: tuple[str, ...], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        call(app, *arguments)


@pytest.mark.usefixtures("dsl")
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_run_needs_a_gpu(app: typer.Typer) -> None:
    with pytest.raises(InputError, match="--run needs a CUDA GPU"):
        call(app, "rms_norm", "--shape", "1,64", "--run")


@pytest.mark.gpu
@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("name", EXAMPLES)
def test_run_on_a_gpu(app: typer.Typer, name: str) -> None:
    shape = ",".join(map(str, EXAMPLES[name].one))
    assert json.loads(call(app, name, "--shape", shape, "--run", "--json"))["run"]["ok"]
