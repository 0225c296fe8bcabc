"""Models by the name that the command line uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from k3fuse.errors import CheckpointError, InputError
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig, read_kimi_config, to_hf_dict
from k3fuse.models.kimi_parameters import kimi_init, kimi_parameters
from k3fuse.parameter import ParameterSpec

Config = KimiConfig


@dataclass(frozen=True)
class ModelFamily:
    """One architecture: how to read its config, build its forward and find its parameters."""

    name: str
    model_type: str
    read_config: Callable[[dict[str, object], str], Config]
    to_hf: Callable[[Config], dict[str, object]]
    build: Callable[[Config, str], nn.Module]
    parameters: Callable[[Config, Mapping[str, str] | None], list[ParameterSpec]]

    def init(self, config: Config) -> Callable[[str], str]:
        """How a synthetic checkpoint draws a parameter, by its path."""
        return partial(kimi_init, config)


def _kimi(name: str, model_type: str) -> ModelFamily:
    return ModelFamily(name, model_type, read_kimi_config, to_hf_dict, KimiModel, kimi_parameters)


FAMILIES: Mapping[str, ModelFamily] = {
    "kimi-k3": _kimi("kimi-k3", "kimi_k3"),
    "kimi-linear": _kimi("kimi-linear", "kimi_linear"),
}


def builtin_config(name: str) -> Config:
    """The built-in config of that name; InputError lists the names."""
    if name not in BUILTIN_CONFIGS:
        raise InputError(f"unknown model '{name}'; built in: {', '.join(BUILTIN_CONFIGS)}")
    return BUILTIN_CONFIGS[name]


def family_of(name: str) -> ModelFamily:
    """The family of a family name or of a built-in model name."""
    if name in FAMILIES:
        return FAMILIES[name]
    model_type = builtin_config(name).model_type
    return next(f for f in FAMILIES.values() if f.model_type == model_type)


def read_config(family: ModelFamily, raw: dict[str, object], where: str) -> Config:
    """The config of a checkpoint, which must be of the family that was asked for."""
    config = family.read_config(raw, where)
    if config.model_type != family.model_type:
        other = next(f.name for f in FAMILIES.values() if f.model_type == config.model_type)
        raise CheckpointError(f"{where} is a {other} checkpoint, not {family.name}: name {other}")
    return config
