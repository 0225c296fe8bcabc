"""Writes a synthetic checkpoint: random values under the real names, shapes and dtypes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from k3fuse.checkpoint.files import CONFIG_NAME, INDEX_NAME
from k3fuse.checkpoint.safetensors_header import TORCH_DTYPES, tensor_bytes, write_safetensors
from k3fuse.errors import InputError
from k3fuse.parameter import ParameterSpec, TensorSpec


def synthesize(
    specs: Iterable[ParameterSpec],
    config_dict: Mapping[str, Any],
    directory: Path | str,
    *,
    init: Callable[[str], str],
    seed: int = 0,
    shards: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write config.json, generation_config.json, `shards` safetensors files and their index.

    `init` says for a parameter path how its values are drawn:
    `normal S [first N]` (mean 0, standard deviation S; entries from N on are zero),
    `around_one S` (mean 1), `fan_in` (variance 1 / last dimension), `bytes LOW HIGH` (uniform,
    both included). Values depend on `seed` and the tensor's name only, not on `shards`. One tensor
    is in memory at a time; `progress` gets the bytes of each after it is written.

    The target must not exist or be empty. Everything is written beside it and renamed at the end,
    so that an interrupted run leaves nothing behind. Raises InputError for a target that is in use
    or has too little disk space, and for more shards than tensors.
    """
    directory = Path(directory).absolute()
    tensors: dict[str, tuple[TensorSpec, str]] = {}
    for spec in specs:
        for source in spec.sources:
            tensors.setdefault(source.name, (source, init(spec.path)))
    _check_target(directory, [spec for spec, _ in tensors.values()], shards)

    def draw(spec: TensorSpec) -> torch.Tensor:
        tensor = draw_tensor(spec, tensors[spec.name][1], seed)
        if progress is not None:
            progress(tensor_bytes(spec))
        return tensor

    partial_directory = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial_directory.chmod(0o755)
        weight_map: dict[str, str] = {}
        groups = _split([spec for spec, _ in tensors.values()], shards)
        for number, group in enumerate(groups, start=1):
            name = f"model-{number:05d}-of-{shards:05d}.safetensors"
            write_safetensors(partial_directory / name, group, draw)
            weight_map |= {spec.name: name for spec in group}
        total = sum(tensor_bytes(spec) for spec, _ in tensors.values())
        write = partial(_write_json, partial_directory)
        write(INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        write("generation_config.json", _generation_config(config_dict))
        write(CONFIG_NAME, config_dict)
        os.rename(partial_directory, directory)
    except BaseException as error:
        shutil.rmtree(partial_directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError(f"{directory}: cannot be written: {error}") from error
        raise


def draw_tensor(spec: TensorSpec, how: str, seed: int) -> torch.Tensor:
    """The synthetic values of one tensor; `how` is a rule as in `synthesize`."""
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return draw_values(spec.shape, how, TORCH_DTYPES[spec.dtype], generator, spec.shape[-1:])


def draw_values(
    shape: tuple[int, ...],
    how: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    fan_in: tuple[int, ...],
) -> torch.Tensor:
    """Values by a rule as in `synthesize`, on the generator's device. fan_in: the last dimension of
    the whole tensor, of which this may be a part; empty for a scalar."""
    kind, *numbers = how.split()
    draw = partial(torch.randn, shape, generator=generator, device=generator.device)
    match kind, numbers:
        case "bytes", [low, high]:
            values = torch.empty(shape, dtype=torch.uint8, device=generator.device)
            return values.random_(int(low), int(high) + 1, generator=generator)
        case "normal", [std, *first]:
            values = draw() * float(std)
            if first:
                values.view(-1)[int(first[1]) :] = 0
        case "around_one", [std]:
            values = 1 + draw() * float(std)
        case "fan_in", []:
            values = draw() / math.sqrt(fan_in[0])
        case _:
            raise ValueError(f"unknown rule {how!r}")
    return values.to(dtype)


def _check_target(directory: Path, tensors: list[TensorSpec], shards: int) -> None:
    if not 1 <= shards <= len(tensors):
        raise InputError(f"{shards} shards: expected 1 to {len(tensors)}, the number of tensors")
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise InputError(f"{directory}: exists and is not an empty directory; choose another")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory.parent}: cannot be created: {error}") from None
    total = sum(map(tensor_bytes, tensors))
    free = shutil.disk_usage(directory.parent).free
    if total > free:
        raise InputError(f"{directory}: the checkpoint takes {total} bytes, {free} are free there")


def _split(tensors: list[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Consecutive groups of about equal bytes, none empty."""
    total = sum(map(tensor_bytes, tensors))
    groups: list[list[TensorSpec]] = [[]]
    written = 0
    for position, spec in enumerate(tensors):
        left, groups_left = len(tensors) - position, shards - len(groups)
        full = written * shards >= total * len(groups)
        if groups[-1] and groups_left and (full or left == groups_left):
            groups.append([])
        groups[-1].append(spec)
        written += tensor_bytes(spec)
    return groups


def _generation_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
    text = cast(Mapping[str, Any], config_dict.get("text_config", config_dict))
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: text[key] for key in keys if key in text}


def _write_json(directory: Path, name: str, value: Mapping[str, Any]) -> None:
    (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
