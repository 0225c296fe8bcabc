"""A Kimi-Linear checkpoint that transformers saved loads as it is, and computes the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from k3fuse.checkpoint.audit import audit
from k3fuse.checkpoint.files import open_checkpoint
from k3fuse.checkpoint.reader import load_into, load_parameter
from k3fuse.errors import CheckpointError
from k3fuse.models.kimi import KimiModel, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig, read_kimi_config, to_hf_dict
from k3fuse.models.kimi_parameters import kimi_parameters

TINY = BUILTIN_CONFIGS["kimi-linear-tiny"]
PREFILL, DECODE = 32, 16


@pytest.fixture(scope="module")
def hf_model() -> Any:
    """Random weights in fp32, with a router bias that matters."""
    raw: dict[str, Any] = to_hf_dict(TINY) | {"dtype": "float32", "pad_token_id": 0}
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(3)  # pyright: ignore[reportUnknownMemberType]
        model = KimiLinearForCausalLM(KimiLinearConfig(**raw)).eval()
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
            if name.endswith("e_score_correction_bias"):
                buffer.data.normal_(std=0.1)
            elif name.endswith("norm.weight"):
                buffer.data.normal_(mean=1, std=0.1)
            elif name.endswith(("proj", "proj.weight", "gate.weight")):
                buffer.data.normal_(std=buffer.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def saved(hf_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "fp32"
    hf_model.save_pretrained(directory)
    return directory


def test_it_is_a_single_file_with_an_odd_dense_mlp(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert not (saved / "model.safetensors.index.json").exists()
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in checkpoint.tensors
    assert read_kimi_config(checkpoint.config, "config.json") == TINY


def test_fp32_values(hf_model: Any, saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    specs = {spec.path: spec for spec in kimi_parameters(TINY, checkpoint.dtypes)}
    audit(checkpoint, specs.values(), tied=False)
    assert {spec.dtype for spec in specs.values()} == {"F32"}
    weights: dict[str, torch.Tensor] = hf_model.state_dict()

    def same(path: str, expected: torch.Tensor) -> None:
        assert torch.equal(load_parameter(checkpoint, specs[path]), expected), path

    at = "model.layers.2"
    same(f"{at}.self_attn.A_log", weights[f"{at}.self_attn.forget_gate.A_log"])
    same(f"{at}.self_attn.f_b_proj.weight", weights[f"{at}.self_attn.forget_gate.f_b_proj.weight"])
    conv = weights[f"{at}.self_attn.conv1d.weight"].chunk(3)
    for name, expected in zip("qkv", conv, strict=True):
        same(f"{at}.self_attn.{name}_conv1d.weight", expected)
    gate, up = weights[f"{at}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    same(f"{at}.block_sparse_moe.experts.w1", gate)
    same(f"{at}.block_sparse_moe.experts.w3", up)
    same(f"{at}.block_sparse_moe.experts.w2", weights[f"{at}.mlp.experts.down_proj"])
    same("model.layers.0.mlp.up_proj.weight", weights["model.layers.0.mlp.up_proj.weight"])


def test_bf16_checkpoint_keeps_what_is_stored_in_fp32(saved: Path, tmp_path: Path) -> None:
    half: Any = KimiLinearForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
        saved, dtype=torch.bfloat16
    )
    half.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    specs = kimi_parameters(read_kimi_config(checkpoint.config, "c"), checkpoint.dtypes)
    audit(checkpoint, specs, tied=False)
    dtypes = {spec.path: spec.dtype for spec in specs}
    assert checkpoint.dtypes["model.layers.0.self_attn.A_log"] == "BF16"
    assert dtypes["model.layers.0.self_attn.A_log"] == "F32"
    assert dtypes["model.layers.1.block_sparse_moe.gate.weight"] == "F32"
    assert dtypes["model.layers.1.block_sparse_moe.experts.w1"] == "BF16"
    model = KimiModel(TINY, device="meta")
    load_into(model, checkpoint, specs)
    assert dict(model.named_parameters())["lm_head.weight"].dtype == torch.bfloat16
    assert torch.isfinite(prefill_and_decode(model, torch.arange(PREFILL + DECODE))).all()


def test_in_memory_layout_is_refused(hf_model: Any, tmp_path: Path) -> None:
    hf_model.save_pretrained(tmp_path, save_original_format=False)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="save_original_format"):
        kimi_parameters(TINY, checkpoint.dtypes)


@torch.no_grad()
def prefill_and_decode(model: KimiModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, V] of one request, its last `DECODE` tokens one by one."""
    page_size = 16
    pages = -(-len(tokens) // page_size)
    state = model.new_state(slots=1, pages=pages, page_size=page_size, rows=1)
    table = torch.arange(pages, dtype=torch.int32)[None]
    slot = torch.zeros(1, dtype=torch.int32)
    rows: list[torch.Tensor] = []
    at = 0
    for count in [PREFILL] + [1] * DECODE:
        length = torch.tensor([at], dtype=torch.int32)
        inputs = StepInputs(tokens[at : at + count], length, table, slot)
        logits, _, _, state = model.forward(inputs, state, rows_per_request=count)
        rows.append(logits)
        at += count
    return torch.cat(rows)


@torch.no_grad()
def hf_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The same through transformers and its cache."""
    out: Any = model(tokens[None, :PREFILL], use_cache=True)
    rows: list[torch.Tensor] = [out.logits[0]]
    for at in range(PREFILL, PREFILL + DECODE):
        cache = out.cache if hasattr(out, "cache") else out.past_key_values
        out = model(tokens[None, at : at + 1], cache=cache, use_cache=True)
        rows.append(out.logits[0])
    return torch.cat(rows)


def loaded(directory: Path) -> tuple[KimiConfig, KimiModel]:
    checkpoint = open_checkpoint(directory)
    config = read_kimi_config(checkpoint.config, str(directory / "config.json"))
    model = KimiModel(config, device="meta")
    load_into(model, checkpoint, kimi_parameters(config, checkpoint.dtypes))
    return config, model


def test_logits_equal_those_of_transformers(hf_model: Any, saved: Path) -> None:
    config, model = loaded(saved)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(config.vocab_size, (PREFILL + DECODE,), generator=generator)
    expected = hf_logits(hf_model, tokens)
    got = prefill_and_decode(model, tokens)
    assert got.dtype == torch.float32
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < 1e-4
