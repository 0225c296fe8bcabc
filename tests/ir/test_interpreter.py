"""Ranks in lockstep: order of sums, signs of zero, and bits that must agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3fuse.errors import VerifyError
from k3fuse.ir import assemble, parse_graph, run, shard_tensor
from k3fuse.ir.ops.collective import rank_order_sum
from k3fuse.tensor_type import parse_type

EXCHANGES = {
    "all_reduce": "%y: f32[M,4] = all_reduce(%p)",
    "one-shot": """%s: f32[4,M,4] = push_partial(%p)
      %y: f32[M,4] = sum_slots(%s)""",
    "two-shot": """%s: f32[4,M,4]@S(2) = push_chunks(%p) {dim=1}
      %r: f32[M,4]@S(1) = sum_slots(%s)
      %y: f32[M,4] = push_gather(%r) {dim=1}""",
    "reduce-scatter": """%r: f32[M,4]@S(1) = reduce_scatter(%p) {dim=1}
      %y: f32[M,4] = all_gather(%r) {dim=1}""",
}


def exchange(name: str, x: Tensor, w: Tensor) -> Tensor:
    """x [M, 4] and w [4, 4], cut along K over four ranks: rank r's term is x[:, r] w[:, r]."""
    graph = parse_graph(f"""graph g {{tp=4}} {{
      input %x: f32[M,4]@S(1)
      input %w: f32[4,4]@S(1)
      %p: f32[M,4]@P = linear(%x, %w)
      {EXCHANGES[name]}
      return %y
    }}""")
    (y,) = run(graph, {"x": x, "w": w})
    return y


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_run_in_rank_order(name: str, rows: int) -> None:
    x = torch.tensor([[1e8, 1.0, -1e8, 1.0]]).repeat(rows, 1)
    y = exchange(name, x, torch.ones(4, 4))
    assert torch.equal(y, torch.ones(rows, 4))  # ((1e8 + 1) - 1e8) + 1, not the exact sum 2


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_protocol_gives_the_same_bits(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator) * 1e3
    w = torch.randn(4, 4, generator=generator)
    assert torch.equal(exchange(name, x, w), exchange("all_reduce", x, w))


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_sum_of_negative_zeros_is_zero(name: str) -> None:
    y = exchange(name, torch.full((1, 4), -0.0), torch.ones(4, 4))
    assert torch.equal(y, torch.zeros(1, 4))
    assert not torch.signbit(y).any()


