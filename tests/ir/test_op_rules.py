"""Result types and placements: what each family of ops takes, and what it says when it does not."""

from __future__ import annotations

import re

import pytest
import torch

from k3fuse.ir import Context, TypeRuleError, all_ops, op_named
from k3fuse.ir.graph import Attr
from k3fuse.tensor_type import parse_type

EPS: dict[str, Attr] = {"eps": 1e-5}
TOP: dict[str, Attr] = {"top_k": 2, "renormalize": True, "scale": 1.0}
ACT: dict[str, Attr] = {"activation": "silu", "beta": 0.0, "linear_beta": 0.0}
MLA: dict[str, Attr] = {"nope_dim": 8, "rope_dim": 4, "v_dim": 8, "rows_per_request": 1}
KDA: dict[str, Attr] = {"head_dim": 4, "gate_lower_bound": None, "rows_per_request": 1}
LATENT: dict[str, Attr] = {
    "kv_lora": 16, "rope_dim": 4, "softmax_scale": 0.25, "rows_per_request": 1,
}  # fmt: skip
PAGED = "i32[R,table] i32[R] i32[R]"
EXPERTS = "bf16[M,8] i32[M,2] f32[M,2]"


def kda(cut: bool) -> str:
    rows = ["bf16[M,16]@S(1)"] * 4 + ["bf16[M,4]@S(1)"]
    weights = ["bf16[16,1,4]@S(0)"] * 3 + ["f32[4]@S(0)", "f32[16]@S(0)"]
    states = ["bf16[slots,3,16,3]@S(2)", "f32[slots,4,4,4]@S(1)", "i32[R]"]
    text = " ".join([*rows, *weights, *states])
    return text if cut else re.sub(r"@S\(\d\)", "", text)


