"""Checkpoint to tokens: compile, then decode with the fused plan and with the stock forward."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from k3fuse.checkpoint.synth import synthesize
from k3fuse.cli.load import builtin_source, open_source
from k3fuse.compiler import buckets_of, bundle_contents, compile_bucket
from k3fuse.models.kimi import KimiModel
from k3fuse.options import CompileOptions
from k3fuse.runtime.bundle import read_bundle, write_bundle
from k3fuse.runtime.executor import Capacity
from k3fuse.runtime.generate import generate
from k3fuse.runtime.reference import ReferenceExecutor
from k3fuse.runtime.stock import StockExecutor

PROMPTS = [[1, 2, 3], [7, 5]]
NEW_TOKENS = 12


def main() -> None:
    torch.set_num_threads(1)
    options = CompileOptions(target="gb300", tp=4, batches=(2,), max_context=64, page_size=32)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, directory = Path(folder) / "checkpoint", Path(folder) / "bundle"
        tiny = builtin_source("kimi-k3-tiny")
        family, config = tiny.family, tiny.config
        synthesize(tiny.specs, family.to_hf(config), checkpoint, init=family.init(config), seed=0)

        source = open_source("kimi-k3", checkpoint)
        module = source.meta_module()
        compiled = [compile_bucket(module, "kimi-k3", b, options) for b in buckets_of(options)]
        contents = bundle_contents("kimi-k3", config, options, compiled, source.reference())
        write_bundle(directory, contents)

        model = source.module()
        assert isinstance(model, KimiModel)
        fused = ReferenceExecutor.load(read_bundle(directory), model)
    stock = StockExecutor(model, Capacity.of(options))
    runs = [generate(e, PROMPTS, NEW_TOKENS, buckets=options.batches) for e in (fused, stock)]
    for prompt, mine, theirs in zip(PROMPTS, runs[0].tokens, runs[1].tokens, strict=True):
        print(f"{prompt} -> {mine}", "as stock" if mine == theirs else f"stock: {theirs}")
    assert runs[0].tokens == runs[1].tokens
    same = all(map(torch.equal, runs[0].logits, runs[1].logits))
    print("logits of both are", "equal in every bit" if same else "not bit-equal")


if __name__ == "__main__":
    main()
