"""Fill a rank's weights, one value at a time, from a checkpoint or with random values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from k3fuse.checkpoint.files import Checkpoint
from k3fuse.checkpoint.reader import load_parameter
from k3fuse.checkpoint.safetensors_header import TORCH_DTYPES
from k3fuse.checkpoint.synth import draw_values
from k3fuse.errors import InputError
from k3fuse.ir import Graph
from k3fuse.parameter import ParameterSpec
from k3fuse.runtime.gpu.memory import RankMemory
from k3fuse.runtime.weights import LoadShard, shard_slice, stream_shards
from k3fuse.tensor_type import TensorType


def load_weights(
    recipe: Graph,
    load: LoadShard,
    memories: Mapping[int, RankMemory],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write every static value of a recipe to its place on each rank. Addresses do not change, so
    this also replaces the weights of a captured step, when nothing runs.

    One value at a time is on its way. `progress` gets the bytes of each value on one rank. Raises
    InputError naming the value that has no place, or not the shape or dtype of its place.
    """
    ranks = list(memories)
    for name, tensors in stream_shards(recipe, load, ranks):
        for rank, tensor in zip(ranks, tensors, strict=True):
            place = memories[rank].weights.get(name)
            if place is None:
                continue  # of a bucket that was left out
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise InputError(
                    f"weight %{name} is {tensor.dtype} {list(tensor.shape)}, launches read "
                    f"{place.dtype} {list(place.shape)}: compile the bundle again"
                )
            place.copy_(tensor)
        if progress is not None:
            progress(tensors[0].numel() * tensors[0].element_size())


def checkpoint_shards(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], tp: int, device: torch.device
) -> LoadShard:
    """Reads what a rank holds of a parameter, and only that, and takes it to the device."""
    by_path = {spec.path: spec for spec in specs}

    def load(path: str, type_: TensorType, rank: int) -> Tensor:
        cut = shard_slice(type_, tp, rank)
        return load_parameter(checkpoint, by_path[path], slice=cut).to(device)

    return load


def random_shards(
    specs: Sequence[ParameterSpec],
    init: Callable[[str], str],
    tp: int,
    device: torch.device,
    seed: int = 0,
) -> LoadShard:
    """Draws what a rank holds of a parameter on the device, by the rules of `checkpoint.synth`.

    Equal seeds give equal values on one kind of device; they are not those that `synth` writes.
    """
    by_path = {spec.path: spec for spec in specs}

    def load(path: str, type_: TensorType, rank: int) -> Tensor:
        shape = type_.local_shape(tp)
        who = rank if type_.placement.is_shard else 0
        digest = hashlib.blake2b(f"{seed}:{path}:{who}".encode(), digest_size=7).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
        dtype, fan_in = TORCH_DTYPES[by_path[path].dtype], type_.shape[-1:]
        return draw_values(_sizes(shape), init(path), dtype, generator, _sizes(fan_in))

    return load


def _sizes(shape: Sequence[int | str]) -> tuple[int, ...]:
    """The shape of a parameter, which has no symbols."""
    assert all(isinstance(size, int) for size in shape)
    return tuple(map(int, shape))
