"""The engine where there is a GPU and the compiler: graphs, launches, op by op, all ranks, errors.

The same and more runs on a GPU without the compiler by benchmarks/decode.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from k3fuse.cli.device import open_engine
from k3fuse.cli.load import builtin_source, bundle_source
from k3fuse.errors import InputError
from k3fuse.runtime.bundle import read_bundle
from k3fuse.runtime.gpu.engine import Engine
from k3fuse.runtime.slots import SlotManager
from k3fuse.runtime.stock import StockExecutor
from tests.cli.command import call_ok
from tests.runtime.conftest import prompt

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", params=[(1, "sm_90a"), (2, "sm_90a:64")], ids=["tp1", "tp2"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiles for sm_90a")
    tp, target = request.param
    folder = tmp_path_factory.mktemp("engine")
    call_ok("synth", "kimi-k3-tiny", folder / "checkpoint")
    call_ok(
        *("compile", "kimi-k3", folder / "checkpoint", "--tp", tp, "--target", target),
        *("--batch", "1,2", "--max-context", 256, "--no-check", "-o", folder / "bundle"),
    )
    bundle = read_bundle(folder / "bundle")
    with open_engine(bundle, bundle_source(bundle, None)) as opened:
        yield opened


def test_graphs_equal_launches_and_are_near_stock(engine: Engine) -> None:
    """Two requests, eight steps; the first step starts from bits that stock has too."""
    model = bundle_source(engine.bundle, None).module()
    stock = StockExecutor(model, engine.capacity)  # pyright: ignore[reportArgumentType]
    runs: list[list[torch.Tensor]] = []
    for eager in (False, True):
        slots = SlotManager(engine.capacity)
        leases = [slots.join(64) for _ in range(2)]
        engine.reset([lease.slot for lease in leases])
        for lease, count in zip(leases, (5, 9), strict=True):
            inputs = slots.inputs([lease], [prompt(count, count)], 1)
            got = engine.prefill(inputs, count)
            if not eager:
                assert torch.equal(got.logits.cpu(), stock.prefill(inputs, count).logits)
            lease.length += count
        logits: list[torch.Tensor] = []
        for step in range(8):
            rows = [prompt(1, 100 + step), prompt(1, 200 + step)]
            inputs = slots.inputs(leases, rows, 2)
            logits.append(engine.step(inputs, 1, "commit", eager=eager).logits.clone())
            if step == 0 and not eager:
                wanted = stock.step(inputs, 1, "commit").logits
                off = (logits[0].cpu() - wanted).square().mean().sqrt()
                assert float(off) < 0.05 * float(wanted.std())
            for lease in leases:
                lease.length += 1
        runs.append(logits)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_all_that_the_layout_says_is_allocated(engine: Engine) -> None:
    assert engine.layout.total * len(engine.mode.mine) <= torch.cuda.memory_allocated()


def test_a_batch_without_a_bucket_is_named(engine: Engine) -> None:
    slots = SlotManager(engine.capacity)
    inputs = slots.inputs([slots.join(8)], [[1]], 7)
    with pytest.raises(InputError, match="no bucket for a step of 7 requests"):
        engine.step(inputs, 1, "commit")


def test_a_bundle_for_another_gpu_is_refused(engine: Engine, tmp_path: Path) -> None:
    call_ok(
        *("compile", "kimi-k3-tiny", "--no-weights", "--target", "sm_100a"),
        *("-o", tmp_path / "bundle"),
    )
    with (
        pytest.raises(InputError, match="was compiled for sm_100a"),
        open_engine(read_bundle(tmp_path / "bundle"), builtin_source("kimi-k3-tiny")),
    ):
        pass
