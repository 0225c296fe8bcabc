from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import fx, nn

from k3fuse import functional
from k3fuse.errors import InputError
from k3fuse.models.kimi import DecodeState, KdaState, KimiModel, MlaState, Mode, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.models.kimi_parameters import kimi_parameters

TINY = ("kimi-k3-tiny", "kimi-k3-tiny-9", "kimi-linear-tiny")
PAGE, ROWS = 4, 4
PLACEHOLDER = cast(torch.Tensor, fx.PH)  # pyright: ignore[reportPrivateImportUsage]
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


def build(name: str, dtype: torch.dtype | None = torch.float64) -> KimiModel:
    """Random weights as in K3 spec 7.1; None keeps the dtypes of the checkpoint."""
    model = KimiModel(BUILTIN_CONFIGS[name])
    generator = torch.default_generator.manual_seed(0)
    for path, parameter in model.named_parameters():
        shape = parameter.shape
        if parameter.dtype == torch.uint8:
            low, high = (122, 125) if path.endswith("_scale") else (0, 256)
            parameter.copy_(torch.randint(low, high, shape, generator=generator))
            continue
        noise = torch.randn(shape, generator=generator)
        if "norm" in path:
            noise = 1 + 0.1 * noise
        elif path.endswith(("A_log", "conv1d.weight")):
            noise = 0.5 * noise
        elif path.endswith("e_score_correction_bias"):
            noise = 0.1 * noise
        elif not path.endswith("dt_bias"):
            noise = noise / math.sqrt(shape[-1])
        parameter.copy_(noise)
    return model if dtype is None else model.to(dtype)


class Run:
    """One request after another step, in slot `slot` with its own pages."""

    def __init__(self, model: KimiModel, slot: int = 0) -> None:
        self.model, self.slot = model, slot
        self.state: DecodeState = model.new_state(slots=3, pages=30, page_size=PAGE, rows=ROWS)
        self.length = 0

    def step(self, tokens: list[int], mode: Mode = "commit") -> torch.Tensor:
        inputs = StepInputs(
            torch.tensor(tokens), ints(self.length), pages(self.slot)[None], ints(self.slot)
        )
        out = self.model(inputs, self.state, rows_per_request=len(tokens), mode=mode)
        self.state = out.state
        if mode == "commit":
            self.length += len(tokens)
        assert torch.equal(out.tokens, functional.argmax(out.logits))
        return out.logits

    def commit(self, accepted: int) -> None:
        self.state = self.model.commit(self.state, ints(self.slot), ints(accepted))
        self.length += accepted


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages(slot: int) -> torch.Tensor:
    """Ten pages of a request, scattered over the cache."""
    return (torch.arange(10, dtype=torch.int32) * 3 + slot).flip(0)


def prompt(count: int, seed: int = 0) -> list[int]:
    generator = torch.default_generator.manual_seed(seed)
    return [int(t) for t in torch.randint(0, 512, (count,), generator=generator)]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    config = BUILTIN_CONFIGS[name]
    model = KimiModel(config, device="meta")
    made = {path: (tuple(p.shape), p.dtype) for path, p in model.named_parameters()}
    assert made == {p.path: (p.shape, DTYPES[p.dtype]) for p in kimi_parameters(config)}


@pytest.mark.parametrize("name", TINY)
def test_prefill_by_chunks_equals_token_by_token(name: str) -> None:
    model, tokens = build(name), prompt(13)
    whole = Run(model).step(tokens)
    single, chunked = Run(model), Run(model, slot=2)
    close(torch.cat([single.step([t]) for t in tokens]), whole)
    close(torch.cat([chunked.step(tokens[i : i + 5]) for i in (0, 5, 10)]), whole)


@pytest.mark.parametrize("name", TINY)
def test_a_batch_equals_its_requests_alone(name: str) -> None:
    model = build(name)
    texts = [prompt(6, seed) for seed in range(3)]
    alone = [Run(model, slot).step(text) for slot, text in enumerate(texts)]
    state = model.new_state(slots=3, pages=30, page_size=PAGE, rows=ROWS)
    order = (2, 0, -1, 1)
    outputs: list[torch.Tensor] = []
    for start in (0, 2, 4):
        rows = [texts[slot][start : start + 2] if slot >= 0 else [0, 0] for slot in order]
        inputs = StepInputs(
            torch.tensor(rows).flatten(),
            torch.full((4,), start, dtype=torch.int32),
            torch.stack([pages(max(slot, 0)) for slot in order]),
            ints(*order),
        )
        logits, _, _, state = model(inputs, state, rows_per_request=2)
        outputs.append(logits.view(4, 2, -1))
    together = torch.cat(outputs, dim=1)
    for at, slot in enumerate(order):
        if slot >= 0:
            close(together[at], alone[slot])


@pytest.mark.parametrize("name", TINY)
def test_verify_and_commit_equal_serial(name: str) -> None:
    model, tokens, drafts, after = build(name), prompt(5), prompt(ROWS, 1), prompt(2, 2)
    for accepted in range(ROWS + 1):
        serial, speculative = Run(model), Run(model)
        serial.step(tokens)
        speculative.step(tokens)
        logits = speculative.step(drafts, mode="verify")
        speculative.commit(accepted)
        for row in range(accepted):
            close(logits[row : row + 1], serial.step([drafts[row]]))
        assert speculative.length == serial.length
        for token in after:
            close(speculative.step([token]), serial.step([token]))


