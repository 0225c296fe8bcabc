"""The ops that the stock forwards are made of: pure functions on torch tensors.

Each computes in float32 (float64 for float64 inputs), rounds once, never writes to its inputs,
and stays one node under torch.fx. Head and expert counts come from the tensors, so every op also
runs on one rank's slice of its weights.
"""

from k3fuse.functional.activation import sigmoid_mul, silu_mul, situ_mul
from k3fuse.functional.attn_res import attn_res_blocks, attn_res_merge, attn_res_mix
from k3fuse.functional.kda import kda_commit, kda_reset, kda_step, kda_verify
from k3fuse.functional.linear import argmax, embedding, linear
from k3fuse.functional.mla import (
    mla_absorb_query,
    mla_append,
    mla_attend,
    mla_attend_latent,
    mla_value,
)
from k3fuse.functional.model_op import model_op
from k3fuse.functional.moe import moe_experts, route_topk
from k3fuse.functional.norm import gated_rms_norm, rms_norm
from k3fuse.functional.precision import UNROUNDED

__all__ = [
    "UNROUNDED",
    "argmax",
    "attn_res_blocks",
    "attn_res_merge",
    "attn_res_mix",
    "embedding",
    "gated_rms_norm",
    "kda_commit",
    "kda_reset",
    "kda_step",
    "kda_verify",
    "linear",
    "mla_absorb_query",
    "mla_append",
    "mla_attend",
    "mla_attend_latent",
    "mla_value",
    "model_op",
    "moe_experts",
    "rms_norm",
    "route_topk",
    "sigmoid_mul",
    "silu_mul",
    "situ_mul",
]
