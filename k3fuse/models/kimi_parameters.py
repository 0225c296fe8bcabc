"""The parameters of a Kimi decoder and the checkpoint tensors they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from k3fuse.errors import CheckpointError
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.parameter import ParameterSpec, TensorSpec

MXFP4_GROUP = 32

# Kimi-Linear checkpoints differ in one place: transformers writes the dense layer's MLP under the
# MoE module's name. K3 has the released layout only.
DENSE_MLP_NAMES = ("mlp", "block_sparse_moe")

# kept in fp32 whatever the checkpoint stores
_FP32_ALWAYS = ("A_log", "dt_bias", "gate.e_score_correction_bias")
# K3 also ships these in fp32
_FP32_K3 = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "self_attn.o_norm.weight")


def kimi_parameters(
    config: KimiConfig, stored: Mapping[str, str] | None = None
) -> list[ParameterSpec]:
    """Every parameter of the text decoder, with its checkpoint tensors, in module order.

    Paths are checkpoint names without `config.weight_prefix`; experts are stacked, so that
    `...experts.w1_packed` [E,I,Z/2] U8 and `...experts.w1_scale` [E,I,Z/32] U8 (MXFP4) or
    `...experts.w1` [E,I,Z] (bf16) have one source tensor per expert (K3 spec 4.2 and 4.3,
    Kimi-Linear spec section 11).

    `stored` maps the tensor names of a checkpoint to their safetensors dtypes; without it the
    released layout is described. It decides what Kimi-Linear checkpoints leave open: where the
    dense MLP lies, and whether a tensor is BF16 or F32 (a parameter keeps the stored dtype; A_log,
    dt_bias and the router bias are always F32). It also decides whether a tied lm_head is the
    embedding (same source) or, when a tensor of its own is stored, that tensor.

    Raises CheckpointError for transformers' in-memory layout (fused gate_up_proj experts).
    """
    stored = stored or {}
    fused = next((name for name in stored if name.endswith(".experts.gate_up_proj")), None)
    if fused is not None:
        raise CheckpointError(
            f"tensor {fused}: experts are fused as transformers keeps them in memory; save the "
            "checkpoint again without save_original_format=False"
        )
    return [*_Layout(config, stored).parameters()]


def kimi_init(config: KimiConfig, path: str) -> str:
    """How `checkpoint.synth` draws the parameter at `path` (K3 spec 7.1); bind `config` first.

    Entries of A_log beyond the heads are zero, as in the K3 release.
    """
    name = path.removesuffix(".weight").rsplit(".", 1)[-1]
    if name == "A_log":
        return f"normal 0.5 first {config.kda_heads}"
    if name == "dt_bias":
        return "normal 1"
    if name.endswith("conv1d"):
        return "normal 0.5"
    if name == "e_score_correction_bias":
        return "normal 0.1"
    if name.endswith("norm"):
        return "around_one 0.1"
    if name.endswith("_packed"):
        return "bytes 0 255"
    if name.endswith("_scale"):
        return "bytes 122 124"
    return "fan_in"


class _Layout:
    def __init__(self, config: KimiConfig, stored: Mapping[str, str]) -> None:
        self.config, self.stored = config, stored

    def parameters(self) -> Iterator[ParameterSpec]:
        c = self.config
        embed = self._one("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        yield embed
        for layer in range(c.num_layers):
            yield from self._layer(layer)
        yield self._one("model.norm.weight", c.hidden_size)
        if c.attn_res_block_size is not None:
            yield self._one("model.output_attn_res_norm.weight", c.hidden_size)
            yield self._one("model.output_attn_res_proj.weight", 1, c.hidden_size)
        head = self._one("lm_head.weight", c.vocab_size, c.hidden_size)
        if c.tie_word_embeddings and head.sources[0].name not in self.stored:
            head = ParameterSpec(head.path, embed.shape, embed.dtype, embed.sources)
        yield head

    def _layer(self, layer: int) -> Iterator[ParameterSpec]:
        c, at = self.config, f"model.layers.{layer}"
        yield self._one(f"{at}.input_layernorm.weight", c.hidden_size)
        yield self._one(f"{at}.post_attention_layernorm.weight", c.hidden_size)
        if c.attn_res_block_size is not None:
            # layer 0 stores its self_attention_res_* too, although the embedding is its only source
            for site in ("self_attention_res", "mlp_res"):
                yield self._one(f"{at}.{site}_norm.weight", c.hidden_size)
                yield self._one(f"{at}.{site}_proj.weight", 1, c.hidden_size)
        attention = self._mla if c.is_mla(layer) else self._kda
        yield from attention(f"{at}.self_attn")
        if c.is_dense(layer):
            yield from self._mlp(f"{at}.mlp", self._dense_name(at), c.intermediate_size)
        else:
            yield from self._moe(f"{at}.block_sparse_moe")

    def _kda(self, at: str) -> Iterator[ParameterSpec]:
        c = self.config
        wide, hidden, head = c.kda_width, c.hidden_size, c.kda_head_dim
        for name in ("q", "k", "v"):
            yield self._one(f"{at}.{name}_proj.weight", wide, hidden)
        for name in ("q", "k", "v"):
            yield self._one(f"{at}.{name}_conv1d.weight", wide, 1, c.kda_conv_size)
        yield self._one(f"{at}.A_log", *c.a_log_shape)
        yield self._one(f"{at}.dt_bias", wide)
        yield self._one(f"{at}.f_a_proj.weight", head, hidden)
        yield self._one(f"{at}.f_b_proj.weight", wide, head)
        yield self._one(f"{at}.b_proj.weight", c.kda_heads, hidden)
        if c.kda_full_rank_gate:
            yield self._one(f"{at}.g_proj.weight", wide, hidden)
        else:
            yield self._one(f"{at}.g_a_proj.weight", head, hidden)
            yield self._one(f"{at}.g_b_proj.weight", wide, head)
        yield self._one(f"{at}.o_norm.weight", head)
        yield self._one(f"{at}.o_proj.weight", hidden, wide)

    def _mla(self, at: str) -> Iterator[ParameterSpec]:
        c = self.config
        q_width = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        v_width = c.num_heads * c.v_head_dim
        if c.q_lora_rank is None:
            yield self._one(f"{at}.q_proj.weight", q_width, c.hidden_size)
        else:
            yield self._one(f"{at}.q_a_proj.weight", c.q_lora_rank, c.hidden_size)
            yield self._one(f"{at}.q_a_layernorm.weight", c.q_lora_rank)
            yield self._one(f"{at}.q_b_proj.weight", q_width, c.q_lora_rank)
        cache_row = c.kv_lora_rank + c.qk_rope_head_dim
        yield self._one(f"{at}.kv_a_proj_with_mqa.weight", cache_row, c.hidden_size)
        yield self._one(f"{at}.kv_a_layernorm.weight", c.kv_lora_rank)
        kv_width = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        yield self._one(f"{at}.kv_b_proj.weight", kv_width, c.kv_lora_rank)
        if c.mla_output_gate:
            yield self._one(f"{at}.g_proj.weight", v_width, c.hidden_size)
        yield self._one(f"{at}.o_proj.weight", c.hidden_size, v_width)

    def _mlp(self, at: str, stored_at: str, width: int) -> Iterator[ParameterSpec]:
        hidden = self.config.hidden_size
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            yield self._one(f"{at}.{name}.weight", *shape, source=f"{stored_at}.{name}.weight")

    def _moe(self, at: str) -> Iterator[ParameterSpec]:
        c = self.config
        yield self._one(f"{at}.gate.weight", c.num_experts, c.hidden_size)
        yield self._one(f"{at}.gate.e_score_correction_bias", c.num_experts)
        if c.latent_size is not None:
            yield self._one(f"{at}.routed_expert_down_proj.weight", c.latent_size, c.hidden_size)
            if c.latent_norm:
                yield self._one(f"{at}.routed_expert_norm.weight", c.latent_size)
            yield self._one(f"{at}.routed_expert_up_proj.weight", c.hidden_size, c.latent_size)
        shared = f"{at}.shared_experts"
        yield from self._mlp(shared, shared, c.shared_intermediate_size)
        wide, inner = c.expert_width, c.moe_intermediate_size
        for name, rows, columns in (("w1", inner, wide), ("w3", inner, wide), ("w2", wide, inner)):
            if c.expert_format == "mxfp4":
                packed, scales = (rows, columns // 2), (rows, columns // MXFP4_GROUP)
                yield self._experts(at, f"{name}_packed", f"{name}.weight_packed", packed)
                yield self._experts(at, f"{name}_scale", f"{name}.weight_scale", scales)
            else:
                yield self._experts(at, name, f"{name}.weight", (rows, columns))

    def _dense_name(self, at: str) -> str:
        for name in DENSE_MLP_NAMES:
            if self._stored_name(f"{at}.{name}.gate_proj.weight") in self.stored:
                return f"{at}.{name}"
        return f"{at}.{DENSE_MLP_NAMES[0]}"

    def _stored_name(self, path: str) -> str:
        return self.config.weight_prefix + path

    def _one(self, path: str, *shape: int, source: str | None = None) -> ParameterSpec:
        tensor = self._tensor(source or path, shape)
        dtype = "F32" if path.endswith(_FP32_ALWAYS) else tensor.dtype
        return ParameterSpec(path, shape, dtype, (tensor,))

    def _experts(self, at: str, path: str, source: str, shape: tuple[int, ...]) -> ParameterSpec:
        tensors = tuple(
            self._tensor(f"{at}.experts.{expert}.{source}", shape)
            for expert in range(self.config.num_experts)
        )
        wide = any(tensor.dtype == "F32" for tensor in tensors)
        dtype = "F32" if wide else tensors[0].dtype
        stacked_shape = (self.config.num_experts, *shape)
        return ParameterSpec(f"{at}.experts.{path}", stacked_shape, dtype, tensors, stacked=True)

    def _tensor(self, path: str, shape: tuple[int, ...]) -> TensorSpec:
        name = self._stored_name(path)
        if path.endswith(("weight_packed", "weight_scale")):
            return TensorSpec(name, shape, "U8")
        k3 = self.config.model_type == "kimi_k3"
        dtype = "F32" if path.endswith(_FP32_ALWAYS + (_FP32_K3 if k3 else ())) else "BF16"
        if not k3 and self.stored.get(name) in ("BF16", "F32"):
            dtype = self.stored[name]
        return TensorSpec(name, shape, dtype)