def test_reset_forgets_the_former_request() -> None:
    # Fault B53.
    model, tokens = build("kimi-k3-tiny"), prompt(3)
    run, fresh = Run(model, slot=1), Run(model, slot=1)
    run.state = [type(s)(*(torch.full_like(t, math.nan) for t in s)) for s in run.state]
    run.state = model.reset(run.state, ints(1))
    assert torch.equal(run.step(tokens), fresh.step(tokens))


@pytest.mark.parametrize("poison_slot", [0, 2])
def test_a_poisoned_request_stays_alone(poison_slot: int) -> None:
    # Faults B45 and B53: NaN in one request's state leaves the other rows' bits alone.
    model = build("kimi-k3-tiny", dtype=None)
    state = model.new_state(slots=3, pages=30, page_size=PAGE, rows=ROWS)
    inputs = StepInputs(
        torch.tensor(prompt(3)), ints(0, 0, 0), torch.stack([pages(s) for s in range(3)]),
        ints(0, 1, 2),
    )  # fmt: skip
    clean = model(inputs, state).logits
    dirty_state: DecodeState = []
    for layer in state:
        if isinstance(layer, KdaState):
            layer = layer._replace(recurrent=layer.recurrent.clone())
            layer.recurrent[poison_slot] = math.nan
        dirty_state.append(layer)
    dirty = model(inputs, dirty_state).logits
    for row in range(3):
        assert torch.equal(dirty[row], clean[row]) == (row != poison_slot)
    assert model(inputs, dirty_state).tokens[poison_slot] == 0


@pytest.mark.parametrize("name", TINY)
def test_dtypes(name: str) -> None:
    for dtype, exact in ((None, torch.float32), (torch.float64, torch.float64)):
        model = build(name, dtype)
        run = Run(model)
        assert run.step(prompt(2)).dtype == exact
        run.step(prompt(2), mode="verify")
        run.commit(1)
        plain = torch.bfloat16 if dtype is None else dtype
        for layer in run.state:
            for field, tensor in zip(layer._fields, layer, strict=True):
                assert tensor.dtype == (exact if field == "recurrent" else plain), field


def test_a_float64_run_never_narrows() -> None:
    model = build("kimi-k3-tiny")
    seen: set[torch.dtype] = set()

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            seen.add(output.dtype)

    for module in model.modules():
        module.register_forward_hook(note)
    Run(model).step(prompt(2))
    assert seen == {torch.float64}


@pytest.mark.parametrize("name", TINY)
def test_float32_is_near_float64(name: str) -> None:
    narrow = Run(build(name, torch.float32)).step(prompt(6))
    wide = Run(build(name)).step(prompt(6))
    assert narrow.dtype == torch.float32
    error = (narrow - wide).square().sum() / wide.square().sum()
    assert error.sqrt() < 1e-4


def test_unknown_activation_is_refused() -> None:
    config = dataclasses.replace(BUILTIN_CONFIGS["kimi-k3-tiny"], activation="gelu")
    with pytest.raises(InputError, match="gelu"):
        KimiModel(config, device="meta")


def attn_res_sources(config: KimiConfig) -> list[int]:
    """Sources of every mix in order, running sum included (K3 spec 2.3)."""
    block, counts = config.attn_res_block_size, list[int]()
    if block is None:
        return counts
    for layer in range(config.num_layers):
        if layer > 0:
            counts.append(math.ceil(layer / block) + 1)
        counts.append(layer // block + 2)
    return [*counts, (config.num_layers - 1) // block + 2]


@pytest.mark.parametrize("mode", ["commit", "verify"])
@pytest.mark.parametrize("name", TINY)
def test_fx_traces_the_forward(name: str, mode: Mode) -> None:
    model = build(name)
    run = Run(model)
    run.step(prompt(3))

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, inputs: StepInputs, state: DecodeState) -> tuple[torch.Tensor, ...]:
            out = self.inner(inputs, state, rows_per_request=2, mode=mode)
            return (out.logits, out.tokens, *(tensor for layer in out.state for tensor in layer))

    flat = Flat()
    placeholders = StepInputs._make(PLACEHOLDER for _ in StepInputs._fields)
    states = [layer._make(PLACEHOLDER for _ in layer) for layer in run.state]
    traced = fx.Tracer().trace(flat, concrete_args={"inputs": placeholders, "state": states})
    inputs = StepInputs(torch.tensor(prompt(2)), ints(run.length), pages(0)[None], ints(0))
    expected = model(inputs, run.state, rows_per_request=2, mode=mode)
    result = fx.GraphModule(flat, traced)(inputs, run.state)
    assert torch.equal(result[0], expected.logits)
    calls = [n.target for n in traced.nodes if n.op == "call_function"]
    config = model.config
    kda = functional.kda_verify if mode == "verify" else functional.kda_step
    assert calls.count(kda) == config.num_layers - len(config.mla_layers)
    assert calls.count(functional.mla_attend) == len(config.mla_layers)
    assert calls.count(functional.moe_experts) == config.num_layers - config.first_k_dense
    sources = [len(n.args[0]) for n in traced.nodes if n.target is functional.attn_res_mix]
    assert sources == attn_res_sources(config)
    assert isinstance(run.state[3], MlaState)
