from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest

from k3fuse.checkpoint.safetensors_header import tensor_bytes
from k3fuse.errors import CheckpointError
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import read_kimi_config, to_hf_dict
from k3fuse.models.kimi_parameters import kimi_init, kimi_parameters
from k3fuse.parameter import TensorSpec

K3 = BUILTIN_CONFIGS["kimi-k3"]
LINEAR_TINY = BUILTIN_CONFIGS["kimi-linear-tiny"]


def without(raw: dict[str, Any], *path: str) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    table = raw
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    return raw


def with_value(raw: dict[str, Any], value: object, *path: str) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    table = raw
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return raw


@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_released_layout_round_trips(name: str) -> None:
    config = BUILTIN_CONFIGS[name]
    assert read_kimi_config(to_hf_dict(config), "config.json") == config


def test_k3_layer_schedule() -> None:
    assert len(K3.mla_layers) == 24
    assert sorted(K3.mla_layers)[-2:] == [91, 92]
    assert [i for i in range(93) if K3.is_snapshot(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    lists = to_hf_dict(K3)["text_config"]["linear_attn_config"]
    assert lists["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(lists["kda_layers"]) == 69


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({}, "model_type"),
        (with_value(to_hf_dict(K3), "llama", "model_type"), "model_type"),
        (without(to_hf_dict(K3), "text_config"), "text_config"),
        (without(to_hf_dict(K3), "text_config", "hidden_size"), "text_config.hidden_size"),
        (with_value(to_hf_dict(K3), "7168", "text_config", "hidden_size"), "hidden_size"),
        (with_value(to_hf_dict(K3), True, "text_config", "hidden_size"), "hidden_size"),
        (with_value(to_hf_dict(K3), 0, "text_config", "num_experts"), "num_experts"),
        (without(to_hf_dict(K3), "text_config", "activation_situ_beta"), "activation_situ_beta"),
        (without(to_hf_dict(K3), "text_config", "linear_attn_config"), "linear_attn_config"),
        (
            with_value(to_hf_dict(K3), [4], "text_config", "linear_attn_config", "kda_layers"),
            "text_config.linear_attn_config.full_attn_layers",
        ),
        (with_value(to_hf_dict(K3), "gelu", "text_config", "hidden_act"), "hidden_act"),
        (with_value(to_hf_dict(K3), False, "text_config", "mla_use_nope"), "mla_use_nope"),
        (with_value(to_hf_dict(K3), 8, "text_config", "num_key_value_heads"), "num_key_value"),
        (with_value(to_hf_dict(K3), 2, "text_config", "num_expert_group"), "num_expert_group"),
        (with_value(to_hf_dict(K3), 1, "text_config", "num_nextn_predict_layers"), "num_nextn"),
        (with_value(to_hf_dict(K3), 897, "text_config", "num_experts_per_token"), "per_token"),
        (
            with_value(to_hf_dict(K3), "nvfp4", "text_config", "quantization_config", "format"),
            "quantization_config.format",
        ),
        (without(to_hf_dict(LINEAR_TINY), "first_k_dense_replace"), "first_k_dense_replace"),
        (with_value(to_hf_dict(LINEAR_TINY), [], "eos_token_id"), "eos_token_id"),
    ],
)
def test_bad_config_names_file_and_key(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_kimi_config(raw, "dir/config.json")
    assert "dir/config.json" in str(error.value)
    assert key in str(error.value)


def test_tie_flag_of_the_text_level_wins() -> None:
    raw = to_hf_dict(K3)
    assert not read_kimi_config(
        with_value(raw, True, "tie_word_embeddings"), "c"
    ).tie_word_embeddings
    assert read_kimi_config(
        with_value(raw, True, "text_config", "tie_word_embeddings"), "c"
    ).tie_word_embeddings
    only_wrapper = without(raw, "text_config", "tie_word_embeddings")
    assert read_kimi_config(
        with_value(only_wrapper, True, "tie_word_embeddings"), "c"
    ).tie_word_embeddings
    neither = without(only_wrapper, "tie_word_embeddings")
    assert not read_kimi_config(neither, "c").tie_word_embeddings


def test_list_of_eos_takes_the_first() -> None:
    raw = with_value(to_hf_dict(LINEAR_TINY), [7, 8], "eos_token_id")
    assert read_kimi_config(raw, "c").eos_token_id == 7


def transformers_fields(*, lists: bool) -> dict[str, Any]:
    raw = to_hf_dict(LINEAR_TINY)
    for key in ("mla_use_nope", "first_k_dense_replace", "moe_router_activation_func"):
        del raw[key]
    lists_table = raw.pop("linear_attn_config")
    if lists:
        raw["linear_attn_config"] = lists_table
    raw["layer_types"] = [
        "full_attention" if LINEAR_TINY.is_mla(i) else "linear_attention" for i in range(6)
    ]
    raw["mlp_layer_types"] = ["dense"] + ["sparse"] * 5
    raw |= {"linear_num_heads": 8, "linear_head_dim": 32, "linear_conv_kernel_dim": 4}
    return raw


@pytest.mark.parametrize("lists", [True, False])
def test_transformers_fields(lists: bool) -> None:
    assert read_kimi_config(transformers_fields(lists=lists), "c") == LINEAR_TINY


def test_contradicting_layer_types() -> None:
    raw = transformers_fields(lists=True)
    raw["layer_types"] = ["full_attention"] * 6
    with pytest.raises(CheckpointError, match="contradicts"):
        read_kimi_config(raw, "c")
    raw = transformers_fields(lists=False)
    raw["mlp_layer_types"] = ["sparse", "dense", *["sparse"] * 4]
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        read_kimi_config(raw, "c")


def sources(name: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """All tensors of a built-in config: trunk, experts."""
    parts: tuple[list[TensorSpec], list[TensorSpec]] = ([], [])
    for spec in kimi_parameters(BUILTIN_CONFIGS[name]):
        parts[spec.stacked].extend(spec.sources)
    return parts


def test_k3_accounting_to_the_byte() -> None:
    """Spec 1.3."""
    trunk, experts = sources("kimi-k3")
    assert (len(trunk), sum(map(tensor_bytes, trunk))) == (2460, 113_509_540_864)
    assert (len(experts), sum(map(tensor_bytes, experts))) == (494_592, 1_446_456_066_048)
    names = Counter(tensor.name for tensor in trunk + experts)
    assert max(names.values()) == 1
    by_name = {tensor.name: tensor for tensor in trunk + experts}
    layers = "language_model.model.layers"
    for name, shape, dtype in [
        (f"{layers}.0.self_attention_res_proj.weight", (1, 7168), "BF16"),
        (f"{layers}.0.self_attn.A_log", (128,), "F32"),
        (f"{layers}.0.self_attn.q_conv1d.weight", (12288, 1, 4), "F32"),
        (f"{layers}.0.self_attn.o_norm.weight", (128,), "F32"),
        (f"{layers}.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        (f"{layers}.92.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        (f"{layers}.1.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        (f"{layers}.1.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536), "U8"),
        (f"{layers}.1.block_sparse_moe.experts.0.w1.weight_scale", (3072, 112), "U8"),
        ("language_model.lm_head.weight", (163840, 7168), "BF16"),
    ]:
        assert by_name[name] == TensorSpec(name, shape, dtype)


def test_kimi_linear_is_48b() -> None:
    trunk, experts = sources("kimi-linear")
    assert len(experts) == 26 * 256 * 3
    assert sum(math.prod(tensor.shape) for tensor in trunk + experts) == 49_122_681_728


def test_tied_head_is_the_embedding_unless_it_is_stored() -> None:
    raw = with_value(to_hf_dict(LINEAR_TINY), True, "tie_word_embeddings")
    config = read_kimi_config(raw, "c")
    head = kimi_parameters(config)[-1]
    assert (head.path, head.sources[0].name) == ("lm_head.weight", "model.embed_tokens.weight")
    head = kimi_parameters(config, {"lm_head.weight": "BF16"})[-1]
    assert head.sources[0].name == "lm_head.weight"


def test_fused_experts_are_refused() -> None:
    with pytest.raises(CheckpointError, match="save_original_format"):
        kimi_parameters(LINEAR_TINY, {"model.layers.1.mlp.experts.gate_up_proj": "F32"})


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("model.layers.0.self_attn.A_log", "normal 0.5 first 96"),
        ("model.layers.0.self_attn.dt_bias", "normal 1"),
        ("model.layers.0.self_attn.q_conv1d.weight", "normal 0.5"),
        ("model.layers.0.self_attn.o_norm.weight", "around_one 0.1"),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", "around_one 0.1"),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "normal 0.1"),
        ("model.layers.1.block_sparse_moe.experts.w1_packed", "bytes 0 255"),
        ("model.layers.1.block_sparse_moe.experts.w1_scale", "bytes 122 124"),
        ("model.layers.0.mlp_res_proj.weight", "fan_in"),
        ("lm_head.weight", "fan_in"),
    ],
)
def test_init_rules(path: str, rule: str) -> None:
    assert kimi_init(K3, path) == rule
