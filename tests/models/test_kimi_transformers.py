"""Kimi-Linear against transformers' own implementation, with weights copied in memory."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from k3fuse.models.kimi import KimiModel, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig

PROMPT, STEPS, PAGE = 32, 16, 16


def their_config(config: KimiConfig) -> KimiLinearConfig:
    layers = range(1, config.num_layers + 1)
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "num_shared_experts": 1,
        "routed_scaling_factor": config.routed_scaling_factor,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "v_head_dim": config.v_head_dim,
        "num_experts_per_token": config.top_k,
        "num_experts": config.num_experts,
        "rms_norm_eps": config.rms_norm_eps,
        "pad_token_id": 0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "linear_attn_config": {
            "head_dim": config.kda_head_dim,
            "num_heads": config.kda_heads,
            "short_conv_kernel_size": config.kda_conv_size,
            "full_attn_layers": [i for i in layers if config.is_mla(i - 1)],
            "kda_layers": [i for i in layers if not config.is_mla(i - 1)],
        },
        "attn_implementation": "eager",
    }
    return KimiLinearConfig(**fields)


def randomize(theirs: KimiLinearForCausalLM) -> None:
    generator = torch.default_generator.manual_seed(0)
    for name, tensor in theirs.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.1 * noise
        elif name.endswith("A_log") or name.endswith("conv1d.weight"):
            noise = 0.5 * noise
        elif name.endswith("e_score_correction_bias"):
            noise = 0.1 * noise
        elif not name.endswith("dt_bias"):
            noise = noise / tensor.shape[-1] ** 0.5
        tensor.copy_(noise)


def copy_weights(theirs: KimiLinearForCausalLM, config: KimiConfig) -> KimiModel:
    """Their module names and fusions to the checkpoint's."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= config.first_k_dense:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace(".forget_gate.", ".")
        at, _, last = name.rpartition(".")
        if at.endswith(".conv1d"):
            for part, conv in zip("qkv", tensor.chunk(3), strict=True):
                tensors[f"{at.removesuffix('conv1d')}{part}_conv1d.weight"] = conv
        elif last == "gate_up_proj":
            tensors[f"{at}.w1"], tensors[f"{at}.w3"] = tensor.chunk(2, dim=1)
        elif at.endswith(".experts") and last == "down_proj":
            tensors[f"{at}.w2"] = tensor
        else:
            tensors[name] = tensor
    model = KimiModel(config).float()
    model.load_state_dict(tensors)
    return model


def test_logits_agree() -> None:
    config = BUILTIN_CONFIGS["kimi-linear-tiny"]
    theirs = KimiLinearForCausalLM(their_config(config)).eval()
    text = torch.randint(
        0, config.vocab_size, (PROMPT + STEPS,), generator=torch.default_generator.manual_seed(1)
    )
    with torch.no_grad():
        randomize(theirs)
        model = copy_weights(theirs, config)
        whole = theirs(input_ids=text[None]).logits[0]
        first = theirs(input_ids=text[None, :PROMPT], use_cache=True)
        cache, expected = first.cache, [first.logits[0]]
        for at in range(PROMPT, PROMPT + STEPS):
            step = theirs(input_ids=text[None, at : at + 1], cache=cache, use_cache=True)
            expected.append(step.logits[0])

    state = model.new_state(slots=1, pages=3, page_size=PAGE, rows=1)
    logits: list[torch.Tensor] = []
    for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]:
        inputs = StepInputs(
            text[start:stop],
            torch.tensor([start], dtype=torch.int32),
            torch.tensor([[2, 0, 1]], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32),
        )
        out = model(inputs, state, rows_per_request=stop - start)
        logits.append(out.logits)
        state = out.state
    ours = torch.cat(logits)
    for theirs_logits in (torch.cat(expected), whole):
        error = (ours - theirs_logits).square().sum(1) / theirs_logits.square().sum(1)
        assert error.sqrt().max() < 1e-4, error
