"""Every reason a pass gives for leaving a site alone, on the smallest graph that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3fuse.errors import InputError
from k3fuse.ir import parse_graph
from k3fuse.passes.base import Edit
from k3fuse.passes.pipeline import pass_named
from k3fuse.testing import assert_refuses

GOLDEN = Path(__file__).parents[1] / "golden"

HEAD = '{dim.M=3, target="gb300", tp=2}'


def before(name: str, *changes: tuple[str, str]) -> str:
    """The golden graph of a pass with some lines changed."""
    text = (GOLDEN / "passes" / f"{name}.before.ir").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def graph(body: str) -> str:
    return f"graph g {HEAD} {{\n{body}\n}}\n"


DECAY = "%f: bf16[M,16]@S(1) = linear(%fa, %wfb) from attn.f_b/linear"
NORM = (
    "%y: bf16[M,16]@S(1) = gated_rms_norm(%attn.o, %g, %norm) {eps=1e-05} "
    "from attn.o_norm/gated_rms_norm"
)
QUERY = "%ql: bf16[M,80]@S(1) = mla_absorb_query(%q, %uk) {nope_dim=8, rope_dim=4} "
APPEND = (
    "%cache.1: bf16[pages,32,20] = mla_append(%cache, %c, %pe, %table, %lengths, %slots) "
    "{rows_per_request=1} from attn/mla_append"
)
ROUTE = (
    "%ids: i32[M,2], %p: f32[M,2] = route_topk(%lg, %bias) "
    "{renormalize=true, scale=1.0, top_k=2} from moe/route_topk"
)
ROUTE2 = ROUTE.replace("%ids", "%ids2").replace("%p", "%p2")
ROUTER = "linear(%x, %router)"

TAIL_ODD = graph("""
  input %x: bf16[M,4]
  weight %up: bf16[9,4]
  weight %wg: bf16[8,4]
  weight %wd: bf16[9,8]
  %routed: bf16[M,9] = linear(%x, %up)
  %g: bf16[M,8] = linear(%x, %wg)
  %s: bf16[M,8] = silu(%g)
  %shared: bf16[M,9] = linear(%s, %wd)
  %moe: bf16[M,9] = add(%routed, %shared)
  return %moe""")

TWO_READERS = """graph g {dim.M=1, target="gb300", tp=2} {
  input %x: bf16[M,8]
  weight %norm: bf16[8]
  weight %q: bf16[8,8]
  weight %k: bf16[8,8]
  %n: bf16[M,8] = rms_norm(%x, %norm) {eps=1e-05}
  %a: bf16[M,8] = linear(%n, %q)
  %b: bf16[M,8] = linear(%n, %k)
  return %a, %b
}
"""

LARGE = graph("""
  input %x: bf16[M,2048]
  weight %norm: bf16[2048]
  weight %q: bf16[2304,2048]
  %n: bf16[M,2048] = rms_norm(%x, %norm) {eps=1e-05}
  %a: bf16[M,2304] = linear(%n, %q)
  return %a""")

ODD_ALL_REDUCE = """graph g {dim.M=3, protocol="two_shot", target="gb300", tp=2} {
  input %x: bf16[M,8]@S(1)
  weight %w: bf16[7,8]@S(1)
  %y.local: bf16[M,7]@P = linear(%x, %w)
  %y: bf16[M,7] = all_reduce(%y.local)
  return %y
}
"""

LATE_OPERAND = graph("""
  input %x: bf16[M,8]@S(1)
  input %e: bf16[M,8]
  weight %w: bf16[8,8]@S(1)
  weight %up: bf16[8,8]
  %y.local: bf16[M,8]@P = linear(%x, %w)
  %y.slots: bf16[2,M,8] = push_partial(%y.local)
  %y: bf16[M,8] = sum_slots(%y.slots)
  %z: bf16[M,8] = linear(%e, %up)
  %h: bf16[M,8] = add(%y, %z)
  return %h""")

LAST_PUSH = graph("""
  input %x: bf16[M,8]@S(1)
  weight %w: bf16[8,8]@S(1)
  fused @y {
    %y.local: bf16[M,8]@P = linear(%x, %w)
    %y.slots: bf16[2,M,8] = push_partial(%y.local)
  }
  fused @sum {
    %y: bf16[M,8] = sum_slots(%y.slots)
  }
  return %y""")

DENSE = graph("""
  input %x: bf16[M,8]
  weight %wg: bf16[8,8]
  weight %wu: bf16[8,8]
  weight %wd: bf16[8,8]
  fused @front {
    %g: bf16[M,8] = linear(%x, %wg)
    %u: bf16[M,8] = linear(%x, %wu)
  }
  %s: bf16[M,8] = silu_mul(%g, %u)
  %d: bf16[M,8] = linear(%s, %wd)
  return %d""")

CASES: list[tuple[str, str, str]] = [
    ("canonicalize", before("canonicalize", ("return ", "return %t, ")),
     "silu of the gate is also read elsewhere"),
    ("absorb-mla", before("absorb-mla", ("weight %kv_b", "input %kv_b")),
     "the expansion is no static weight"),
    ("shard-stock", TAIL_ODD, "width 9 does not divide by 2 ranks"),
    ("split-replicated", before(
        "split-replicated",
        ("  return %lg", f"  %lg2: f32[M,16] = {ROUTER} {{out=\"f32\"}}\n  return %lg2, %lg")),
     "the weight is shared or derived"),
    ("split-replicated", before(
        "split-replicated", ("%router: bf16[16,8]", "%router: bf16[15,8]"),
        ("%lg: f32[M,16]", "%lg: f32[M,15]")), "its 15 rows do not divide by 2 ranks"),
    ("split-replicated", before(
        "split-replicated", ("bf16[16,8]@S(0)", "bf16[256,8]@S(0)"),
        ("bf16[8,16]@S(1)", "bf16[8,256]@S(1)"), ("%q: bf16[M,16]", "%q: bf16[M,256]")),
     "saves 6% of the bytes of its launch, an exchange needs 25%"),
    ("split-argmax", before("split-argmax", ("argmax(%l)", "argmax(%h)")),
     "the logits are not gathered from shards"),
    ("split-argmax", before(
        "split-argmax", ("  return", "  %l2: f32[M,16] = add(%l, %l)\n  return %l2,")),
     "the gathered logits are read elsewhere"),
    ("split-attn-res", before("split-attn-res", ("weight %norm", "input %norm")),
     "the query is not static"),
    ("split-attn-res", before("split-attn-res", ("%s0, %s1, %sum)", "%sum)")),
     "there is no snapshot to read early"),
    ("merge-projections", before("merge-projections", ("weight %attn.wr", "input %attn.wr")),
     "its weight is no static value"),
    ("merge-projections", before(
        "merge-projections",
        ("linear(%x, %attn.wq)", "linear(%x2, %attn.wq)"),
        ("  weight %attn.wq", "  input %x2: bf16[M,8]\n  weight %attn.wq")),
     "nothing else reads its input"),
    ("fuse-kda-core", before("fuse-kda-core", (DECAY, "%f: bf16[M,16]@S(1) = add(%q, %k)")),
     "the decay logits come from no linear"),
    ("fuse-kda-core", before(
        "fuse-kda-core",
        ("  return", "  %f2: bf16[M,16]@S(1) = add(%f, %f)\n  return %f2,")),
     "the decay logits are also read elsewhere"),
    ("fuse-kda-core", before("fuse-kda-core", (DECAY, f"fused @other {{\n{DECAY}\n}}")),
     "the decay projection already belongs to another launch"),
    ("fuse-kda-core", before("fuse-kda-core", ("return", "return %attn.o,")),
     "the recurrence's output has other readers than a gated norm"),
    ("fuse-kda-core", before(
        "fuse-kda-core", (NORM, "%y: f32[M,16]@S(1) = mul(%attn.o, %attn.o)")),
     "a mul follows, not a gated norm"),
    ("fuse-mla-query", before(
        "fuse-mla-query", (QUERY, "%ql: bf16[M,80]@S(1) = linear(%a, %wql) "),
        ("  state", "  weight %wql: bf16[80,8]@S(0)\n  state")),
     "the query is not absorbed"),
    ("fuse-mla-query", before(
        "fuse-mla-query", (APPEND, ""), ("(%ql, %cache.1,", "(%ql, %cache,"),
        ("latent, %cache.1", "latent")),
     "the cache is not appended to in this step"),
    ("fuse-mla-value", before(
        "fuse-mla-value", ("sigmoid_mul(%attn.mla_attend.value, %g)",
                           "add(%attn.mla_attend.value, %g)")),
     "no output gate follows"),
    ("fuse-experts", before(
        "fuse-experts", (ROUTE, "%p: f32[M,2] = slice(%lg) {dim=1, start=0, stop=2}"),
        ("  input %lg", "  input %ids: i32[M,2] = \"tokens\"\n  input %lg")),
     "its ids come from no route_topk"),
    ("fuse-experts", before(
        "fuse-experts", (ROUTE, f"{ROUTE}\n  {ROUTE2}"),
        ("moe_experts(%z, %ids, %p,", "moe_experts(%z, %ids, %p2,")),
     "ids and weights come from different routes"),
    ("fuse-experts", before(
        "fuse-experts", ("  return", "  %p3: f32[M,2] = add(%p, %p)\n  return %p3,")),
     "the route is also read elsewhere"),
    ("fuse-shared-expert", before(
        "fuse-shared-expert", ("situ_mul(%sg, %su)", "situ_mul(%sg, %other)"),
        ("  fused @front", "  %other: bf16[M,8]@S(1) = linear(%x, %wu)\n  fused @front")),
     "gate and up come from different launches"),
    ("fuse-shared-expert", before(
        "fuse-shared-expert", ("= linear(%s, %wd)", "= linear(%s2, %wd)"),
        ("  %sd:", "  %s2: bf16[M,8]@S(1) = sigmoid(%s)\n  %sd:")),
     "its reader is no free linear"),
    ("fuse-shared-expert", DENSE, "no routed experts read the same launch (a dense MLP)"),
    ("lower-collectives", ODD_ALL_REDUCE, "two-shot needs 7 columns to divide by 2 ranks"),
    ("fuse-comm", LATE_OPERAND, "its other operand waits on peers, its producer does not"),
    ("fuse-prologue", TWO_READERS, "2 launches read it"),
    ("fuse-prologue", LARGE, "3 rows of 1 slots would be prepared by every CTA of a large"),
    ("insert-l2-prefetch", LAST_PUSH, "no static weights follow before the next exchange"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reason"), CASES, ids=lambda value: str(value)[:40])
def test_refuses(name: str, text: str, reason: str) -> None:
    assert_refuses(pass_named(name), text, reason)


def test_the_value_to_blame_is_named() -> None:
    text = before("absorb-mla", ("weight %kv_b", "input %kv_b"))
    refusal = assert_refuses(pass_named("absorb-mla"), text, "static")
    assert refusal.value == "%kv_b"
    assert refusal.site == "attn/mla_attend"


def test_no_launch_reads_a_mailbox_it_fills() -> None:
    g = parse_graph(LATE_OPERAND)
    edit = Edit(g, "trial")
    push, total = (next(n for n in g.nodes if n.op == op) for op in ("push_partial", "sum_slots"))
    assert edit.try_fuse([push, total]) is None
    assert edit.refusals[0].reason == "it would read a mailbox that peers fill only later"
    assert edit.refusals[0].value == "%y.slots"


def test_no_launch_lies_around_another() -> None:
    g = parse_graph(
        graph("""
      input %x: bf16[M,8]
      %a: bf16[M,8] = silu(%x)
      %b: bf16[M,8] = sigmoid(%a)
      %c: bf16[M,8] = add(%a, %b)
      return %c""")
    )
    edit = Edit(g, "trial")
    a, _, c = g.nodes
    assert edit.try_fuse([a, c]) is None
    assert edit.refusals[0].reason == "another launch lies between the two"
    assert edit.refusals[0].value == "%a"


def test_a_tp_that_does_not_fit_names_the_dimension() -> None:
    text = before("shard-stock", ("tp=2}", "tp=3}"))
    with pytest.raises(
        InputError, match=r"--tp 3 .*dimension 0 of %table: .* does not divide by 3"
    ):
        pass_named("shard-stock").run(parse_graph(text))


def test_an_unknown_protocol_lists_the_known() -> None:
    text = ODD_ALL_REDUCE.replace("two_shot", "ring")
    with pytest.raises(InputError, match="protocol 'ring' is none of auto, one_shot, two_shot"):
        pass_named("lower-collectives").run(parse_graph(text))


def test_an_unknown_pass_lists_the_known() -> None:
    with pytest.raises(
        InputError, match=r"unknown pass 'fuse'; passes in order: canonicalize, dce"
    ):
        pass_named("fuse")
