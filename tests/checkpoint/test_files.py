from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from k3fuse.checkpoint.files import open_checkpoint
from k3fuse.checkpoint.safetensors_header import read_header
from k3fuse.errors import CheckpointError
from tests.checkpoint.conftest import EditIndex

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
EMBED = "model.embed_tokens.weight"


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory)
    for word in words:
        assert word in str(error.value)


def test_opens_shards(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    assert checkpoint.config == {"model_type": "small"}
    assert checkpoint.notes == []
    assert len(checkpoint.tensors) == 8
    assert checkpoint.dtypes[EMBED] == "BF16"


def test_opens_one_file_written_by_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensors["a"].shape == (3, 5)
    assert torch.equal(checkpoint.stored_bytes("b"), tensors["b"])
    checkpoint.close()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "none", "not a directory")
    refused(tmp_path, "not a checkpoint", "config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "not a checkpoint", ".safetensors")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json", "JSON")


def test_absent_shard_is_named(small: Path) -> None:
    (small / SECOND).unlink()
    refused(small, "absent", SECOND)


def test_stray_file_is_named(small: Path) -> None:
    (small / "consolidated.safetensors").write_bytes((small / FIRST).read_bytes())
    refused(small, "stray", "consolidated.safetensors")


def test_directory_named_like_a_shard_is_noted(small: Path) -> None:
    (small / "x.safetensors").mkdir()
    (note,) = open_checkpoint(small).notes
    assert "x.safetensors" in note


def test_shards_without_index(small: Path) -> None:
    (small / "model.safetensors.index.json").unlink()
    refused(small, "model.safetensors.index.json is missing", FIRST)


@pytest.mark.parametrize("missing", [1, 40])
def test_truncated_shard_says_how_much(small: Path, missing: int) -> None:
    data = (small / FIRST).read_bytes()
    (small / FIRST).write_bytes(data[:-missing])
    refused(small, FIRST, "truncated", f"{missing} of {len(data)} bytes")


def test_truncated_header(small: Path) -> None:
    data = (small / FIRST).read_bytes()
    length = int.from_bytes(data[:8], "little")
    (small / FIRST).write_bytes(data[: 8 + length - 5])
    refused(small, FIRST, "truncated", "5 bytes")
    (small / FIRST).write_bytes(b"")
    refused(small, FIRST, "not a safetensors file")
    (small / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(small, FIRST, "git lfs pull")


def test_trailing_bytes(small: Path) -> None:
    with (small / FIRST).open("ab") as file:
        file.write(b"123")
    refused(small, FIRST, "3 bytes follow")


def test_index_and_shards_disagree(small: Path, edit_index: EditIndex) -> None:
    edit_index(lambda names: names.__delitem__(EMBED))
    refused(small, EMBED, "not in the index")


def test_index_names_an_absent_tensor(small: Path, edit_index: EditIndex) -> None:
    edit_index(lambda names: names.update({"ghost": FIRST}))
    refused(small, "ghost is not in")


def test_index_names_the_wrong_shard(small: Path, edit_index: EditIndex) -> None:
    edit_index(lambda names: names.update({EMBED: SECOND}))
    refused(small, EMBED, "the index says", SECOND)


@pytest.mark.parametrize("entry", ["../x.safetensors", "/x", "..", "sub/x.safetensors", "a\\b", ""])
def test_index_must_stay_in_its_folder(small: Path, edit_index: EditIndex, entry: str) -> None:
    edit_index(lambda names: names.update({EMBED: entry}))
    refused(small, "not a plain file name", repr(entry))


def test_duplicates(small: Path) -> None:
    index = small / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"weight_map": {', f'"weight_map": {{"{EMBED}": "{FIRST}",'))
    refused(small, EMBED, "given twice")
    index.write_text(text)
    names = list(open_checkpoint(small).tensors)
    save_file({name: torch.zeros(1) for name in names}, small / SECOND)
    refused(small, EMBED, "is in both")


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"{", "header"),
        ([], "not a JSON object"),
        ([1], "not a JSON object"),
        ({"a": entry("F32", [2], [0, 4])}, "takes 8 bytes"),
        ({"a": entry("F32", [1], [4, 8])}, "gap"),
        ({"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [2, 6])}, "overlaps"),
        ({"a": entry("X9", [1], [0, 4])}, "unknown dtype 'X9'"),
        ({"a": entry(["F32"], [1], [0, 4])}, "unknown dtype"),
        ({"a": entry("F32", [-1, -1], [0, 4])}, "malformed"),
        ({"a": entry("F32", "1", [0, 4])}, "malformed"),
        ({"a": entry("F32", None, [0, 4])}, "malformed"),
        ({"a": entry("F32", [1], [0])}, "malformed"),
        ({"a": {"dtype": "F32"}}, "malformed"),
        ({"a": 3}, "malformed"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":3}', "given twice"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, word: str) -> None:
    path = tmp_path / "m.safetensors"
    write_raw(path, header, b"1234")
    with pytest.raises(CheckpointError, match=word) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_wrong_total_size_is_noted(small: Path) -> None:
    path = small / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    assert any("total_size" in note for note in open_checkpoint(small).notes)


@given(st.data())
def test_a_damaged_header_is_an_error_or_still_valid(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_raw(path, {"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [2, 4])}, b"1234")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) == 4
