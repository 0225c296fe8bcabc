"""Kimi K3 and Kimi-Linear as one stock forward in plain torch, unsharded.

The two models differ in fields of `KimiConfig` only. Module and parameter names are those of the
checkpoint without the prefix "language_model."; the experts of a layer are stacked. A forward
takes a state and returns a new one: nothing is written in place, and nothing depends on the
number of rows, so torch.fx traces it as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from k3fuse import functional
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.models.kimi_layers import (
    Embedding,
    Factory,
    KdaAttention,
    Linear,
    MlaAttention,
    Mlp,
    RmsNorm,
    SparseMoe,
)
from k3fuse.models.kimi_state import (
    DecodeState,
    KdaState,
    LayerState,
    MlaState,
    Mode,
    Step,
    StepInputs,
    StepOutputs,
)

__all__ = [
    "DecodeState",
    "Decoder",
    "DecoderLayer",
    "KdaState",
    "KimiModel",
    "LayerState",
    "MlaState",
    "Mode",
    "StepInputs",
    "StepOutputs",
]


class DecoderLayer(nn.Module):
    """Attention and FFN, each reading the residual stream its own way (K3 spec 2.2, 2.3).

    The stream is a list of snapshots and a running sum. Without AttnRes there are never
    snapshots, and the running sum is the ordinary residual.
    """

    def __init__(self, new: Factory, config: KimiConfig, layer: int) -> None:
        super().__init__()
        hidden, self.eps = config.hidden_size, config.rms_norm_eps
        self.is_snapshot = config.is_snapshot(layer)
        self.input_layernorm = RmsNorm(new, hidden, self.eps)
        self.post_attention_layernorm = RmsNorm(new, hidden, self.eps)
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm = RmsNorm(new, hidden, self.eps)
            self.self_attention_res_proj = Linear(new, hidden, 1)
            self.mlp_res_norm = RmsNorm(new, hidden, self.eps)
            self.mlp_res_proj = Linear(new, hidden, 1)
        attention = MlaAttention if config.is_mla(layer) else KdaAttention
        self.self_attn = attention(new, config)
        self.is_dense = config.is_dense(layer)
        if self.is_dense:
            self.mlp = Mlp(new, config, config.intermediate_size)
        else:
            self.block_sparse_moe = SparseMoe(new, config)

    def forward(
        self,
        snapshots: Sequence[torch.Tensor],
        total: torch.Tensor,
        state: LayerState,
        step: Step,
    ) -> tuple[list[torch.Tensor], torch.Tensor, LayerState]:
        """Snapshots and running sum, [M, hidden] each, before and after the layer."""
        h = total
        if snapshots:
            h = _mix(snapshots, total, self.self_attention_res_norm, self.self_attention_res_proj)
        attended, state = self.self_attn(self.input_layernorm(h), state, step)
        if self.is_snapshot:
            snapshots, total = [*snapshots, total], attended
        else:
            total = total + attended
        h = total
        if snapshots:
            h = _mix(snapshots, total, self.mlp_res_norm, self.mlp_res_proj)
        h = self.post_attention_layernorm(h)
        total = total + (self.mlp(h) if self.is_dense else self.block_sparse_moe(h))
        return list(snapshots), total, state


def _mix(
    snapshots: Sequence[torch.Tensor], total: torch.Tensor, norm: RmsNorm, proj: Linear
) -> torch.Tensor:
    return functional.attn_res_mix([*snapshots, total], norm.weight, proj.weight, eps=norm.eps)


class Decoder(nn.Module):
    """Everything between the token ids and the LM head."""

    def __init__(self, new: Factory, config: KimiConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(new, config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(new, config, layer) for layer in range(config.num_layers)
        )
        self.norm = RmsNorm(new, hidden, eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RmsNorm(new, hidden, eps)
            self.output_attn_res_proj = Linear(new, hidden, 1)

    def forward(
        self, tokens: torch.Tensor, state: DecodeState, step: Step
    ) -> tuple[torch.Tensor, DecodeState]:
        """tokens [M] -> rows [M, hidden] after the final norm, and the next state."""
        total = self.embed_tokens(tokens)
        snapshots: list[torch.Tensor] = []
        new_state: DecodeState = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            snapshots, total, layer_state = layer(snapshots, total, layer_state, step)
            new_state.append(layer_state)
        if snapshots:
            norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
            total = _mix(snapshots, total, norm, proj)
        return self.norm(total), new_state


class KimiModel(nn.Module):
    """The stock forward of the model that `config` describes.

    Parameters are created on `device` in the dtypes of the checkpoint and are not initialised;
    use device "meta" to look at shapes only. After `.double()` everything but the packed experts
    computes and carries float64.
    """

    def __init__(self, config: KimiConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        kda_dtype = torch.float32 if config.expert_format == "mxfp4" else torch.bfloat16
        new = Factory(torch.device(device), kda_dtype)
        self.config = config
        self.model = Decoder(new, config)
        self.lm_head = Linear(new, config.hidden_size, config.vocab_size)

    def forward(
        self,
        inputs: StepInputs,
        state: DecodeState,
        *,
        rows_per_request: int = 1,
        mode: Mode = "commit",
    ) -> StepOutputs:
        """Run `rows_per_request` rows of every request, causally, and return the new state.

        Decode has one row a request, prefill a chunk of the prompt, verify the last token and
        the drafts after it. Mode "verify" leaves the KDA states as they are and journals its
        rows for `commit`. Padding requests have slot -1; their tokens must be valid ids.
        """
        step = Step(inputs.lengths, inputs.block_table, inputs.slots, rows_per_request, mode)
        hidden, new_state = self.model(inputs.tokens, state, step)
        logits = self.lm_head(hidden, torch.float32)
        return StepOutputs(logits, functional.argmax(logits), hidden, new_state)

    def commit(
        self, state: DecodeState, slots: torch.Tensor, accepted: torch.Tensor
    ) -> DecodeState:
        """Advance the KDA states by the first accepted[r] rows of the last verify.

        slots [R] int32 as in that verify, accepted [R] int32, 0 for none. The MLA caches need
        nothing: the caller advances the lengths.
        """
        attentions = [cast(DecoderLayer, layer).self_attn for layer in self.model.layers]
        return [
            attention.commit(layer_state, slots, accepted)
            if isinstance(attention, KdaAttention) and isinstance(layer_state, KdaState)
            else layer_state
            for attention, layer_state in zip(attentions, state, strict=True)
        ]

    def reset(self, state: DecodeState, slots: torch.Tensor) -> DecodeState:
        """Empty the KDA states of `slots` [R] int32, to be done before a new request enters.

        The MLA caches need nothing: a request never reads past its own length.
        """
        return [
            KdaState(
                *functional.kda_reset(layer_state.conv, layer_state.recurrent, slots),
                *layer_state[2:],
            )
            if isinstance(layer_state, KdaState)
            else layer_state
            for layer_state in state
        ]

    def new_state(self, slots: int, pages: int, page_size: int, rows: int) -> DecodeState:
        """Empty states for `slots` requests, `pages` cache pages and up to `rows` verified rows.

        On the parameters' device, in their dtype; the recurrent states in float32 or float64.
        """
        config, weight = self.config, self.model.embed_tokens.weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        heads, head_dim, width = config.kda_heads, config.kda_head_dim, config.kda_width

        def layer_state(layer: int) -> LayerState:
            if config.is_mla(layer):
                latent = config.kv_lora_rank + config.qk_rope_head_dim
                return MlaState(weight.new_zeros(pages, page_size, latent))
            return KdaState(
                conv=weight.new_zeros(slots, 3, width, config.kda_conv_size - 1),
                recurrent=weight.new_zeros(slots, heads, head_dim, head_dim, dtype=exact),
                journal_qkv=weight.new_zeros(slots, rows, 3, width),
                journal_f=weight.new_zeros(slots, rows, width),
                journal_b=weight.new_zeros(slots, rows, heads),
            )

        return [layer_state(layer) for layer in range(config.num_layers)]
