"""From the words on a command line to a config, a checkpoint and weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from k3fuse.checkpoint.audit import AuditReport, audit
from k3fuse.checkpoint.files import Checkpoint, open_checkpoint
from k3fuse.checkpoint.reader import load_into, load_parameter
from k3fuse.errors import InputError
from k3fuse.ir import Value
from k3fuse.models.registry import (
    FAMILIES,
    Config,
    ModelFamily,
    builtin_config,
    family_of,
    read_config,
)
from k3fuse.parameter import ParameterSpec
from k3fuse.runtime.bundle import Bundle, CheckpointRef


@dataclass(frozen=True)
class Source:
    """A model to compile or run, with the checkpoint of its weights if there is one."""

    family: ModelFamily
    config: Config
    checkpoint: Checkpoint | None
    specs: list[ParameterSpec]
    report: AuditReport | None

    def meta_module(self) -> nn.Module:
        """The stock forward without storage: for tracing."""
        return self.family.build(self.config, "meta")

    def module(self, progress: Callable[[int], None] | None = None) -> nn.Module:
        """The stock forward with the checkpoint's weights."""
        module = self.meta_module()
        load_into(module, self.required_checkpoint(), self.specs, progress)
        return module

    def required_checkpoint(self) -> Checkpoint:
        if self.checkpoint is None:
            raise InputError("this needs weights: give a checkpoint directory")
        return self.checkpoint

    def reference(self) -> CheckpointRef | None:
        """What a bundle remembers of the checkpoint: where it is, and what it must hold."""
        if self.checkpoint is None:
            return None
        layout = sorted((t.name, t.dtype, list(t.shape)) for t in self.checkpoint.tensors.values())
        text = json.dumps([self.checkpoint.config, layout], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return CheckpointRef(str(self.checkpoint.directory.resolve()), digest)

    def parameter(self, path: str) -> Tensor:
        """One parameter by its path in the module."""
        spec = self._by_path()[path]
        return load_parameter(self.required_checkpoint(), spec)

    def weight(self, value: Value) -> Tensor:
        """The parameter that a graph input is bound to."""
        return self.parameter(value.binding)

    def parameter_bytes(self) -> int:
        """Stored bytes of all tensors that the model uses."""
        report = self.report
        return 0 if report is None else report.nbytes

    def _by_path(self) -> dict[str, ParameterSpec]:
        return {spec.path: spec for spec in self.specs}


def open_source(model: str, directory: Path) -> Source:
    """Open and audit a checkpoint; nothing is allocated before all of it has been checked."""
    family = family_of(model)
    checkpoint = open_checkpoint(directory)
    config = read_config(family, checkpoint.config, f"{directory}/config.json")
    if model not in FAMILIES and config != builtin_config(model):
        raise InputError(
            f"{directory}/config.json is not the built-in config {model}: name the family, "
            f"{family.name}, to compile the checkpoint as it is"
        )
    specs = family.parameters(config, checkpoint.dtypes)
    report = audit(checkpoint, specs, tied=config.tie_word_embeddings, values=True)
    return Source(family, config, checkpoint, specs, report)


def bundle_source(bundle: Bundle, directory: Path | None) -> Source:
    """The weights of a bundle: its own checkpoint, or the one given with the same tensors."""
    known = bundle.manifest.checkpoint
    if directory is None and known is None:
        raise InputError(
            f"{bundle.directory} was compiled without weights: name a checkpoint with --checkpoint"
        )
    place = directory if directory is not None else Path(known.path if known is not None else "")
    if directory is None and not place.is_dir():
        raise InputError(
            f"{bundle.directory} was compiled from {place}, which is not there: "
            "say with --checkpoint where the checkpoint is now"
        )
    source = open_source(bundle.manifest.model, place)
    found = source.reference()
    if known is not None and found is not None and found.fingerprint != known.fingerprint:
        raise InputError(
            f"{found.path} holds other tensors, or another config, than the checkpoint that "
            f"{bundle.directory} was compiled for ({known.path}): compile again"
        )
    return source


def builtin_source(model: str) -> Source:
    """A built-in config without weights."""
    family, config = family_of(model), builtin_config(model)
    return Source(family, config, None, family.parameters(config, None), None)


def parse_ints(text: str, flag: str) -> tuple[int, ...]:
    """A comma-separated list of integers; InputError names the flag and the bad part."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch("-?[0-9]{1,18}", part):
            raise InputError(f"{flag} {text}: '{part}' is not an integer; write for example 1,8")
    return tuple(int(part) for part in parts)


def use_one_thread() -> None:
    """Small matrices run faster, and the same everywhere, on one thread."""
    torch.set_num_threads(1)
