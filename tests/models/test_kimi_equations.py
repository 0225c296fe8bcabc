"""K3 against its equations written down once more, over whole sequences and without a state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import conv1d, silu

from k3fuse.models.kimi import KimiModel, StepInputs
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import KimiConfig

Tensors = Mapping[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


def mlp(x: torch.Tensor, w: Tensors, at: str) -> torch.Tensor:
    gate, up = (x @ w[f"{at}.{n}_proj.weight"].T for n in ("gate", "up"))
    return situ(gate, up) @ w[f"{at}.down_proj.weight"].T


def kda(x: torch.Tensor, w: Tensors, at: str, config: KimiConfig) -> torch.Tensor:
    rows, heads, dim = len(x), config.kda_heads, config.kda_head_dim

    def project(name: str) -> torch.Tensor:
        return x @ w[f"{at}.{name}_proj.weight"].T

    def convolved(name: str) -> torch.Tensor:
        taps = w[f"{at}.{name}_conv1d.weight"]
        y = conv1d(project(name).T[None], taps, padding=3, groups=heads * dim)
        return silu(y[0, :, :rows].T).view(rows, heads, dim)

    q, k, v = convolved("q"), convolved("k"), convolved("v")
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / dim**0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    f = project("f_a") @ w[f"{at}.f_b_proj.weight"].T + w[f"{at}.dt_bias"]
    rate = w[f"{at}.A_log"][:heads].exp()[:, None]
    decay = (-5 * (rate * f.view(rows, heads, dim)).sigmoid()).exp()
    beta = project("b").sigmoid()
    o = torch.zeros_like(v)
    for head in range(heads):
        state = torch.zeros(dim, dim, dtype=x.dtype)  # [k, v], as in the report
        for t in range(rows):
            kt = k[t, head]
            state = decay[t, head][:, None] * state
            state = state + beta[t, head] * torch.outer(kt, v[t, head] - kt @ state)
            o[t, head] = q[t, head] @ state
    y = rms(o, w[f"{at}.o_norm.weight"]).flatten(1) * project("g").sigmoid()
    return y @ w[f"{at}.o_proj.weight"].T


def mla(x: torch.Tensor, w: Tensors, at: str, config: KimiConfig) -> torch.Tensor:
    rows, heads, rank = len(x), config.num_heads, config.kv_lora_rank
    nope, v_dim = config.qk_nope_head_dim, config.v_head_dim
    qa = rms(x @ w[f"{at}.q_a_proj.weight"].T, w[f"{at}.q_a_layernorm.weight"], 1e-6)
    q = (qa @ w[f"{at}.q_b_proj.weight"].T).view(rows, heads, -1)
    kv = x @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
    c = rms(kv[:, :rank], w[f"{at}.kv_a_layernorm.weight"], 1e-6)
    expanded = (c @ w[f"{at}.kv_b_proj.weight"].T).view(rows, heads, nope + v_dim)
    scores = torch.einsum("thd,shd->hts", q[..., :nope], expanded[..., :nope])
    scores = (scores + torch.einsum("thd,sd->hts", q[..., nope:], kv[:, rank:])) / q.shape[
        -1
    ] ** 0.5
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    p = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    o = torch.einsum("hts,shd->thd", p, expanded[..., nope:]).flatten(1)
    return (o * (x @ w[f"{at}.g_proj.weight"].T).sigmoid()) @ w[f"{at}.o_proj.weight"].T


def unpack(w: Tensors, at: str, expert: int) -> torch.Tensor:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float64)
    packed = w[f"{at}_packed"][expert].long()
    values = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
    values[:, 0::2], values[:, 1::2] = codes[packed % 16], codes[packed // 16]
    scale = 2.0 ** (w[f"{at}_scale"][expert].double() - 127)
    return values * scale.repeat_interleave(32, dim=1)


def moe(x: torch.Tensor, w: Tensors, at: str, config: KimiConfig) -> torch.Tensor:
    scores = (x @ w[f"{at}.gate.weight"].T).sigmoid()
    chosen = (scores + w[f"{at}.gate.e_score_correction_bias"]).topk(config.top_k).indices
    z = x @ w[f"{at}.routed_expert_down_proj.weight"].T
    u = torch.zeros_like(z)
    for t in range(len(x)):
        p = scores[t, chosen[t]]
        for expert, weight in zip(map(int, chosen[t]), p / p.sum(), strict=True):
            w1, w3, w2 = (unpack(w, f"{at}.experts.{n}", expert) for n in ("w1", "w3", "w2"))
            u[t] += weight * (w2 @ situ(w1 @ z[t], w3 @ z[t]))
    routed = rms(u, w[f"{at}.routed_expert_norm.weight"])
    return routed @ w[f"{at}.routed_expert_up_proj.weight"].T + mlp(x, w, f"{at}.shared_experts")


def forward(tokens: torch.Tensor, w: Tensors, config: KimiConfig) -> torch.Tensor:
    bank: list[torch.Tensor] = []

    def mix(total: torch.Tensor, at: str) -> torch.Tensor:
        values = torch.stack([*bank, total])
        scores = rms(values, w[f"{at}_norm.weight"]) @ w[f"{at}_proj.weight"][0]
        return (scores.softmax(0)[..., None] * values).sum(0)

    total = w["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        h = mix(total, f"{at}.self_attention_res") if layer else total
        attention = mla if layer in config.mla_layers else kda
        a = attention(rms(h, w[f"{at}.input_layernorm.weight"]), w, f"{at}.self_attn", config)
        if layer % 3 == 0:
            bank.append(total)
            total = a
        else:
            total = total + a
        x = rms(mix(total, f"{at}.mlp_res"), w[f"{at}.post_attention_layernorm.weight"])
        if layer == 0:
            total = total + mlp(x, w, f"{at}.mlp")
        else:
            total = total + moe(x, w, f"{at}.block_sparse_moe", config)
    h = mix(total, "model.output_attn_res")
    return rms(h, w["model.norm.weight"]) @ w["lm_head.weight"].T


def randomize(model: nn.Module) -> None:
    generator = torch.default_generator.manual_seed(7)
    for path, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            low, high = (122, 125) if path.endswith("_scale") else (0, 256)
            parameter.copy_(torch.randint(low, high, parameter.shape, generator=generator))
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if parameter.dim() == 2:
                parameter.div_(parameter.shape[1] ** 0.5)


def test_k3_follows_its_equations() -> None:
    config = BUILTIN_CONFIGS["kimi-k3-tiny-9"]
    model = KimiModel(config).double()
    randomize(model)
    tokens = torch.randint(
        0, config.vocab_size, (7,), generator=torch.default_generator.manual_seed(8)
    )
    expected = forward(tokens, model.state_dict(), config)
    inputs = StepInputs(
        tokens,
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([[1, 0]], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    state = model.new_state(slots=1, pages=2, page_size=4, rows=1)
    logits = model(inputs, state, rows_per_request=7).logits
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
