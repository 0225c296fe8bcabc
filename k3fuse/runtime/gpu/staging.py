"""Step inputs on their way to the GPU: packed into one pinned buffer, one copy a rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.runtime.gpu.layout import BucketLayout

DEPTH = 4
"""Steps that the host may be ahead of the GPU."""


class Staging:
    """Buffers for the inputs of one bucket, used in turn."""

    def __init__(self, layout: BucketLayout) -> None:
        self._buffers = [_Buffer(layout) for _ in range(DEPTH)]

    def fill(self, tensors: Mapping[str, Tensor], step: int) -> _Buffer:
        """A buffer with these inputs, by the last part of their name, and the number of steps that
        came before. InputError for an input that is missing or of another shape."""
        buffer = self._buffers[step % DEPTH]
        buffer.fill(tensors, step)
        return buffer


class _Buffer:
    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        self._bytes = torch.zeros(layout.input_bytes, dtype=torch.uint8).pin_memory()
        self._views = {
            name: self._bytes[p.offset : p.offset + p.bytes].view(p.dtype.to_torch()).view(p.shape)
            for name, p in layout.inputs.items()
        }
        self._copies: list[torch.cuda.Event] = []

    def fill(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for event in self._copies:
            event.synchronize()
        self._copies.clear()
        for full, view in self._views.items():
            if full == "step":
                view.fill_(step)
                continue
            name = full.rpartition(".")[2]
            if name not in tensors:
                raise InputError(f"step {self._layout.bucket} needs the input '{name}'")
            if tensors[name].shape != view.shape:
                raise InputError(
                    f"input '{name}' has shape {list(tensors[name].shape)}, bucket "
                    f"{self._layout.bucket} takes {list(view.shape)}"
                )
            view.copy_(tensors[name])

    def copy_to(self, device_bytes: Tensor) -> None:
        """Copy to the device on the current stream."""
        device_bytes.copy_(self._bytes, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device_bytes.device))
        self._copies.append(event)
