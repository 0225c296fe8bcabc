"""The floor of a decode step: the bytes it must read, over the bandwidth that can read them.

Everything follows from the model's configuration, without a graph: `parameter_bytes` counts what
a checkpoint holds, `floor_bytes` what one step must read once over all GPUs, `rank_bytes` what one
rank reads when some weights are replicated, and `roofline` turns bytes into milliseconds and sets
a measured step against them. A GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from k3fuse.errors import InputError
from k3fuse.expected import expected_distinct_experts
from k3fuse.models.kimi_config import KimiConfig
from k3fuse.target import Target

Scheme = Literal["stock", "stock_replicated_up", "sharded"]
Split = Literal["sharded", "replicated", "up", "unread"]

_BF16 = 2
_FP32 = 4
_IN_PROJ_ROWS = 16  # merged KDA in-projection: rows padded to a multiple of the MMA tile
_MXFP4_MIN_ROWS = 256  # stock MXFP4 kernels: least rows of the intermediate width on a rank

# Families that the checkpoints store in fp32; all others but MXFP4 experts are bf16
# (K3 spec 1.3 and 4.2, Kimi-Linear section 11).
_FP32_FAMILIES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "kimi_k3": frozenset(
            {"conv", "a_log", "a_log padding", "dt_bias", "o_norm", "router_bias"}
        ),
        "kimi_linear": frozenset({"a_log", "a_log padding", "dt_bias", "router_bias"}),
    }
)


@dataclass(frozen=True)
class _Family:
    """Tensors of one kind in one kind of sublayer; `size` is bytes a layer over the whole model.

    `split` says how stock tensor parallelism reads them: "up" is the latent up-projection, stored
    whole and read whole or by shards; "unread" is what a checkpoint stores and no step reads.
    """

    part: str
    name: str
    layers: int
    size: int
    split: Split


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of a checkpoint by sublayer; `trunk` is all decoder layers without routed experts."""

    kda_sublayer: int
    mla_sublayer: int
    moe_trunk: int  # one MoE layer without its routed experts
    dense_mlp: int
    layer_vectors: int  # norms and AttnRes vectors of one layer
    expert: int  # one routed expert
    trunk: int
    ends: int  # embedding, LM head, final norm, output AttnRes
    all_experts: int

    @property
    def resident(self) -> int:
        """All but the routed experts."""
        return self.trunk + self.ends

    @property
    def total(self) -> int:
        """The whole model."""
        return self.resident + self.all_experts


@dataclass(frozen=True)
class FloorBytes:
    """What one decode step must read once over all GPUs, and its optional lines."""

    trunk: int
    experts: int
    lm_head: int  # with the final norm and the output AttnRes
    state: int  # KDA state, read and written

    @property
    def published(self) -> int:
        """Decoder layers and routed experts: the definition behind the published floors."""
        return self.trunk + self.experts

    @property
    def total(self) -> int:
        """The published floor plus LM head and KDA state."""
        return self.published + self.lm_head + self.state


@dataclass(frozen=True)
class RankItem:
    """One line of `rank_bytes`. `padding` marks zeros that are read only for a kernel's sake."""

    part: str
    name: str
    layers: int
    bytes_per_layer: int
    padding: bool = False

    @property
    def bytes(self) -> int:
        """Bytes a step over all layers that have this item."""
        return self.layers * self.bytes_per_layer


@dataclass(frozen=True)
class RankBytes:
    """Bytes one rank reads (and for state, writes) in one step, item by item."""

    scheme: Scheme
    tp: int
    batch: int
    items: tuple[RankItem, ...]

    @property
    def total(self) -> int:
        """All items, padding included."""
        return sum(item.bytes for item in self.items)

    @property
    def padding(self) -> int:
        """Padding alone."""
        return sum(item.bytes for item in self.items if item.padding)

    def per_layer(self, part: str) -> int:
        """Bytes of one layer's `part`, padding included."""
        return sum(item.bytes_per_layer for item in self.items if item.part == part)