# op, operands, attributes, results on two ranks
ACCEPTED: list[tuple[str, str, dict[str, Attr], str]] = [
    ("linear", "bf16[M,8] bf16[4,8]", {}, "bf16[M,4]"),
    ("linear", "bf16[M,8] bf16[4,8]@S(0)", {}, "bf16[M,4]@S(1)"),
    ("linear", "bf16[M,8]@S(1) bf16[4,8]@S(1)", {}, "bf16[M,4]@P"),
    ("linear", "bf16[M,8] bf16[4,8]", {"out": "f32"}, "f32[M,4]"),
    ("embedding", "i64[M] bf16[16,8]", {}, "bf16[M,8]"),
    ("embedding", "i64[M] bf16[16,8]@S(0)", {}, "bf16[M,8]@P"),
    ("argmax", "f32[M,16]", {}, "i64[M]"),
    ("argmax_local", "f32[M,16]@S(1)", {}, "f32[M,2]@S(1) i64[M,2]@S(1)"),
    ("argmax_pick", "f32[M,2] i64[M,2]", {}, "i64[M]"),
    ("add", "bf16[M,8] f32[M,8]", {}, "f32[M,8]"),
    ("add", "bf16[M,8]@P bf16[M,8]@P", {}, "bf16[M,8]@P"),
    ("mul", "bf16[M,8]@S(1) bf16[M,8]@S(1)", {}, "bf16[M,8]@S(1)"),
    ("sigmoid", "bf16[M,8]@S(1)", {}, "bf16[M,8]@S(1)"),
    ("silu_mul", "bf16[M,8]@S(1) bf16[M,8]@S(1)", {}, "bf16[M,8]@S(1)"),
    ("silu", "bf16[M,8]", {}, "bf16[M,8]"),
    ("situ_mul", "bf16[M,8] bf16[M,8]", {"beta": 4.0, "linear_beta": 25.0}, "bf16[M,8]"),
    ("sigmoid_mul", "bf16[M,8]@S(1) bf16[M,8]@S(1)", {}, "bf16[M,8]@S(1)"),
    ("cast", "bf16[M,8]@P", {"dtype": "f32"}, "f32[M,8]@P"),
    ("rms_norm", "bf16[M,8] bf16[8]", EPS, "bf16[M,8]"),
    ("gated_rms_norm", "f32[M,16]@S(1) bf16[M,16]@S(1) bf16[4]", EPS, "bf16[M,16]@S(1)"),
    ("all_reduce", "bf16[M,8]@P", {}, "bf16[M,8]"),
    ("all_reduce", "f32[M,8]@P", {"out": "bf16"}, "bf16[M,8]"),
    ("reduce_scatter", "bf16[M,8]@P", {"dim": 1}, "bf16[M,8]@S(1)"),
    ("reduce_scatter", "f32[M,8]@P", {"dim": 1, "out": "bf16"}, "bf16[M,8]@S(1)"),
    ("sum_slots", "f32[2,M,8]@S(2)", {"out": "bf16"}, "bf16[M,8]@S(1)"),
    ("moe_experts",
     f"{EXPERTS} bf16[4,6,8]@S(1) bf16[4,6,8]@S(1) bf16[4,8,6]@S(2)", {**ACT, "out": "f32"},
     "f32[M,8]@P"),
    ("all_gather", "bf16[M,8]@S(1)", {"dim": 1}, "bf16[M,8]"),
    ("push_partial", "bf16[M,8]@P", {}, "bf16[2,M,8]"),
    ("push_chunks", "bf16[M,8]@P", {"dim": 1}, "bf16[2,M,8]@S(2)"),
    ("push_gather", "bf16[M,8]@S(1)", {"dim": 1}, "bf16[M,8]"),
    ("sum_slots", "bf16[2,M,8]", {}, "bf16[M,8]"),
    ("receive", "bf16[M,8]", {}, "bf16[M,8]"),
    ("sum_slots", "bf16[2,M,8]@S(2)", {}, "bf16[M,8]@S(1)"),
    ("take_shard", "bf16[4,8]", {"dim": 0}, "bf16[4,8]@S(0)"),
    ("slice", "bf16[M,8]@S(0)", {"dim": 1, "start": 2, "stop": 5}, "bf16[M,3]@S(0)"),
    ("view", "bf16[M,8]@S(1)", {"shape": ("M", 4, 2)}, "bf16[M,4,2]@S(1)"),
    ("view", "bf16[8,3]@S(0)", {"shape": (4, 2, 3)}, "bf16[4,2,3]@S(0)"),
    ("route_topk", "f32[M,8] f32[8]", TOP, "i32[M,2] f32[M,2]"),
    ("moe_experts", f"{EXPERTS} bf16[4,6,8] bf16[4,6,8] bf16[4,8,6]", ACT, "bf16[M,8]"),
    ("moe_experts",
     f"{EXPERTS} bf16[4,6,8]@S(1) bf16[4,6,8]@S(1) bf16[4,8,6]@S(2)", ACT, "bf16[M,8]@P"),
    ("mla_append", f"bf16[pages,32,20] bf16[M,16] bf16[M,4] {PAGED}",
     {"rows_per_request": 1}, "bf16[pages,32,20]"),
    ("mla_attend", f"bf16[M,48] bf16[pages,32,20] bf16[64,16] {PAGED}", MLA, "bf16[M,32]"),
    ("mla_attend", f"bf16[M,48]@S(1) bf16[pages,32,20] bf16[64,16]@S(0) {PAGED}", MLA,
     "bf16[M,32]@S(1)"),
    ("mla_absorb_query", "bf16[M,48]@S(1) bf16[4,8,16]@S(0)", {"nope_dim": 8, "rope_dim": 4},
     "bf16[M,80]@S(1)"),
    ("mla_attend_latent", f"bf16[M,80]@S(1) bf16[pages,32,20] {PAGED}", LATENT,
     "bf16[M,64]@S(1)"),
    ("mla_value", "bf16[M,64]@S(1) bf16[4,8,16]@S(0)", {}, "bf16[M,32]@S(1)"),
    ("kda_step", kda(cut=False), KDA, "f32[M,16] bf16[slots,3,16,3] f32[slots,4,4,4]"),
    ("kda_step", kda(cut=True), KDA,
     "f32[M,16]@S(1) bf16[slots,3,16,3]@S(2) f32[slots,4,4,4]@S(1)"),
    ("attn_res_mix", "bf16[8] bf16[1,8] bf16[M,8] bf16[M,8]", EPS, "bf16[M,8]"),
    ("attn_res_blocks", "f32[8] bf16[M,8] bf16[M,8]", EPS, "f32[M] f32[M] f32[M,8]"),
    ("attn_res_merge", "f32[8] f32[M] f32[M] f32[M,8] bf16[M,8]", EPS, "bf16[M,8]"),
    ("l2_prefetch", "bf16[8,8]", {"bytes": 64}, ""),
]  # fmt: skip

