"""The modules that a Kimi decoder layer is made of: projections, norms, attention, FFN.

Rows are [M, hidden] everywhere. Parameter names are those of the checkpoint.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from k3fuse import functional
from k3fuse.errors import InputError
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.models.kimi_state import KdaState, LayerState, MlaState, Step

CoreWeights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Factory(NamedTuple):
    """Creates parameters without initialising them."""

    device: torch.device
    # The MXFP4 release stores convolutions and the KDA output norm in float32, the bf16 one
    # stores them in bfloat16 (K3 spec 1.3, Kimi-Linear spec 11).
    kda_dtype: torch.dtype

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
        """A parameter of this shape with whatever the memory holds."""
        return nn.Parameter(
            torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False
        )


class Linear(nn.Module):
    """x W^T without bias."""

    def __init__(self, new: Factory, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = new(outputs, inputs)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [M, inputs] -> [M, outputs] in `out_dtype`, by default x's."""
        return functional.linear(x, self.weight, out_dtype=out_dtype)


class Embedding(nn.Module):
    """Token id to row."""

    def __init__(self, new: Factory, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = new(vocab, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [M] int64 -> [M, width]."""
        return functional.embedding(tokens, self.weight)


class RmsNorm(nn.Module):
    """RMSNorm of a row."""

    def __init__(self, new: Factory, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, width] -> the same shape and dtype."""
        return functional.rms_norm(x, self.weight, eps=self.eps)


class GatedRmsNorm(nn.Module):
    """RMSNorm of each KDA head, one weight for all heads, times sigmoid(gate)."""

    def __init__(self, new: Factory, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new(head_dim, dtype=new.kda_dtype)

    def forward(self, o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """o [M, P] float32, gate [M, P] -> [M, P] in gate's dtype."""
        return functional.gated_rms_norm(o, gate, self.weight, eps=self.eps)


class Conv(nn.Module):
    """Holds the taps of a depthwise causal convolution, last tap for the current row."""

    def __init__(self, new: Factory, channels: int, size: int) -> None:
        super().__init__()
        self.weight = new(channels, 1, size, dtype=new.kda_dtype)


class KdaAttention(nn.Module):
    """Kimi delta attention (K3 spec 2.4, Kimi-Linear spec 11)."""

    def __init__(self, new: Factory, config: KimiConfig) -> None:
        super().__init__()
        hidden, width, head_dim = config.hidden_size, config.kda_width, config.kda_head_dim
        self.heads, self.head_dim = config.kda_heads, head_dim
        self.gate_lower_bound = config.kda_gate_lower_bound
        self.full_rank_gate = config.kda_full_rank_gate
        self.q_proj = Linear(new, hidden, width)
        self.k_proj = Linear(new, hidden, width)
        self.v_proj = Linear(new, hidden, width)
        self.q_conv1d = Conv(new, width, config.kda_conv_size)
        self.k_conv1d = Conv(new, width, config.kda_conv_size)
        self.v_conv1d = Conv(new, width, config.kda_conv_size)
        self.A_log = new(*config.a_log_shape, dtype=torch.float32)
        self.dt_bias = new(width, dtype=torch.float32)
        self.f_a_proj = Linear(new, hidden, head_dim)
        self.f_b_proj = Linear(new, head_dim, width)
        self.b_proj = Linear(new, hidden, self.heads)
        if self.full_rank_gate:
            self.g_proj = Linear(new, hidden, width)
        else:
            self.g_a_proj = Linear(new, hidden, head_dim)
            self.g_b_proj = Linear(new, head_dim, width)
        self.o_norm = GatedRmsNorm(new, head_dim, config.rms_norm_eps)
        self.o_proj = Linear(new, width, hidden)

    def forward(
        self, x: torch.Tensor, state: LayerState, step: Step
    ) -> tuple[torch.Tensor, LayerState]:
        """Normed rows [M, hidden] -> [M, hidden] and the layer's next state."""
        assert isinstance(state, KdaState)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        f = self.f_b_proj(self.f_a_proj(x))
        b = self.b_proj(x)
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        weights = self._core_weights()
        if step.mode == "verify":
            o, journal_qkv, journal_f, journal_b = functional.kda_verify(
                *(q, k, v, f, b), *weights, *state[:2], step.slots, *state[2:],
                head_dim=self.head_dim,
                gate_lower_bound=self.gate_lower_bound,
                rows_per_request=step.rows_per_request,
            )  # fmt: skip
            state = KdaState(state.conv, state.recurrent, journal_qkv, journal_f, journal_b)
        else:
            o, conv, recurrent = functional.kda_step(
                *(q, k, v, f, b), *weights, *state[:2], step.slots,
                head_dim=self.head_dim,
                gate_lower_bound=self.gate_lower_bound,
                rows_per_request=step.rows_per_request,
            )  # fmt: skip
            state = KdaState(conv, recurrent, *state[2:])
        return self.o_proj(self.o_norm(o, gate)), state

    def commit(self, state: KdaState, slots: torch.Tensor, accepted: torch.Tensor) -> KdaState:
        """The state after the first accepted[r] rows that the last verify journalled."""
        conv, recurrent = functional.kda_commit(
            *state[2:], *self._core_weights(), *state[:2], slots, accepted,
            head_dim=self.head_dim,
            gate_lower_bound=self.gate_lower_bound,
        )  # fmt: skip
        return KdaState(conv, recurrent, *state[2:])

    def _core_weights(self) -> CoreWeights:
        # K3 stores more entries of A_log than there are heads.
        a_log = self.A_log.reshape(-1)[: self.heads]
        convs = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        return (*convs, a_log, self.dt_bias)


class MlaAttention(nn.Module):
    """Multi-head latent attention without rotation (K3 spec 2.5, Kimi-Linear spec 11)."""

    def __init__(self, new: Factory, config: KimiConfig) -> None:
        super().__init__()
        hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
        self.kv_lora_rank, self.q_lora_rank = rank, config.q_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.output_gate = config.v_head_dim, config.mla_output_gate
        q_width = heads * (self.nope_dim + self.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = Linear(new, hidden, q_width)
        else:
            self.q_a_proj = Linear(new, hidden, config.q_lora_rank)
            self.q_a_layernorm = RmsNorm(new, config.q_lora_rank, config.mla_lora_eps)
            self.q_b_proj = Linear(new, config.q_lora_rank, q_width)
        self.kv_a_proj_with_mqa = Linear(new, hidden, rank + self.rope_dim)
        self.kv_a_layernorm = RmsNorm(new, rank, config.mla_lora_eps)
        self.kv_b_proj = Linear(new, rank, heads * (self.nope_dim + self.v_dim))
        if self.output_gate:
            self.g_proj = Linear(new, hidden, heads * self.v_dim)
        self.o_proj = Linear(new, heads * self.v_dim, hidden)

    def forward(
        self, x: torch.Tensor, state: LayerState, step: Step
    ) -> tuple[torch.Tensor, LayerState]:
        """Normed rows [M, hidden] -> [M, hidden] and the layer's next state."""
        assert isinstance(state, MlaState)
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        kv = self.kv_a_proj_with_mqa(x)
        c = self.kv_a_layernorm(kv[:, : self.kv_lora_rank])
        k_pe = kv[:, self.kv_lora_rank :]
        where = (step.block_table, step.lengths, step.slots)
        rows = step.rows_per_request
        cache = functional.mla_append(state.cache, c, k_pe, *where, rows_per_request=rows)
        o = functional.mla_attend(
            q, cache, self.kv_b_proj.weight, *where,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            v_dim=self.v_dim,
            rows_per_request=rows,
        )  # fmt: skip
        if self.output_gate:
            o = functional.sigmoid_mul(o, self.g_proj(x))
        return self.o_proj(o), MlaState(cache)


class Activation(NamedTuple):
    """The gated activation of all MLPs of a model, as `functional.moe_experts` names it."""

    activation: Literal["situ", "silu"]
    beta: float
    linear_beta: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up [M, I] -> [M, I]."""
        if self.activation == "silu":
            return functional.silu_mul(gate, up)
        return functional.situ_mul(gate, up, beta=self.beta, linear_beta=self.linear_beta)


def _activation(config: KimiConfig) -> Activation:
    if config.activation not in ("situ", "silu"):
        raise InputError(
            f"activation {config.activation!r} is unknown: use a config with 'situ' or 'silu'"
        )
    return Activation(config.activation, config.situ_beta, config.situ_linear_beta)


class Mlp(nn.Module):
    """Gated MLP: the dense layers' and the shared experts' (K3 spec 2.7)."""

    def __init__(self, new: Factory, config: KimiConfig, width: int) -> None:
        super().__init__()
        self.activation = _activation(config)
        self.gate_proj = Linear(new, config.hidden_size, width)
        self.up_proj = Linear(new, config.hidden_size, width)
        self.down_proj = Linear(new, width, config.hidden_size)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [M, hidden] -> [M, hidden] in `out_dtype`, by default x's."""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)), out_dtype)


class Router(nn.Module):
    """Chooses the experts of a row, from float32 logits."""

    def __init__(self, new: Factory, config: KimiConfig) -> None:
        super().__init__()
        self.top_k, self.renormalize = config.top_k, config.router_renormalize
        self.scale = config.routed_scaling_factor
        self.weight = new(config.num_experts, config.hidden_size)
        self.e_score_correction_bias = new(config.num_experts, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, hidden] -> ids [M, k] int32 and weights [M, k] float32."""
        logits = functional.linear(x, self.weight, out_dtype=torch.float32)
        return functional.route_topk(
            logits,
            self.e_score_correction_bias,
            top_k=self.top_k,
            renormalize=self.renormalize,
            scale=self.scale,
        )


class Experts(nn.Module):
    """The routed experts of a layer, stacked: bf16 weights, or packed MXFP4 with scales."""

    def __init__(self, new: Factory, config: KimiConfig) -> None:
        super().__init__()
        self.activation = _activation(config)
        self.packed = config.expert_format == "mxfp4"
        count, inner, outer = config.num_experts, config.moe_intermediate_size, config.expert_width
        for name, rows, columns in (
            ("w1", inner, outer),
            ("w3", inner, outer),
            ("w2", outer, inner),
        ):
            if self.packed:
                packed = new(count, rows, columns // 2, dtype=torch.uint8)
                self.register_parameter(f"{name}_packed", packed)
                scale = new(count, rows, columns // 32, dtype=torch.uint8)
                self.register_parameter(f"{name}_scale", scale)
            else:
                self.register_parameter(name, new(count, rows, columns))

    def forward(
        self,
        z: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """z [M, Z] and the router's choice -> the weighted sum [M, Z] in `out_dtype` or z's."""
        if self.packed:
            operands = (
                *(self.w1_packed, self.w3_packed, self.w2_packed),
                *(self.w1_scale, self.w3_scale, self.w2_scale),
            )
        else:
            operands = (self.w1, self.w3, self.w2)
        tensors = cast(tuple[torch.Tensor, ...], operands)
        return functional.moe_experts(
            z, ids, weights, *tensors, **self.activation._asdict(), out_dtype=out_dtype
        )


class SparseMoe(nn.Module):
    """Routed experts, in a latent space where the model has one, beside shared ones (spec 2.8)."""

    def __init__(self, new: Factory, config: KimiConfig) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.latent_size
        self.gate = Router(new, config)
        self.experts = Experts(new, config)
        self.shared_experts = Mlp(new, config, config.shared_intermediate_size)
        self.has_latent, self.has_latent_norm = latent is not None, config.latent_norm
        if latent is not None:
            self.routed_expert_down_proj = Linear(new, hidden, latent)
            if config.latent_norm:
                self.routed_expert_norm = RmsNorm(new, latent, config.rms_norm_eps)
            self.routed_expert_up_proj = Linear(new, latent, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, hidden] -> [M, hidden]."""
        ids, weights = self.gate(x)
        z = self.routed_expert_down_proj(x) if self.has_latent else x
        if not self.has_latent:  # one rounding of the whole sum, so that ranks can share a reduce
            routed = self.experts(z, ids, weights, functional.UNROUNDED)
            return (routed + self.shared_experts(x, functional.UNROUNDED)).to(x.dtype)
        routed = self.experts(z, ids, weights)
        if self.has_latent_norm:
            routed = self.routed_expert_norm(routed)
        return self.routed_expert_up_proj(routed) + self.shared_experts(x)