@dataclass(frozen=True)
class Roofline:
    """The floor of a step on `tp` GPUs, and what a measured step leaves above it.

    The fields after `measured_ms` are None unless a measurement was given.
    """

    bytes: FloorBytes
    counted_bytes: int  # those that the floor divides
    bandwidth: float  # bytes per second of all GPUs together, nominal
    floor_ms: float
    reachable_ms: float  # the same bytes at the bandwidth that reading kernels reach
    tokens_per_s: float  # at the floor
    measured_ms: float | None
    share: float | None  # floor over measured
    everything_else_ms: float | None
    everything_else_us_per_layer: float | None


def parameter_bytes(config: KimiConfig) -> ParameterBytes:
    """Count a checkpoint's bytes sublayer by sublayer (K3 spec 1.3, to the byte)."""
    families = _families(config)

    def stored(part: str) -> int:
        return sum(f.size for f in families if f.part == part)

    expert = _expert_bytes(config)
    embedding = config.vocab_size * config.hidden_size * _BF16
    return ParameterBytes(
        kda_sublayer=stored("kda"),
        mla_sublayer=stored("mla"),
        moe_trunk=sum(stored(part) for part in ("router+down", "up", "shared")),
        dense_mlp=stored("dense"),
        layer_vectors=stored("vectors"),
        expert=expert,
        trunk=sum(f.layers * f.size for f in families if f.part != "head"),
        # A tied head is the embedding table under another name.
        ends=stored("head") + (0 if config.tie_word_embeddings else embedding),
        all_experts=_moe_layers(config) * config.num_experts * expert,
    )


def floor_bytes(config: KimiConfig, batch: int) -> FloorBytes:
    """Bytes that a step of `batch` rows must read at least, each weight once over the group.

    K3 reads 134.64 GB at batch 1 by the published definition (108.81 trunk + 25.83 experts) and
    about 303 GB at batch 8. The trunk counts stored bytes. Not counted: embedding rows, MLA
    caches, activations, and anything that replication over ranks adds.
    """
    _require_positive(batch=batch)
    families = _families(config)
    return FloorBytes(
        trunk=parameter_bytes(config).trunk,
        experts=round(
            _moe_layers(config) * _distinct_experts(config, batch) * _expert_bytes(config)
        ),
        lm_head=sum(f.size for f in families if f.part == "head"),
        state=_kda_layers(config) * batch * sum(_kda_state_bytes(config).values()),
    )