@pytest.mark.parametrize("name", EXCHANGES)
def test_nan_stays_nan(name: str) -> None:
    x = torch.tensor([[1.0, torch.nan, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    y = exchange(name, x, torch.ones(4, 4))
    assert torch.isnan(y[0]).all()
    assert torch.equal(y[1], torch.full((4,), 4.0))


def test_a_sum_rounds_once() -> None:
    terms = [torch.tensor([1.0]), torch.tensor([2.0**-8]), torch.tensor([2.0**-9])]
    once = rank_order_sum(terms, torch.bfloat16)
    assert once.dtype == torch.bfloat16
    assert once.item() == 1.0 + 2.0**-7  # 1 if every partial sum were rounded
    narrow = [term.bfloat16() for term in terms]
    assert torch.equal(rank_order_sum(narrow, torch.bfloat16), once)


def test_a_reduction_rounds_to_the_stated_dtype() -> None:
    graph = parse_graph("""graph g {tp=2} {
      input %x: bf16[M,4]@S(1)
      input %w: bf16[4,4]@S(1)
      %p: f32[M,4]@P = linear(%x, %w) {out="f32"}
      %y: bf16[M,4] = all_reduce(%p) {out="bf16"}
      return %y
    }""")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator).bfloat16()
    w = torch.randn(4, 4, generator=generator).bfloat16()
    (y,) = run(graph, {"x": x, "w": w})
    assert torch.equal(y, (x.double() @ w.double().T).bfloat16())
    (exact,) = run(graph, {"x": x.double(), "w": w.double()})
    torch.testing.assert_close(exact, x.double() @ w.double().T, rtol=1e-15, atol=1e-15)


def test_a_replicated_value_that_differs_is_reported() -> None:
    same = [torch.zeros(2), torch.zeros(2)]
    type_ = parse_type("f32[2]")
    assert torch.equal(assemble(same, type_), same[0])
    with pytest.raises(VerifyError, match="%x: rank 1 holds other bits than rank 0"):
        assemble([torch.zeros(2), torch.tensor([0.0, -0.0])], type_, "x")
    nan = torch.full((2,), torch.nan)
    assert torch.isnan(assemble([nan, nan.clone()], type_)).all()


def test_partial_sums_have_no_global_value() -> None:
    type_ = parse_type("f32[2]@P")
    with pytest.raises(VerifyError, match="partial"):
        shard_tensor(torch.zeros(2), type_, 2)
    with pytest.raises(VerifyError, match="%x is a partial sum: reduce it first"):
        assemble([torch.zeros(2)] * 2, type_, "x")


def test_shapes_are_checked() -> None:
    graph = parse_graph("""graph g {
      input %x: f32[M,4]
      input %y: f32[M,4]
      %z: f32[M,4] = add(%x, %y)
      return %z
    }""")
    with pytest.raises(VerifyError, match="dimension M is both 2 and 3"):
        run(graph, {"x": torch.ones(2, 4), "y": torch.ones(3, 4)})
    with pytest.raises(VerifyError, match=r"a tensor of shape \(2, 5\) was given for f32\[M,4\]"):
        run(graph, {"x": torch.ones(2, 5), "y": torch.ones(2, 4)})


def test_shards_go_out_and_come_back() -> None:
    x = torch.arange(24.0).reshape(2, 12)
    for text in ("f32[2,12]@S(0)", "f32[2,12]@S(1)", "f32[2,12]"):
        type_ = parse_type(text)
        assert torch.equal(assemble(shard_tensor(x, type_, 2), type_), x)


def test_a_view_of_shards_is_the_shards_of_the_view() -> None:
    graph = parse_graph("""graph g {tp=2} {
      input %x: f32[M,12]@S(1)
      %v: f32[M,4,3]@S(1) = view(%x) {shape=["M", 4, 3]}
      %w: f32[M,12]@S(1) = view(%v) {shape=["M", 12]}
      return %v, %w
    }""")
    x = torch.arange(36.0).reshape(3, 12)
    v, w = run(graph, {"x": x})
    assert torch.equal(v, x.view(3, 4, 3))
    assert torch.equal(w, x)


def test_argmax_over_shards_breaks_ties_as_argmax_does() -> None:
    graph = parse_graph("""graph g {tp=2} {
      input %l: f32[M,4]@S(1)
      %v: f32[M,2]@S(1), %i: i64[M,2]@S(1) = argmax_local(%l)
      %vs: f32[M,2] = all_gather(%v) {dim=1}
      %is: i64[M,2] = all_gather(%i) {dim=1}
      %t: i64[M] = argmax_pick(%vs, %is)
      return %t
    }""")
    nan = torch.nan
    logits = torch.tensor(
        [[0, 1, 1, 0], [0, 0, 0, 5], [nan, nan, 1, nan], [nan] * 4, [2, nan, 2, 3]]
    )
    (t,) = run(graph, {"l": logits})
    assert torch.equal(t, torch.tensor([1, 3, 2, 0, 3]))


def test_an_exact_run_ignores_casts() -> None:
    graph = parse_graph("""graph g {
      input %x: f32[M,2]
      %y: bf16[M,2] = cast(%x) {dtype="bf16"}
      return %y
    }""")
    x = torch.tensor([[1 + 2.0**-40, 3.0]], dtype=torch.float64)
    assert torch.equal(run(graph, {"x": x})[0], x)
    assert run(graph, {"x": x.float()})[0].dtype == torch.bfloat16


def test_observers_see_every_leaf() -> None:
    graph = parse_graph("""graph g {
      input %x: f32[M,2]
      fused @a {
        %y: f32[M,2] = silu(%x)
        %z: f32[M,2] = silu(%y)
      }
      return %z
    }""")
    seen: list[str] = []
    run(graph, {"x": torch.ones(1, 2)}, observe=lambda node, env: seen.append(node.results[0].name))
    assert seen == ["y", "z"]
