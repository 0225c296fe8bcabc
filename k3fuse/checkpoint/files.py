"""Opens a checkpoint directory: config.json, the index, and the headers of all safetensors files.

Nothing but headers is read here, and everything that headers can tell wrong is an error before any
tensor is allocated: absent, truncated and stray files, tensors that the index and the shards do not
agree on, names given twice.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from k3fuse.checkpoint.safetensors_header import StoredTensor, read_header
from k3fuse.errors import CheckpointError

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

RESIDENT_BYTES = 1 << 28
"""Mapped file pages that may stay in this process besides those of the tensor being read."""


@dataclass
class Checkpoint:
    """An opened checkpoint: its config and where each tensor lies. `notes` are oddities worth a
    line that do no harm. Files are mapped on first use and stay mapped until `close`."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    notes: list[str]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict[Path, mmap.mmap], repr=False)
    _touched: int = field(default=0, repr=False)

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Tensor name -> safetensors dtype word, for functions that choose a layout by it."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def stored_bytes(self, name: str) -> torch.Tensor:
        """The bytes of one tensor as a uint8 tensor [nbytes] that shares the mapped file.

        Pages are read when they are touched, and let go (to be read again if need be) after each
        `RESIDENT_BYTES`, so that a checkpoint does not pile up in this process. Do not write to it.
        """
        tensor = self.tensors[name]
        if tensor.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self._touched += tensor.nbytes
        if self._touched > RESIDENT_BYTES:
            self._touched = tensor.nbytes
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
        mapped = self._maps.get(tensor.file)
        if mapped is None:
            with tensor.file.open("rb") as file:
                # a private mapping is writable, which torch wants; nothing writes to it
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[tensor.file] = mapped
        return torch.frombuffer(
            mapped, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset
        )

    def close(self) -> None:
        """Forget the mapped files; each is unmapped when the last tensor on it is gone."""
        self._maps.clear()


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Open `directory`, which holds config.json and safetensors (sharded with an index, or one
    model.safetensors). Raises CheckpointError naming the file or tensor at fault."""
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; expected a checkpoint directory")
    notes: list[str] = []
    present: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        if path.is_dir():
            notes.append(f"{path}: a directory, ignored")
        else:
            present.add(path.name)  # a dangling link counts as present and fails when it is opened
    config_path = directory / CONFIG_NAME
    index_path = directory / INDEX_NAME
    if not config_path.is_file():
        raise CheckpointError(f"{directory}: not a checkpoint: it has no {CONFIG_NAME}")
    config = _read_json(config_path)
    if index_path.is_file():
        tensors = _open_sharded(index_path, present, notes)
    elif not present:
        raise CheckpointError(f"{directory}: not a checkpoint: it has no .safetensors file")
    elif present == {SINGLE_NAME}:
        tensors = read_header(directory / SINGLE_NAME)
    else:
        raise CheckpointError(
            f"{directory}: {INDEX_NAME} is missing; without it only a single {SINGLE_NAME} can be "
            f"read, and there is {_some(sorted(present))}"
        )
    return Checkpoint(directory, config, tensors, notes)


def _open_sharded(index_path: Path, present: set[str], notes: list[str]) -> dict[str, StoredTensor]:
    index = _read_json(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: `weight_map` is missing or empty")
    weight_map = cast(dict[str, Any], weight_map)
    for shard in weight_map.values():
        # a plain name only: an index must not reach outside its folder
        plain = isinstance(shard, str) and shard not in ("", ".", "..")
        if not plain or any(char in shard for char in "/\\\0"):
            raise CheckpointError(
                f"{index_path}: shard {shard!r} is not a plain file name in the same folder"
            )
    shards = set(cast(dict[str, str], weight_map).values())
    if absent := sorted(shards - present):
        raise CheckpointError(f"{index_path.parent}: absent, but in {INDEX_NAME}: {_some(absent)}")
    if stray := sorted(present - shards):
        raise CheckpointError(
            f"{index_path.parent}: not in {INDEX_NAME}: {_some(stray)}; move stray files away"
        )
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for shard in sorted(shards):
        for name, tensor in read_header(index_path.parent / shard).items():
            if name in tensors:
                problems.append(f"{name} is in both {tensors[name].file.name} and {shard}")
            elif name not in weight_map:
                problems.append(f"{name} is in {shard} but not in the index")
            elif weight_map[name] != shard:
                problems.append(f"{name} is in {shard}, the index says {weight_map[name]}")
            tensors[name] = tensor
    problems += [
        f"{name} is not in {shard}, where the index has it"
        for name, shard in weight_map.items()
        if name not in tensors
    ]
    if problems:
        raise CheckpointError(f"{index_path}: index and shards disagree: {_some(problems)}")
    _note_total_size(index, index_path, tensors, notes)
    return tensors


def _note_total_size(
    index: dict[str, Any], index_path: Path, tensors: dict[str, StoredTensor], notes: list[str]
) -> None:
    metadata = index.get("metadata")
    if not isinstance(metadata, dict):
        return
    declared = cast(dict[str, Any], metadata).get("total_size")
    total = sum(tensor.nbytes for tensor in tensors.values())
    if declared is not None and declared != total:
        notes.append(f"{index_path}: total_size is {declared}, the shards hold {total} bytes")


def _read_json(path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{path}: key {twice!r} is given twice")
        return table

    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return cast(dict[str, Any], value)


def _some(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
