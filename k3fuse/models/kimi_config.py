"""Configuration shared by Kimi K3 and Kimi-Linear; their differences are fields, not classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from k3fuse.errors import CheckpointError


@dataclass(frozen=True)
class KimiConfig:
    """Shapes and switches of one Kimi decoder (K3 spec sections 1 and 7, Kimi-Linear section 11).

    Layer lists are 0-based here; the 1-based lists of config.json are converted on reading.
    """

    model_type: str  # "kimi_k3" or "kimi_linear"
    hidden_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    mla_lora_eps: float  # q_a / kv_a layernorm; HF builds them with 1e-6 (K3 spec U1)
    mla_layers: frozenset[int]  # every other layer is KDA
    first_k_dense: int  # layers below this index have a dense MLP
    # KDA
    kda_heads: int
    kda_head_dim: int
    kda_conv_size: int
    kda_gate_lower_bound: float | None  # None: unbounded softplus decay (Kimi-Linear)
    kda_full_rank_gate: bool  # True: g_proj; False: g_a_proj, g_b_proj
    a_log_shape: tuple[int, ...]  # as stored; K3 stores 128 entries for 96 heads
    # MLA
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    # FFN
    intermediate_size: int
    activation: str  # "situ" or "silu"
    situ_beta: float
    situ_linear_beta: float
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    latent_size: int | None  # None: experts read the hidden row (no latent projections)
    latent_norm: bool
    shared_intermediate_size: int  # all shared experts fused
    router_renormalize: bool
    routed_scaling_factor: float
    expert_format: str  # "mxfp4" or "bf16"
    # AttnRes
    attn_res_block_size: int | None  # None: plain residual adds
    tie_word_embeddings: bool = False
    bos_token_id: int = 1
    eos_token_id: int = 2
    weight_prefix: str = ""  # "language_model." inside K3 checkpoints

    @property
    def expert_width(self) -> int:
        """Width of the rows that the routed experts read and write."""
        return self.latent_size if self.latent_size is not None else self.hidden_size

    @property
    def kda_width(self) -> int:
        """Channels of all KDA heads together."""
        return self.kda_heads * self.kda_head_dim

    def is_mla(self, layer: int) -> bool:
        """Whether the layer's attention is MLA; else it is KDA."""
        return layer in self.mla_layers

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has a dense MLP; else it has experts."""
        return layer < self.first_k_dense

    def is_snapshot(self, layer: int) -> bool:
        """Whether AttnRes appends the running sum as a snapshot at this layer (spec 2.2)."""
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0


# not in config.json: HF builds the low-rank norms with their default eps (K3 spec U1)
KIMI_MLA_LORA_EPS = 1e-6
_MXFP4 = "mxfp4-pack-quantized"


def read_kimi_config(raw: Mapping[str, Any], where: str) -> KimiConfig:
    """The `KimiConfig` of a parsed config.json; `where` names the file in errors.

    Understands Kimi K3 (wrapper with a nested `text_config`, K3 spec 1.1), Kimi-Linear as released
    (flat, 1-based layer lists in `linear_attn_config`) and Kimi-Linear as transformers 5 saves it
    (`layer_types`, `mlp_layer_types`, `linear_*`). `tie_word_embeddings` is taken from the text
    level first, and absent means untied, as in the models' own config classes. The stored shape of
    A_log is no config field: K3 pads it to head_dim entries, Kimi-Linear stores [1,1,heads,1].

    Raises CheckpointError, naming file and key, for missing or inconsistent fields and for switches
    that the forward does not implement (rotary MLA, grouped routing, draft layers).
    """
    outer = _Fields(raw, where, "")
    model_type = outer.text("model_type")
    if model_type == "kimi_k3":
        text = outer.table("text_config")
    elif model_type == "kimi_linear":
        text = outer
    else:
        raise outer.error("model_type", f"is {model_type!r}; expected 'kimi_k3' or 'kimi_linear'")
    nested = text is not outer
    _refuse_unimplemented(text)

    layers = text.integer("num_hidden_layers")
    mla_layers = _mla_layers(text, layers)
    kda = text.table("linear_attn_config") if "linear_attn_config" in text.raw else None
    if kda is not None:
        kda_heads, kda_head_dim = kda.integer("num_heads"), kda.integer("head_dim")
        kda_conv = kda.integer("short_conv_kernel_size")
        lower_bound = kda.number("gate_lower_bound") if kda.has("gate_lower_bound") else None
        full_rank_gate = kda.flag("use_full_rank_gate", False)
    else:
        kda_heads = text.integer("linear_num_heads")
        kda_head_dim = text.integer("linear_head_dim")
        kda_conv = text.integer("linear_conv_kernel_dim")
        lower_bound, full_rank_gate = None, False

    activation = text.text("hidden_act")
    if activation not in ("situ", "silu"):
        raise text.error("hidden_act", f"is {activation!r}; expected 'situ' or 'silu'")
    situ = activation == "situ"
    moe_intermediate = text.integer("moe_intermediate_size")
    tokens = text if text.has("eos_token_id") else outer
    return KimiConfig(
        model_type=model_type,
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        vocab_size=text.integer("vocab_size"),
        rms_norm_eps=text.number("rms_norm_eps"),
        mla_lora_eps=KIMI_MLA_LORA_EPS,
        mla_layers=mla_layers,
        first_k_dense=_first_k_dense(text, layers),
        kda_heads=kda_heads,
        kda_head_dim=kda_head_dim,
        kda_conv_size=kda_conv,
        kda_gate_lower_bound=lower_bound,
        kda_full_rank_gate=full_rank_gate,
        a_log_shape=(max(kda_heads, kda_head_dim),) if nested else (1, 1, kda_heads, 1),
        num_heads=text.integer("num_attention_heads"),
        q_lora_rank=text.integer("q_lora_rank") if text.has("q_lora_rank") else None,
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        mla_output_gate=text.flag("mla_use_output_gate", False),
        intermediate_size=text.integer("intermediate_size"),
        activation=activation,
        situ_beta=text.number("activation_situ_beta") if situ else 0.0,
        situ_linear_beta=text.number("activation_situ_linear_beta") if situ else 0.0,
        num_experts=text.integer("num_experts"),
        top_k=text.integer("num_experts_per_token"),
        moe_intermediate_size=moe_intermediate,
        latent_size=(
            text.integer("routed_expert_hidden_size")
            if text.has("routed_expert_hidden_size")
            else None
        ),
        latent_norm=text.flag("latent_moe_use_norm", False),
        shared_intermediate_size=text.integer("num_shared_experts") * moe_intermediate,
        router_renormalize=text.flag("moe_renormalize"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        expert_format=_expert_format(text if text.has("quantization_config") else outer),
        attn_res_block_size=(
            text.integer("attn_res_block_size") if text.has("attn_res_block_size") else None
        ),
        tie_word_embeddings=text.flag(
            "tie_word_embeddings", outer.flag("tie_word_embeddings", False)
        ),
        bos_token_id=tokens.token("bos_token_id"),
        eos_token_id=tokens.token("eos_token_id"),
        weight_prefix="language_model." if nested else "",
    )


def to_hf_dict(config: KimiConfig) -> dict[str, Any]:
    """`config` as the released config.json writes it: the inverse of `read_kimi_config`.

    Nested under `text_config` for K3, flat for Kimi-Linear. `mla_lora_eps` and `a_log_shape` have
    no field there.
    """
    linear: dict[str, Any] = {
        "full_attn_layers": [i + 1 for i in sorted(config.mla_layers)],
        "kda_layers": [i + 1 for i in range(config.num_layers) if not config.is_mla(i)],
        "head_dim": config.kda_head_dim,
        "num_heads": config.kda_heads,
        "short_conv_kernel_size": config.kda_conv_size,
    }
    if config.kda_gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.kda_gate_lower_bound
    if config.kda_full_rank_gate:
        linear["use_full_rank_gate"] = True
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "linear_attn_config": linear,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "hidden_act": config.activation,
        "intermediate_size": config.intermediate_size,
        "first_k_dense_replace": config.first_k_dense,
        "moe_layer_freq": 1,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.top_k,
        "num_shared_experts": config.shared_intermediate_size // config.moe_intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": config.router_renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }
    if config.activation == "situ":
        text["activation_situ_beta"] = config.situ_beta
        text["activation_situ_linear_beta"] = config.situ_linear_beta
    if config.mla_output_gate:
        text["mla_use_output_gate"] = True
    if config.latent_size is not None:
        text["routed_expert_hidden_size"] = config.latent_size
        text["latent_moe_use_norm"] = config.latent_norm
    if config.attn_res_block_size is not None:
        text["attn_res_block_size"] = config.attn_res_block_size
    if config.expert_format == "mxfp4":
        text["quantization_config"] = {"quant_method": "compressed-tensors", "format": _MXFP4}
    if config.model_type == "kimi_linear":
        return text
    return {
        "model_type": config.model_type,
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
    }


class _Fields:
    """Typed look-up in one table of a config.json, with errors that name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str) -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: `{self.prefix}{key}` {problem}")

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def _get(self, key: str, kind: type | tuple[type, ...], words: str) -> Any:
        if key not in self.raw:
            raise self.error(key, "is missing")
        value = self.raw[key]
        # bool is an int in Python; only `flag` takes it
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is {value!r}; expected {words}")
        return value

    def text(self, key: str) -> str:
        return self._get(key, str, "a string")

    def integer(self, key: str) -> int:
        value = self._get(key, int, "a positive integer")
        if value <= 0:
            raise self.error(key, f"is {value!r}; expected a positive integer")
        return value

    def number(self, key: str) -> float:
        return float(self._get(key, (int, float), "a number"))

    def flag(self, key: str, default: bool | None = None) -> bool:
        if key not in self.raw and default is not None:
            return default
        return self._get(key, bool, "true or false")

    def token(self, key: str) -> int:
        """A token id; of a list of ids, the first."""
        value = self.raw.get(key)
        if isinstance(value, list) and value:
            value = cast(list[object], value)[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(key, f"is {self.raw.get(key)!r}; expected a token id")
        return value

    def table(self, key: str) -> _Fields:
        value = self._get(key, Mapping, "an object")
        return _Fields(cast(Mapping[str, Any], value), self.where, f"{self.prefix}{key}.")

    def items(self, key: str) -> list[Any]:
        return self._get(key, list, "a list")


# key -> the only value the forward implements; absent is that value too
_FIXED: dict[str, object] = {
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
}


def _refuse_unimplemented(text: _Fields) -> None:
    for key, only in _FIXED.items():
        if text.has(key) and text.raw[key] != only:
            raise text.error(key, f"is {text.raw[key]!r}; only {only!r} is implemented")
    # transformers has no switch for rotary MLA, so its files do not have the key
    if "layer_types" not in text.raw and not text.flag("mla_use_nope"):
        raise text.error("mla_use_nope", "is false; MLA with rotary positions is not implemented")
    heads, kv_heads = text.integer("num_attention_heads"), text.raw.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise text.error("num_key_value_heads", f"is {kv_heads!r}; MLA needs it to be {heads}")
    if text.integer("num_experts_per_token") > text.integer("num_experts"):
        raise text.error("num_experts_per_token", "is more than `num_experts`")


def _mla_layers(text: _Fields, layers: int) -> frozenset[int]:
    """0-based MLA layers from the 1-based lists or from `layer_types`; both must agree."""
    from_lists: frozenset[int] | None = None
    if "linear_attn_config" in text.raw:
        lists = text.table("linear_attn_config")
        full, kda = lists.items("full_attn_layers"), lists.items("kda_layers")
        if sorted([*full, *kda]) != list(range(1, layers + 1)):
            raise lists.error(
                "full_attn_layers", f"and `kda_layers` do not cover 1..{layers} once each"
            )
        from_lists = frozenset(i - 1 for i in full)
    if "layer_types" not in text.raw:
        if from_lists is None:
            raise text.error("linear_attn_config", "is missing, and so is `layer_types`")
        return from_lists
    types = text.items("layer_types")
    if len(types) != layers or set(types) - {"full_attention", "linear_attention"}:
        raise text.error("layer_types", f"is not {layers} of 'full_attention', 'linear_attention'")
    from_types = frozenset(i for i, kind in enumerate(types) if kind == "full_attention")
    if from_lists not in (None, from_types):
        raise text.error("layer_types", "contradicts `linear_attn_config.full_attn_layers`")
    return from_types


def _first_k_dense(text: _Fields, layers: int) -> int:
    if "mlp_layer_types" not in text.raw:
        value = text.raw.get("first_k_dense_replace")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= layers:
            raise text.error("first_k_dense_replace", f"is {value!r}; expected 0..{layers}")
        return value
    types = text.items("mlp_layer_types")
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise text.error("mlp_layer_types", f"is not {layers} of 'dense' first, then 'sparse'")
    if text.raw.get("first_k_dense_replace", dense) != dense:
        raise text.error("first_k_dense_replace", "contradicts `mlp_layer_types`")
    return dense


def _expert_format(fields: _Fields) -> str:
    if not fields.has("quantization_config"):
        return "bf16"
    quantization = fields.table("quantization_config")
    if quantization.text("format") != _MXFP4:
        raise quantization.error("format", f"is not {_MXFP4!r}, the only one implemented")
    return "mxfp4"
