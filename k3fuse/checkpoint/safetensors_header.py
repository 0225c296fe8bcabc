"""The safetensors container: reads and checks a file's header, and writes a file tensor by tensor.

Format: 8 bytes little-endian header length, the header (a JSON object of tensor name -> dtype,
shape, data_offsets), then the data; offsets count from the end of the header and leave no gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from k3fuse.errors import CheckpointError
from k3fuse.parameter import TensorSpec

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors dtype word -> torch dtype."""

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor in a checkpoint."""
    return math.prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name; reads the header only.

    Raises CheckpointError naming the file when the header is malformed, a tensor's bytes do not
    match its shape and dtype, tensors overlap or leave gaps, or the file is shorter (says by how
    many bytes) or longer than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise CheckpointError(f"{path}: a git-lfs pointer, not the file; run git lfs pull")
            if len(prefix) < 8 or length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: not a safetensors file ({size} bytes)")
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated: its header alone misses {8 + length - size} bytes"
                )
            # objects become tuples of pairs, so that a name given twice is seen
            header = json.loads(file.read(length), object_pairs_hook=tuple)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot read the safetensors header: {error}") from error
    if not isinstance(header, tuple):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")

    start = 8 + length
    tensors: dict[str, StoredTensor] = {}
    for name, pairs in cast(tuple[tuple[str, Any], ...], header):
        if name == "__metadata__":
            continue
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name} is given twice in the header")
        tensors[name] = _read_entry(path, name, pairs, start)
    _check_extent(path, tensors, start, size)
    return tensors


def _read_entry(path: Path, name: str, pairs: Any, start: int) -> StoredTensor:
    try:
        entry: dict[str, Any] = dict(pairs)
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers):
            raise ValueError("a shape or offset is not a non-negative integer")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name}: malformed header entry: {error}") from error
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{path}: tensor {name}: unknown dtype {dtype!r}")
    spec = TensorSpec(name, tuple(shape), dtype)
    if end - begin != tensor_bytes(spec):
        raise CheckpointError(
            f"{path}: tensor {name}: {dtype} {shape} takes {tensor_bytes(spec)} bytes, the header "
            f"gives it {end - begin}"
        )
    return StoredTensor(name, spec.shape, dtype, path, start + begin, end - begin)


def _check_extent(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    at = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != at:
            kind = "overlaps the one before it" if tensor.offset < at else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {tensor.name} {kind}")
        at += tensor.nbytes
    if size < at:
        raise CheckpointError(f"{path}: truncated: {at - size} of {at} bytes are missing")
    if size > at:
        raise CheckpointError(f"{path}: {size - at} bytes follow the last tensor")


def write_safetensors(
    path: Path, specs: Iterable[TensorSpec], make: Callable[[TensorSpec], torch.Tensor]
) -> None:
    """Write the tensors `make(spec)` to `path`, one at a time, so that one is in memory at once."""
    specs = list(specs)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        end = at + tensor_bytes(spec)
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts 8-byte aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec in specs:
            tensor = make(spec).contiguous()
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