REJECTED: list[tuple[str, str, dict[str, Attr], str]] = [
    ("linear", "bf16[M,8]", {}, "takes 2 operands, got 1"),
    ("linear", "bf16[M,8] bf16[4,9]", {}, "do not multiply"),
    ("linear", "f32[M,8] f32[4,8]", {"out": "bf16"}, "bf16 would narrow f32"),
    ("linear", "bf16[M,8]@S(1) bf16[4,8]", {}, "no column, row or whole split"),
    ("linear", "bf16[M,8]@S(1) bf16[4,8]@S(0)", {}, "no column, row or whole split"),
    ("linear", "bf16[M,8]@P bf16[4,8]", {}, "no column, row or whole split"),
    ("linear", "bf16[M,8] bf16[5,8]@S(0)", {}, "dimension 1 of .*5.* does not divide by 2 ranks"),
    ("embedding", "i64[M] bf16[15,8]@S(0)", {}, "dimension 0 of .* does not divide by 2 ranks"),
    ("embedding", "i64[M] bf16[16,8]@S(1)", {}, "weight: operand 0 must be replicated"),
    ("argmax", "f32[M,16]@S(1)", {}, "must be replicated"),
    ("argmax_local", "f32[M,16]", {}, "must be split by vocabulary"),
    ("argmax_pick", "f32[M,2] i64[M,3]", {}, "shapes differ"),
    ("add", "bf16[M,8] bf16[M,4]", {}, "shapes differ"),
    ("add", "bf16[M,8] bf16[M,8]@P", {}, "placements differ"),
    ("mul", "bf16[M,8]@P bf16[M,8]@P", {}, "not of partial sums"),
    ("silu", "bf16[M,8]@P", {}, "not of partial sums"),
    ("situ_mul", "bf16[M,8]@P bf16[M,8]@P", {"beta": 1.0, "linear_beta": 1.0}, "partial sums"),
    ("situ_mul", "bf16[M,8] bf16[M,8]", {"beta": "x", "linear_beta": 1.0}, "must be a number"),
    ("cast", "i32[M]", {"dtype": "f32"}, "changes the kind of number"),
    ("rms_norm", "bf16[M,8]@S(1) bf16[8]", EPS, "must be replicated"),
    ("rms_norm", "bf16[M,8]@P bf16[8]", EPS, "must be replicated"),
    ("rms_norm", "bf16[M,8] bf16[4]", EPS, "does not fit"),
    ("gated_rms_norm", "f32[M,16]@S(1) bf16[M,16] bf16[4]", EPS, "must be cut alike"),
    ("gated_rms_norm", "f32[M,12]@S(1) bf16[M,12]@S(1) bf16[4]", EPS, "is not whole heads of 4"),
    ("all_reduce", "bf16[M,8]", {}, "is no partial sum"),
    ("reduce_scatter", "bf16[M,9]@P", {"dim": 1}, "dimension 1 .* does not divide by 2"),
    ("reduce_scatter", "bf16[M,8]@P", {"dim": 0}, "dimension 0 .* does not divide by 2"),
    ("all_gather", "bf16[M,8]", {"dim": 1}, "is not split along dim"),
    ("all_gather", "bf16[M,8]@S(1)", {"dim": 0}, "is not split along dim"),
    ("push_partial", "bf16[M,8]@S(1)", {}, "is no partial sum"),
    ("push_chunks", "bf16[M,9]@P", {"dim": 1}, "does not divide by 2 ranks"),
    ("sum_slots", "bf16[3,M,8]", {}, "has not one slot a rank"),
    ("sum_slots", "bf16[2,M,8]@P", {}, "must have arrived"),
    ("take_shard", "bf16[4,8]@S(0)", {"dim": 0}, "is not whole"),
    ("take_shard", "bf16[5,8]", {"dim": 0}, "dimension 0 .* does not divide"),
    ("slice", "bf16[M,8]@S(1)", {"dim": 1, "start": 0, "stop": 4}, "is split over the ranks"),
    ("slice", "bf16[M,8]", {"dim": 1, "start": 4, "stop": 9}, "leaves dimension 1"),
    ("slice", "bf16[M,8]", {"dim": 2, "start": 0, "stop": 1}, "has no dimension 2"),
    ("slice", "bf16[M,8]", {"dim": 0, "start": 0, "stop": 1}, "must be a number"),
    ("view", "bf16[M,8]", {"shape": ("M", 9)}, "another number of elements"),
    ("view", "bf16[M,6]@S(1)", {"shape": ("M", 3, 2)}, "no equal blocks"),
    ("view", "bf16[M,8]", {"shape": "M"}, "shape must be a tuple"),
    ("route_topk", "bf16[M,8] bf16[8]", TOP, "logits must be f32, are bf16.*other experts"),
    ("route_topk", "f16[M,8] f32[8]", TOP, "logits must be f32"),
    ("route_topk", "f32[M,8]@S(1) f32[8]", TOP, "must be replicated"),
    ("route_topk", "f32[M,8] f32[4]", TOP, "bias .* does not fit"),
    ("route_topk", "f32[M,1] f32[1]", TOP, "2 of f32"),
    ("moe_experts", EXPERTS, ACT, "takes z, ids"),
    ("moe_experts", f"{EXPERTS} u8[4,6,4] u8[4,6,4] u8[4,8,3]", ACT, "go together"),
    ("moe_experts", f"{EXPERTS} bf16[4,6,9] bf16[4,6,9] bf16[4,9,6]", ACT, "does not fit"),
    ("moe_experts", f"{EXPERTS} bf16[4,6,8]@S(1) bf16[4,6,8] bf16[4,8,6]", ACT,
     "is not cut by intermediate size"),
    ("moe_experts", f"{EXPERTS} bf16[4,5,8]@S(1) bf16[4,5,8]@S(1) bf16[4,8,5]@S(2)", ACT,
     "dimension 1 .*5.* does not divide by 2"),
    ("mla_append", f"bf16[pages,32,20] bf16[M,16]@S(1) bf16[M,4] {PAGED}",
     {"rows_per_request": 1}, "must be replicated"),
    ("mla_append", f"bf16[pages,32,20] bf16[M,16] bf16[M,8] {PAGED}",
     {"rows_per_request": 1}, "do not fill a row"),
    ("mla_attend", f"bf16[M,48]@S(1) bf16[pages,32,20] bf16[64,16] {PAGED}", MLA,
     "not cut by heads"),
    ("mla_attend", f"bf16[M,36] bf16[pages,32,20] bf16[64,16] {PAGED}", MLA, "different heads"),
    ("mla_absorb_query", "bf16[M,48] bf16[4,8,16]@S(0)", {"nope_dim": 8, "rope_dim": 4},
     "not cut by heads"),
    ("mla_attend_latent", f"bf16[M,80]@S(1) bf16[pages,32,24] {PAGED}", LATENT, "rows are not"),
    ("mla_value", "bf16[M,48] bf16[4,8,16]", {}, "does not fit"),
    ("kda_step", kda(cut=True).replace("f32[4]@S(0)", "f32[4]"), KDA, "operand 8, .* is not cut"),
    ("kda_step", kda(cut=False).replace("i32[R]", "i32[R]@S(0)"), KDA, "must be replicated"),
    ("kda_step", kda(cut=False), {**KDA, "head_dim": 8}, r"is not H\*8"),
    ("attn_res_mix", "bf16[8] bf16[1,8] bf16[M,8] f32[M,8]", EPS, "sources differ in type"),
    ("attn_res_mix", "bf16[8] bf16[1,8] bf16[M,8]@S(1)", EPS, "must be replicated"),
    ("attn_res_blocks", "f32[8]", EPS, "at least one snapshot"),
    ("attn_res_merge", "f32[8] f32[M] f32[M] f32[M,4] bf16[M,8]", EPS, "does not fit"),
    ("l2_prefetch", "", {"bytes": 64}, "at least one static value"),
]  # fmt: skip