def rank_bytes(config: KimiConfig, tp: int, batch: int, *, scheme: Scheme) -> RankBytes:
    """Bytes that one of `tp` ranks reads in a step of `batch` rows (K3 spec 3.2).

    Schemes: "stock" replicates router, latent down-projection and the MLA a-projections and reads
    the up-projection by shards; "stock_replicated_up" reads that one whole too; "sharded" splits
    all four. f_a, g_a, norms and AttnRes vectors are replicated in all three.

    Counted: all decoder weights in their checkpoint precision (conv, dt_bias, A_log of the real
    heads and o_norm included), KDA recurrent and conv state (three columns) once read and once
    written per row, the LM head's shard, the final norm and output AttnRes. Not counted: embedding
    rows, MLA caches, activations. The merged KDA in-projection is padded to a multiple of 16 rows
    in every scheme; MXFP4 experts are padded to 256 intermediate rows a rank in the two stock
    schemes only. That is the choice which gives the spec's K3 totals at batch 1, in GB: TP16
    15.51 / 19.95 / 8.76 with 0.54 of expert padding in the first two; TP8 23.16 / 27.30 / 17.36
    (the exact sum is 23.16486; the spec prints 23.17).

    Raises `InputError` when `tp` does not divide a dimension that is split.
    """
    _require_positive(tp=tp, batch=batch)
    _require_divisible(config, tp)
    up_ranks = 1 if scheme == "stock_replicated_up" else tp
    ranks = {"sharded": tp, "replicated": 1, "up": up_ranks}
    extra = _REPLICATED_BY_STOCK if scheme == "sharded" else frozenset[str]()
    items = [
        RankItem(f.part, f.name, f.layers, f.size // (tp if f.name in extra else ranks[f.split]))
        for f in _families(config)
        if f.split != "unread"
    ]
    kda_layers = _kda_layers(config)
    rows = sum(n // ranks[split] for _, n, split in _in_proj(config))
    padding = -rows % _IN_PROJ_ROWS * config.hidden_size * _BF16
    items.append(RankItem("kda", "in_proj padding", kda_layers, padding, padding=True))
    items.extend(
        RankItem("state", name, kda_layers, batch * size // tp)
        for name, size in _kda_state_bytes(config).items()
    )
    moe_layers = _moe_layers(config)
    experts = _distinct_experts(config, batch) * _expert_bytes(config) / tp
    items.append(RankItem("experts", "w1+w3+w2", moe_layers, round(experts)))
    if scheme != "sharded" and config.expert_format == "mxfp4":
        local_rows = config.moe_intermediate_size // tp
        missing = max(0, _MXFP4_MIN_ROWS - local_rows)
        zeros = round(experts * missing / local_rows)
        items.append(RankItem("experts", "padding", moe_layers, zeros, padding=True))
    return RankBytes(scheme, tp, batch, tuple(item for item in items if item.bytes))


def roofline(
    config: KimiConfig,
    gpu: Target,
    tp: int,
    batch: int,
    measured_ms: float | None = None,
    *,
    include_head_and_state: bool = False,
) -> Roofline:
    """Set the floor of a step on `tp` GPUs of kind `gpu`, and compare a measured step with it.

    The floor divides the published bytes (see `FloorBytes`) by the nominal bandwidth of all GPUs,
    as the published figures do: K3 on 16 GB300 at batch 1 has a floor of 1.05 ms or 951 tokens/s,
    and a step of 3.90 ms is 27 % of it with 30.6 us a layer of everything else.
    `include_head_and_state` adds LM head and KDA state to the bytes.
    """
    _require_positive(tp=tp, batch=batch)
    if measured_ms is not None and not (math.isfinite(measured_ms) and measured_ms > 0):
        raise InputError(f"measured_ms is {measured_ms}: give the step's time in milliseconds, > 0")
    sizes = floor_bytes(config, batch)
    counted = sizes.total if include_head_and_state else sizes.published
    bandwidth = tp * gpu.hbm_bandwidth
    floor_ms = 1e3 * counted / bandwidth
    rest = None if measured_ms is None else measured_ms - floor_ms
    return Roofline(
        bytes=sizes,
        counted_bytes=counted,
        bandwidth=bandwidth,
        floor_ms=floor_ms,
        reachable_ms=1e3 * counted / (tp * gpu.read_bandwidth),
        tokens_per_s=1e3 * batch / floor_ms,
        measured_ms=measured_ms,
        share=None if measured_ms is None else floor_ms / measured_ms,
        everything_else_ms=rest,
        everything_else_us_per_layer=None if rest is None else 1e3 * rest / config.num_layers,
    )


_REPLICATED_BY_STOCK = frozenset({"router", "down", "q_a", "kv_a"})

_Tensor = tuple[str, int, Split]  # name, elements, split
_S: Split = "sharded"
_R: Split = "replicated"


def _families(config: KimiConfig) -> list[_Family]:
    """Every tensor family of the decoder and its head but the routed experts."""
    h = config.hidden_size
    with_attn_res = config.attn_res_block_size is not None
    moe_layers = _moe_layers(config)
    parts: list[tuple[str, int, list[_Tensor]]] = [
        ("kda", _kda_layers(config), list(_kda_tensors(config))),
        ("mla", len(config.mla_layers), list(_mla_tensors(config))),
        ("router+down", moe_layers, list(_route_tensors(config))),
        ("up", moe_layers, list(_up_tensors(config))),
        ("shared", moe_layers, [("gate+up+down", 3 * h * config.shared_intermediate_size, _S)]),
        ("dense", config.first_k_dense, [("gate+up+down", 3 * h * config.intermediate_size, _S)]),
        ("vectors", config.num_layers, [("norms", 2 * h, _R), ("attn_res", 4 * h, _R)]),
        (
            "head",
            1,
            [("lm_head", config.vocab_size * h, _S), ("norm", h, _R), ("attn_res", 2 * h, _R)],
        ),
    ]
    fp32 = _FP32_FAMILIES[config.model_type]
    return [
        _Family(part, name, layers, elements * (_FP32 if name in fp32 else _BF16), split)
        for part, layers, tensors in parts
        for name, elements, split in tensors
        if name != "attn_res" or with_attn_res
    ]


def _in_proj(config: KimiConfig) -> list[_Tensor]:
    """KDA projections that read the hidden row and run as one merged GEMM; rows as elements."""
    p, d = config.kda_width, config.kda_head_dim
    gate: _Tensor = ("g", p, _S) if config.kda_full_rank_gate else ("g_a", d, _R)
    return [
        ("q", p, _S),
        ("k", p, _S),
        ("v", p, _S),
        gate,
        ("f_a", d, _R),
        ("b", config.kda_heads, _S),
    ]


def _kda_tensors(config: KimiConfig) -> Iterator[_Tensor]:
    p, d, heads = config.kda_width, config.kda_head_dim, config.kda_heads
    for name, rows, split in _in_proj(config):
        yield name, rows * config.hidden_size, split
    yield "f_b", p * d, _S
    if not config.kda_full_rank_gate:
        yield "g_b", p * d, _S
    yield "o", config.hidden_size * p, _S
    yield "conv", 3 * p * config.kda_conv_size, _S
    yield "dt_bias", p, _S
    yield "a_log", heads, _S
    yield "a_log padding", math.prod(config.a_log_shape) - heads, "unread"
    yield "o_norm", d, _R


def _mla_tensors(config: KimiConfig) -> Iterator[_Tensor]:
    h, heads, kv_lora = config.hidden_size, config.num_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q_rows = heads * (nope + rope)
    if config.q_lora_rank is None:
        yield "q", q_rows * h, _S
    else:
        yield "q_a", config.q_lora_rank * h, _R
        yield "q_a_norm", config.q_lora_rank, _R
        yield "q_b", q_rows * config.q_lora_rank, _S
    yield "kv_a", (kv_lora + rope) * h, _R
    yield "kv_a_norm", kv_lora, _R
    yield "kv_b", heads * (nope + value) * kv_lora, _S
    if config.mla_output_gate:
        yield "g", heads * value * h, _S
    yield "o", h * heads * value, _S


def _route_tensors(config: KimiConfig) -> Iterator[_Tensor]:
    yield "router", config.num_experts * config.hidden_size, _R
    yield "router_bias", config.num_experts, _R
    if config.latent_size is not None:
        yield "down", config.latent_size * config.hidden_size, _R


def _up_tensors(config: KimiConfig) -> Iterator[_Tensor]:
    if config.latent_size is not None:
        yield "up", config.hidden_size * config.latent_size, "up"
        if config.latent_norm:
            yield "latent_norm", config.latent_size, _R


def _kda_state_bytes(config: KimiConfig) -> dict[str, int]:
    """State traffic of one KDA layer and row: each byte is read once and written once."""
    return {
        "recurrent r+w": 2 * _FP32 * config.kda_width * config.kda_head_dim,
        "conv r+w": 2 * _BF16 * 3 * config.kda_width * (config.kda_conv_size - 1),
    }


def _expert_bytes(config: KimiConfig) -> int:
    elements = 3 * config.moe_intermediate_size * config.expert_width
    if config.expert_format == "mxfp4":
        return elements // 2 + elements // 32  # nibbles and one scale byte for 32 of them
    return elements * _BF16


def _distinct_experts(config: KimiConfig, batch: int) -> float:
    return expected_distinct_experts(config.num_experts, config.top_k, batch)


def _moe_layers(config: KimiConfig) -> int:
    return config.num_layers - config.first_k_dense


def _kda_layers(config: KimiConfig) -> int:
    return config.num_layers - len(config.mla_layers)


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise InputError(f"{name} is {value}: it must be 1 or more")


def _require_divisible(config: KimiConfig, tp: int) -> None:
    split = {
        "kda_heads": config.kda_heads,
        "num_heads": config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "shared_intermediate_size": config.shared_intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, size in split.items():
        if size % tp:
            raise InputError(f"tp {tp} does not divide {name} = {size}: choose a tp that does")
