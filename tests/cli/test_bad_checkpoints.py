"""A checkpoint that cannot be right: exit code 2, one message that names the place, no bundle."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import refused


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def missing(directory: Path) -> None:
    shutil.rmtree(directory)


def a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("weights")


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def absent_shard(directory: Path) -> None:
    shards(directory)[1].unlink()


def truncated_shard(directory: Path) -> None:
    shard = shards(directory)[1]
    shard.write_bytes(shard.read_bytes()[:-1000])


def nan_scale(directory: Path) -> None:
    shard = shards(directory)[0]
    data = bytearray(shard.read_bytes())
    start, header = _header(bytes(data))
    name = next(name for name in header if name.endswith("weight_scale"))
    data[start + header[name]["data_offsets"][0]] = 255
    shard.write_bytes(data)


def wrong_shape(directory: Path) -> None:
    shard = shards(directory)[0]
    data = shard.read_bytes()
    start, header = _header(data)
    entry = next(entry for name, entry in header.items() if name.endswith("embed_tokens.weight"))
    entry["shape"] = entry["shape"][::-1]
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])


def _header(data: bytes) -> tuple[int, dict[str, Any]]:
    (length,) = struct.unpack("<Q", data[:8])
    return 8 + length, json.loads(data[8 : 8 + length])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (empty, ["not a checkpoint", "config.json"]),
        (missing, ["not a directory"]),
        (a_file, ["not a directory"]),
        (broken_config, ["config.json", "JSON"]),
        (absent_shard, ["absent", "model-00002-of-00002.safetensors"]),
        (truncated_shard, ["model-00002-of-00002.safetensors", "truncated", "1000"]),
        (nan_scale, ["model-00001-of-00002.safetensors", "weight_scale", "255", "NaN"]),
        (wrong_shape, ["embed_tokens.weight", "[128, 512]", "[512, 128]"]),
    ],
)
def test_spoiled(k3: Path, tmp_path: Path, spoil: Callable[[Path], None], words: list[str]) -> None:
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    shutil.copytree(k3, checkpoint)
    spoil(checkpoint)
    message = refused("compile", "kimi-k3", checkpoint, "-o", bundle)
    assert all(word in message for word in ["checkpoint", *words]), message
    assert not bundle.exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("kimi-linear", ["is a kimi-k3 checkpoint", "name kimi-k3"]),
        ("kimi-k3-mini", ["is not the built-in config kimi-k3-mini", "kimi-k3"]),
        ("llama", ["unknown model 'llama'", "kimi-linear"]),
    ],
)
def test_another_model(k3: Path, tmp_path: Path, model: str, words: list[str]) -> None:
    message = refused("compile", model, k3, "-o", tmp_path / "bundle")
    assert all(word in message for word in words), message
    assert not any(tmp_path.iterdir())


def test_run_with_another_checkpoint(small: Path, k3: Path, linear: Path, tmp_path: Path) -> None:
    run = ("run", small, "--prompt-ids", "1", "--checkpoint")
    assert "is a kimi-linear checkpoint" in refused(*run, linear)
    other = tmp_path / "other"
    shutil.copytree(k3, other)
    config = json.loads((other / "config.json").read_text())
    text = config.get("text_config", config)
    text["rms_norm_eps"] = 2 * text["rms_norm_eps"]
    (other / "config.json").write_text(json.dumps(config))
    assert "another config, than the checkpoint" in refused(*run, other)


def test_checkpoint_gone(small: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(small, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["checkpoint"]["path"] = str(tmp_path / "gone")
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    for command in (("run", bundle, "--prompt-ids", "1"), ("verify", bundle)):
        message = refused(*command)
        assert str(tmp_path / "gone") in message
        assert "--checkpoint" in message
