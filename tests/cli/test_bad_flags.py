"""Wrong use: exit code 2, and a message that names the flag and what would be right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.cli.command import refused
from tests.cli.conftest import Compiled


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "0"], ["--tp 0"]),
        (["--tp", "3"], ["--tp 3", "embed_tokens", "dimension 0", "[512,128]"]),
        (["--tp", "5"], ["--tp 5", "dimension 0", "does not divide"]),
        (["--tp", "16"], ["--tp 16", "self_attn.b_proj", "[8,128]"]),
        (["--tp", "two"], ["--tp", "integer"]),
        (["--batch", "0"], ["--batch 0", "1 to 64"]),
        (["--batch", "65"], ["--batch 65", "1 to 64"]),
        (["--batch", "x"], ["--batch x", "not an integer"]),
        (["--batch", "--1"], ["--batch --1", "not an integer"]),
        (["--batch", ""], ["--batch", "not an integer"]),
        (["--batch", "1,1"], ["--batch 1,1", "twice"]),
        (["--target", "sm_130"], ["unknown target 'sm_130'", "sm_103a"]),
        (["--target", "sm_12"], ["unknown target 'sm_12'", "gb300"]),
        (["--verify-rows", "9"], ["--verify-rows 9", "2 to 8"]),
        (["--protocol", "ring"], ["--protocol ring", "two_shot"]),
        (["--bisect-limit", "-1"], ["--bisect-limit -1"]),
        (["--stop-after", "fuse"], ["unknown pass 'fuse'", "fuse-experts"]),
        (["--print-after-all", "--filter-passes", "fuse"], ["unknown pass 'fuse'"]),
        (["--print-changed=loud"], ["--print-changed loud", "diff or quiet"]),
        (["--no-weights"], ["--no-weights", "exclude each other"]),
    ],
)
def test_compile(k3: Path, tmp_path: Path, flags: list[str], words: list[str]) -> None:
    bundle = tmp_path / "bundle"
    message = refused("compile", "kimi-k3", k3, "--no-check", "-o", bundle, *flags)
    assert all(word in message for word in words), message
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "tpu"], ["--device tpu", "cpu or cuda"]),
        (["--loopback"], ["--loopback", "--device cuda"]),
        (["--random-weights", "0"], ["--random-weights", "--device cuda"]),
        (["--device", "cuda"], ["no CUDA GPU", "k3fuse doctor"]),
    ],
)
def test_run_on_a_device(compiled: Compiled, flags: list[str], words: list[str]) -> None:
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    message = refused("run", compiled.bundle, "--prompt-ids", "1", *flags)
    assert all(word in message for word in words), message


def test_bench(compiled: Compiled) -> None:
    assert "--replays 0" in refused("bench", compiled.bundle, "--replays", "0")
    if not torch.cuda.is_available():
        assert "no CUDA GPU" in refused("bench", compiled.bundle)


def test_compile_needs_weights_or_no_weights() -> None:
    assert "--no-weights" in refused("compile", "kimi-k3-tiny")
    assert "--check needs weights" in refused("compile", "kimi-k3-tiny", "--no-weights", "--check")


def test_compile_into_something_else(k3: Path, tmp_path: Path) -> None:
    """A directory that is no bundle keeps what it holds."""
    note = tmp_path / "note.txt"
    note.write_text("mine")
    compile_into = ("compile", "kimi-k3", k3, "--no-check", "-o")
    assert "is not empty and no bundle" in refused(*compile_into, tmp_path)
    assert "is a file" in refused(*compile_into, note)
    assert str(note) in refused(*compile_into, note / "bundle")
    assert str(note) in refused(*compile_into, tmp_path / "bundle", "--dump-dir", note)
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]
    assert note.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--prompt-ids"]),
        (["--prompt-ids", ""], ["--prompt-ids", "empty"]),
        (["--prompt-ids", "a"], ["--prompt-ids a", "not an integer"]),
        (["--prompt-ids", "1,512"], ["position 1", "512", "[0, 512)"]),
        (["--prompt-ids", "-1"], ["position 0", "-1", "vocabulary"]),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        (["--prompt-ids", "1", "--max-new-tokens", "5000"], ["--max-context", "4096"]),
        (["--prompt-ids", "1", "--executor", "gpu"], ["--executor gpu", "reference"]),
        (["--prompt-ids", "1", "--dtype", "fp8"], ["--dtype fp8", "float64"]),
        (["--prompt-ids", "1", "--rows-per-request", "4"], ["--rows-per-request 4", "compiled"]),
        (["--prompt-ids", "1", "--rows-per-request", "0"], ["--rows-per-request 0"]),
    ],
)
def test_run(small: Path, flags: list[str], words: list[str]) -> None:
    message = refused("run", small, *flags)
    assert all(word in message for word in words), message


def test_run_with_logits_nowhere(small: Path, tmp_path: Path) -> None:
    run = ("run", small, "--prompt-ids", "1", "--logits")
    assert "--logits" in refused(*run, tmp_path / "none" / "logits.safetensors")
    assert "--logits" in refused(*run, tmp_path)


def test_opt(small: Path, tmp_path: Path) -> None:
    """Not IR: the message has the line."""
    dump = next((small / "dumps" / "step_b1_q1").iterdir())
    lines = dump.read_text().splitlines()
    text, binary, none = tmp_path / "text.ir", tmp_path / "binary.ir", tmp_path / "none.ir"
    text.write_text("\n".join([*lines[:20], "what is this", *lines[20:]]))
    assert "text.ir, line 21: " in refused("opt", text)
    binary.write_bytes(os.urandom(64) + b"\xff")
    assert "binary.ir: cannot be read as IR text" in refused("opt", binary)
    for place in (none, tmp_path):
        assert "cannot be read as IR text" in refused("opt", place)
    assert "unknown pass 'fuse'" in refused("opt", dump, "-p", "fuse")
    assert "unknown pass 'fuse'" in refused("opt", dump, "--after", "fuse")
    assert "exclude each other" in refused("opt", dump, "-p", "dce", "--after", "dce")
    assert str(tmp_path) in refused("opt", dump, "-o", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["roofline", "llama"], "unknown model 'llama'"),
        (["roofline", "kimi-k3", "--tp", "0"], "tp is 0"),
        (["roofline", "kimi-k3", "--gpu", "sm_12"], "unknown target 'sm_12'"),
        (["roofline", "kimi-k3", "--measured-ms", "0"], "measured_ms is 0.0"),
        (["synth", "kimi-k9", "there"], "unknown model 'kimi-k9'"),
        (["synth", "kimi-k3-tiny", "there", "--shards", "0"], "--shards 0"),
        (["train"], "No such command 'train'"),
        (["compile", "--fast"], "No such option: --fast"),
    ],
)
def test_others(words: list[str], message: str) -> None:
    assert message in refused(*words)
