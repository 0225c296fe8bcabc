"""How a model parameter is found in a checkpoint: the words shared by models and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as a checkpoint stores it. `dtype` is the safetensors word: BF16, F32, U8, ..."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a model and the checkpoint tensors it is made of.

    `path` is the parameter's path in the torch module. With one source and `stacked` false the
    parameter is that tensor (reshaped to `shape` when the stored shape differs); with `stacked`
    true its leading dimension counts the sources in order (experts).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[TensorSpec, ...]
    stacked: bool = False
