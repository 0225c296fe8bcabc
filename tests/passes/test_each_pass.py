"""Every pass alone on a small graph: golden text, honest changes, run twice, same meaning."""

from __future__ import annotations

import re
from typing import Protocol

import pytest

from k3fuse.errors import VerifyError
from k3fuse.ir import parse_graph, print_graph, verify
from k3fuse.passes.base import Pass
from k3fuse.passes.pipeline import PIPELINE, pass_named
from k3fuse.testing import apply_pass


class Golden(Protocol):
    def read(self, name: str) -> str: ...

    def check(self, name: str, text: str) -> None: ...


# Mailboxes have one slot a rank in their types, so these graphs exist for one TP only.
FIXED_TP = {"fuse-comm", "fuse-prologue", "insert-l2-prefetch"}


@pytest.mark.parametrize("item", PIPELINE, ids=lambda p: p.name)
def test_golden(item: Pass, golden: Golden) -> None:
    graph, result = apply_pass(item, golden.read(f"passes/{item.name}.before.ir"))
    assert result.changes > 0
    golden.check(f"passes/{item.name}.after.ir", print_graph(graph))


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("item", PIPELINE, ids=lambda p: p.name)
def test_other_tp(item: Pass, tp: int, golden: Golden) -> None:
    text = golden.read(f"passes/{item.name}.before.ir").replace("tp=2}", f"tp={tp}}}")
    if item.name in FIXED_TP:
        with pytest.raises(VerifyError):
            verify(parse_graph(text))
    else:
        apply_pass(item, text)


@pytest.mark.parametrize("item", PIPELINE, ids=lambda p: p.name)
def test_does_nothing_without_a_site(item: Pass) -> None:
    text = """graph g {after_all=true, dim.M=3, target="gb300", tp=2} {
      input %x: bf16[M,8]
      return %x
    }"""
    _, result = apply_pass(item, text)
    assert result.changes == 0
    assert result.refusals == []


@pytest.mark.parametrize("item", PIPELINE, ids=lambda p: p.name)
def test_documents_before_and_after(item: Pass) -> None:
    doc = type(item).__doc__ or ""
    for part in (r"Before", r"After", r"Order:"):
        assert re.search(part, doc), f"{item.name}: no {part} in its docstring"


def test_names_are_unique() -> None:
    names = [item.name for item in PIPELINE]
    assert len(set(names)) == len(names)


def test_both_protocols_have_the_same_meaning(golden: Golden) -> None:
    text = golden.read("passes/lower-collectives.before.ir")
    ops: dict[str, list[str]] = {}
    for protocol in ("one_shot", "two_shot"):
        forced = text.replace("dim.M=3", f'dim.M=3, protocol="{protocol}"')
        graph, _ = apply_pass(pass_named("lower-collectives"), forced)
        ops[protocol] = [n.op for n in graph.leaves() if "%y" in repr(n)]
    assert ops["one_shot"] == ["linear", "push_partial", "sum_slots"]
    assert ops["two_shot"] == ["linear", "push_chunks", "sum_slots", "push_gather"]


def test_two_partial_sums_share_one_reduction() -> None:
    text = """graph g {dim.M=3, target="gb300", tp=2} {
      input %x: bf16[M,8]
      weight %wg: bf16[8,8]
      weight %wu: bf16[8,8]
      weight %wa: bf16[8,8]
      weight %wb: bf16[8,8]
      %g: bf16[M,8] = linear(%x, %wg)
      %u: bf16[M,8] = linear(%x, %wu)
      %s: bf16[M,8] = silu_mul(%g, %u)
      %t: bf16[M,8] = silu_mul(%u, %g)
      %a: bf16[M,8] = linear(%s, %wa)
      %b: bf16[M,8] = linear(%t, %wb)
      %y: bf16[M,8] = add(%a, %b)
      return %y
    }"""
    graph, _ = apply_pass(pass_named("shard-stock"), text)
    assert [n.op for n in graph.leaves()].count("all_reduce") == 1
    assert str(graph.outputs[0].type) == "bf16[M,8]"


def test_prefetch_can_be_switched_off(golden: Golden) -> None:
    text = golden.read("passes/insert-l2-prefetch.before.ir")
    off = text.replace("dim.M=3", "dim.M=3, prefetch=false")
    _, result = apply_pass(pass_named("insert-l2-prefetch"), off)
    assert result.changes == 0
