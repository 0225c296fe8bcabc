"""Small plans with their kernels chosen, and the memory of their ranks on the CPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from k3fuse.compiler import CompiledBucket, buckets_of, compile_bucket
from k3fuse.ir import Graph
from k3fuse.lowering.recipe import merge_recipes, weight_recipe
from k3fuse.lowering.select import Kernels
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.options import CompileOptions
from k3fuse.runtime.gpu.layout import MemoryLayout, make_layout
from k3fuse.target import get_target


class Made(NamedTuple):
    options: CompileOptions
    buckets: list[CompiledBucket]
    recipe: Graph
    layout: MemoryLayout


@functools.cache
def made(model: str = "kimi-k3-tiny", tp: int = 2, batches: tuple[int, ...] = (1, 3)) -> Made:
    """Buckets of a built-in model for the `h200`, nothing compiled to machine code."""
    options = CompileOptions(
        "sm_90a:64", tp=tp, batches=batches, max_context=64, page_size=8, kernels=True
    )
    module, kernels = KimiModel(BUILTIN_CONFIGS[model], "meta"), Kernels(get_target("sm_90a:64"))
    buckets = [
        compile_bucket(module, model, bucket, options, kernels=kernels)
        for bucket in buckets_of(options)
    ]
    parts = [(b.bucket, b.plan, b.selection) for b in buckets if b.selection is not None]
    assert len(parts) == len(buckets)
    recipe = merge_recipes([weight_recipe(b.graph) for b in buckets])
    return Made(options, buckets, recipe, make_layout(options, parts))


CPU = torch.device("cpu")