def infer(op: str, operands: str, attrs: dict[str, Attr]) -> str:
    types = [parse_type(text) for text in operands.split()]
    return " ".join(map(str, op_named(op).infer(types, attrs, Context(tp=2))))


@pytest.mark.parametrize(("op", "operands", "attrs", "results"), ACCEPTED)
def test_accepted(op: str, operands: str, attrs: dict[str, Attr], results: str) -> None:
    assert infer(op, operands, attrs) == results


@pytest.mark.parametrize(("op", "operands", "attrs", "message"), REJECTED)
def test_rejected(op: str, operands: str, attrs: dict[str, Attr], message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        infer(op, operands, attrs)


def test_router_keeps_the_ids_apart_that_bf16_would_merge() -> None:
    logits = torch.zeros(1, 16)
    logits[0, 5], logits[0, 9] = 1.0, 1 + 2.0**-9
    attrs: dict[str, Attr] = {"top_k": 1, "renormalize": True, "scale": 1.0}
    reference = op_named("route_topk").reference
    assert reference is not None
    ids, _ = reference([logits, torch.zeros(16)], attrs, Context())
    assert ids.item() == 9
    rounded, _ = reference([logits.bfloat16().float(), torch.zeros(16)], attrs, Context())
    assert rounded.item() == 5


# Ops of the verify step and its commit are covered by the whole-model tests.
WHOLE_MODEL_ONLY = {"kda_verify", "kda_commit"}


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_every_op_is_documented_and_in_the_table(name: str) -> None:
    op = op_named(name)
    assert op.doc
    assert (op.reference is None) == op.is_collective
    assert name in {row[0] for row in ACCEPTED} | WHOLE_MODEL_ONLY
