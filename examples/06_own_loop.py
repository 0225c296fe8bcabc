"""Decode in a loop of your own: requests join and leave, on a GPU's engine or with stock torch.

python examples/06_own_loop.py                # a tiny model on the CPU
python examples/06_own_loop.py BUNDLE         # a bundle with kernels, on this machine's GPU
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from k3fuse.checkpoint.synth import synthesize
from k3fuse.cli.device import open_engine
from k3fuse.cli.load import builtin_source, bundle_source, open_source
from k3fuse.models.kimi import KimiModel
from k3fuse.runtime.bundle import read_bundle
from k3fuse.runtime.executor import Capacity, Executor
from k3fuse.runtime.slots import Lease, SlotManager
from k3fuse.runtime.stock import StockExecutor

BATCH = 2
"""Requests of the bucket that the loop steps; the rest of a step is padding."""


def serve(executor: Executor, arrivals: Sequence[tuple[list[int], int]]) -> Iterator[str]:
    """Each arrival is a prompt and how many tokens it wants. Yields a line as each ends."""
    slots, waiting = SlotManager(executor.capacity), list(arrivals)
    live: dict[Lease, tuple[list[int], int]] = {}
    while waiting or live:
        while waiting and len(live) < BATCH:
            prompt, wanted = waiting.pop(0)
            lease = slots.join(len(prompt) + wanted)
            executor.reset([lease.slot])  # the slot may hold what the last request left
            result = executor.prefill(slots.inputs([lease], [prompt], 1), len(prompt))
            lease.length += len(prompt)
            live[lease] = ([*prompt, int(result.tokens[-1])], wanted)
        rows = [[tokens[-1]] for tokens, _ in live.values()]
        result = executor.step(slots.inputs(list(live), rows, BATCH), 1, "commit")
        for lease, token in zip(list(live), result.tokens.tolist(), strict=False):
            tokens, wanted = live[lease]
            lease.length += 1
            tokens.append(token)
            if wanted <= 2:  # one came from the prefill
                slots.leave(lease)
                del live[lease]
                yield f"slot {lease.slot}: {tokens}"
            else:
                live[lease] = (tokens, wanted - 1)


def main(arguments: Sequence[str] = ()) -> None:
    arrivals = [([1, 2, 3], 6), ([7, 5], 3), ([9], 4), ([4, 4, 4, 4], 5)]
    if arguments:
        bundle = read_bundle(Path(arguments[0]))
        with open_engine(bundle, bundle_source(bundle, None)) as engine:
            for line in serve(engine, arrivals):
                print(line)
        return
    torch.set_num_threads(1)
    for line in serve(tiny_executor(), arrivals):
        print(line)


def tiny_executor() -> Executor:
    with tempfile.TemporaryDirectory() as folder:
        tiny, checkpoint = builtin_source("kimi-k3-tiny"), Path(folder) / "checkpoint"
        family, config = tiny.family, tiny.config
        synthesize(tiny.specs, family.to_hf(config), checkpoint, init=family.init(config), seed=0)
        model = open_source("kimi-k3", checkpoint).module()
    assert isinstance(model, KimiModel)
    return StockExecutor(model, Capacity(slots=BATCH, pages=8, page_size=16, table=4))


if __name__ == "__main__":
    main(sys.argv[1:])
