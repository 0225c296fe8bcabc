"""From a bundle on a command line to an engine on this machine's GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from k3fuse.cli.load import builtin_source, bundle_source
from k3fuse.cli.output import progress
from k3fuse.errors import InputError
from k3fuse.runtime.bundle import Bundle
from k3fuse.runtime.gpu.engine import Engine
from k3fuse.runtime.gpu.ranks import Loopback, RankMode, VirtualRanks
from k3fuse.runtime.gpu.weights import checkpoint_shards, random_shards
from k3fuse.runtime.weights import LoadShard


def require_gpu() -> None:
    """InputError when torch sees no CUDA GPU."""
    if not torch.cuda.is_available():
        raise InputError(
            "--device cuda: torch sees no CUDA GPU here (k3fuse doctor says what is missing); "
            "--device cpu runs the plan on simulated ranks"
        )


def rank_mode(bundle: Bundle, *, loopback: bool) -> RankMode:
    """All ranks on this GPU, or one that plays its peers."""
    tp = bundle.manifest.tp
    return Loopback(tp) if loopback else VirtualRanks(tp)


def open_engine(
    bundle: Bundle, checkpoint: Path | None, mode: RankMode, random_weights: int | None
) -> Engine:
    """Load a bundle with the weights of its checkpoint, or random ones of a seed."""
    require_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    with progress("load") as task:
        done = 0

        def show(stage: str, now: int, total: int) -> None:
            nonlocal done
            task.label(stage)
            task.total(total)
            task.advance(now - done)
            done = now if now < total else 0

        load = _shards(bundle, checkpoint, random_weights, device)
        return Engine.load(bundle, load, mode, progress=show)


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
