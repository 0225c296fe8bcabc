"""From a bundle on a command line to an engine on this machine's GPUs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from k3fuse import __version__
from k3fuse.cli.load import Source, builtin_source, bundle_source
from k3fuse.cli.output import progress
from k3fuse.errors import InputError
from k3fuse.runtime.agreement import Group
from k3fuse.runtime.bundle import MANIFEST, Bundle
from k3fuse.runtime.gpu.engine import Engine
from k3fuse.runtime.gpu.ranks import Loopback, ProcessRanks, RankMode, VirtualRanks, distributed
from k3fuse.runtime.gpu.weights import checkpoint_shards, random_shards
from k3fuse.runtime.weights import LoadShard


def engine_source(bundle: Bundle, checkpoint: Path | None, random_weights: int | None) -> Source:
    """Where the weights come from: the bundle's checkpoint, or with a seed none."""
    if random_weights is None:
        return bundle_source(bundle, checkpoint)
    if checkpoint is not None:
        raise InputError("--random-weights and --checkpoint exclude each other: leave one out")
    return builtin_source(bundle.manifest.model)


@contextmanager
def open_engine(
    bundle: Bundle, source: Source, *, loopback: bool = False, seed: int = 0
) -> Generator[Engine]:
    """An engine with a checkpoint's weights, or with random ones of `seed` where there is none.

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
            engine = Engine.load(bundle, _shards(source, tp, seed), mode, progress=task.show)
        with group.stage("run"), group.watch():
            yield engine
        if group.world > 1:
            distributed().destroy_process_group()


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
    distributed().init_process_group("nccl", device_id=torch.device("cuda", _local_rank()))
    return ProcessRanks(group.world, group.rank)


def _local_rank() -> int:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise InputError(
            f"LOCAL_RANK {rank}: this machine has {torch.cuda.device_count()} GPUs: start one "
            "process a GPU"
        )
    return rank


def _shards(source: Source, tp: int, seed: int) -> LoadShard:
    device = torch.device("cuda", torch.cuda.current_device())
    if source.checkpoint is not None:
        return checkpoint_shards(source.checkpoint, source.specs, tp, device)
    return random_shards(source.specs, source.family.init(source.config), tp, device, seed)
