"""From a bundle on a command line to an engine on this machine's GPUs."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from k3fuse import __version__
from k3fuse.cli.load import builtin_source, bundle_source
from k3fuse.cli.output import progress
from k3fuse.errors import InputError
from k3fuse.runtime.agreement import Group
from k3fuse.runtime.bundle import MANIFEST, Bundle
from k3fuse.runtime.gpu.engine import Engine
from k3fuse.runtime.gpu.ranks import Loopback, ProcessRanks, RankMode, VirtualRanks
from k3fuse.runtime.gpu.weights import checkpoint_shards, random_shards
from k3fuse.runtime.weights import LoadShard


@contextmanager
def open_engine(
    bundle: Bundle,
    checkpoint: Path | None,
    *,
    loopback: bool = False,
    random_weights: int | None = None,
) -> Generator[Engine]:
    """An engine with the weights of the bundle's checkpoint, or random ones of a seed.

    Under torchrun this process is one rank of the bundle's group, and the block is a stage that all
    ranks leave together. Otherwise all ranks run on one GPU, or with `loopback` one rank alone.
    """
    require_gpu()
    tp = bundle.manifest.tp
    with _group(tp, alone=loopback) as group:
        if group.world > 1:
            group.agree("start", _identity(bundle))
            with group.stage("connect"):
                mode: RankMode = _process(group)
        else:
            mode = Loopback(tp) if loopback else VirtualRanks(tp)
        with group.stage("load"), progress("load") as task:
            device = torch.device("cuda", torch.cuda.current_device())
            load = _shards(bundle, checkpoint, random_weights, device)
            engine = Engine.load(bundle, load, mode, progress=task.show)
        with group.stage("run"), group.watch():
            yield engine
        if group.world > 1:
            _distributed().destroy_process_group()


def _group(tp: int, *, alone: bool) -> Group:
    """The processes that torchrun started, or this one."""
    started = "WORLD_SIZE" in os.environ and not alone
    return Group.from_environment(tp) if started else Group.alone()


def require_gpu() -> None:
    """InputError when torch sees no CUDA GPU."""
    if not torch.cuda.is_available():
        raise InputError(
            "--device cuda: torch sees no CUDA GPU here (k3fuse doctor says what is missing); "
            "--device cpu runs the plan on simulated ranks"
        )


def _identity(bundle: Bundle) -> dict[str, str]:
    """What all ranks must have in common before any of them allocates."""
    manifest = (bundle.directory / MANIFEST).read_bytes()
    return {
        "bundle": hashlib.sha256(manifest).hexdigest(),
        "k3fuse": __version__,
        "torch": torch.__version__,
        "GPU": torch.cuda.get_device_name(_local_rank()),
    }


def _process(group: Group) -> ProcessRanks:
    """Take the GPU of this process and join torch's own group."""
    torch.cuda.set_device(_local_rank())
    distributed = _distributed()
    distributed.init_process_group("nccl", device_id=torch.device("cuda", _local_rank()))
    return ProcessRanks(group.world, group.rank)


def _local_rank() -> int:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise InputError(
            f"LOCAL_RANK {rank}: this machine has {torch.cuda.device_count()} GPUs: start one "
            "process a GPU"
        )
    return rank


def _distributed() -> Any:
    """torch.distributed, whose functions have no types."""
    return importlib.import_module("torch.distributed")


def _shards(
    bundle: Bundle, checkpoint: Path | None, random_weights: int | None, device: torch.device
) -> LoadShard:
    tp = bundle.manifest.tp
    if random_weights is not None:
        if checkpoint is not None:
            raise InputError("--random-weights and --checkpoint exclude each other: leave one out")
        drawn = builtin_source(bundle.manifest.model)
        init = drawn.family.init(drawn.config)
        return random_shards(drawn.specs, init, tp, device, random_weights)
    source = bundle_source(bundle, checkpoint)
    return checkpoint_shards(source.required_checkpoint(), source.specs, tp, device)
