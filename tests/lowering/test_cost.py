from __future__ import annotations

import pytest

from k3fuse.ir import Graph, Node, all_ops, parse_graph, state_roots
from k3fuse.lowering.cost import STATE_ACCESS, CostModel
from k3fuse.schedule.edges import launches_of
from k3fuse.target import get_target
from tests.lowering.compiled import compiled

ATTRS = '{activation="silu", beta=0.0, linear_beta=0.0}'
TEXT = """graph g {dim.M=4, dim.R=4, rows_per_request=1, tp=2} {
  input %x: bf16[M,64]
  input %tokens: i64[M]
  input %ids: i32[M,2]
  input %p: f32[M,2]
  weight %w: bf16[64,64] = "w"
  weight %table: bf16[1000,64] = "table"
  weight %w1: u8[8,256,32]@S(1) = "w1"
  weight %w3: u8[8,256,32]@S(1) = "w3"
  weight %w2: u8[8,64,128]@S(2) = "w2"
  weight %s1: u8[8,256,2]@S(1) = "s1"
  weight %s3: u8[8,256,2]@S(1) = "s3"
  weight %s2: u8[8,64,8]@S(2) = "s2"
  fused @twice {
    %a: bf16[M,64] = linear(%x, %w)
    %b: bf16[M,64] = linear(%a, %w)
  }
  fused @again {
    %c: bf16[M,64] = linear(%b, %w)
  }
  fused @rows {
    %e: bf16[M,64] = embedding(%tokens, %table)
  }
  fused @experts {
    %u: bf16[M,64]@P = moe_experts(%c, %ids, %p, %w1, %w3, %w2, %s1, %s3, %s2) {ATTRS}
    %slots: bf16[2,M,64] = push_partial(%u)
  }
  fused @hint {
    l2_prefetch(%w) {bytes=8192}
  }
  fused @sum {
    %s: bf16[M,64] = sum_slots(%slots)
    %y: bf16[M,64] = add(%s, %e)
  }
  return %y
}
"""


@pytest.fixture
def graph() -> Graph:
    return parse_graph(TEXT.replace("{ATTRS}", ATTRS))


@pytest.fixture
def launches(graph: Graph) -> dict[str, Node]:
    return {launch.name: launch for launch in launches_of(graph)}


def test_every_op_that_updates_a_state_says_what_it_moves() -> None:
    for op in all_ops().values():
        assert set(op.updates) <= set(STATE_ACCESS.get(op.name, {})), op.name


def test_bytes(graph: Graph, launches: dict[str, Node]) -> None:
    cost = CostModel(graph, state_roots(graph))
    # once a launch, and again in the next one
    assert cost.traffic(launches["twice"]).weights == 64 * 64 * 2
    assert cost.traffic(launches["again"]).weights == 64 * 64 * 2
    assert cost.traffic(launches["rows"]).weights == 4 * 64 * 2
    # 8 * (1 - (1 - 2/8)^4) = 5.46875 experts of 128 rows a rank: 3 * 4096 nibbles pairs + scales
    one = 3 * 128 * 32 + 3 * 128 * 2
    assert cost.traffic(launches["experts"]).weights == round(5.46875 * one)
    assert cost.traffic(launches["hint"]).weights == 0
    # x in, b out; a stays inside
    assert cost.traffic(launches["twice"]).activations == 2 * 4 * 64 * 2
    # a mailbox of two ranks, e, y
    assert cost.traffic(launches["sum"]).activations == (2 + 1 + 1) * 4 * 64 * 2
    leaf = launches["experts"].body[0]
    assert cost.expert_padding(leaf) == round(5.46875 * one)  # 128 rows padded to 256
    assert cost.expert_padding(launches["rows"].body[0]) == 0


def test_times(graph: Graph, launches: dict[str, Node]) -> None:
    cost, gpu = CostModel(graph, state_roots(graph)), get_target("h200")

    def time(name: str) -> float:
        return cost.predicted_us(launches[name], cost.traffic(launches[name]), gpu)

    size, row = 64 * 64 * 2, 4 * 64 * 2
    assert time("again") == pytest.approx(
        gpu.launch_edge_us
        + gpu.cold_start_us
        + 1e6 * size / gpu.read_bandwidth
        + 1e6 * 2 * row / gpu.l2_bandwidth
    )
    # no weights: no cold start; a mailbox: one hop
    assert time("sum") == pytest.approx(
        gpu.launch_edge_us + gpu.hop_us + 1e6 * 4 * row / gpu.l2_bandwidth
    )
    assert time("hint") == pytest.approx(gpu.launch_edge_us + 1e6 * size / gpu.read_bandwidth)


def test_prefetch_costs_nothing_on_the_main_stream() -> None:
    plan = compiled("kimi-k3-tiny", 2, 2).plan
    hints = [x for x in plan.launches if x.stream == "prefetch"]
    assert hints
    assert all(x.weight_bytes == x.state_bytes == x.activation_bytes == 0 for x in hints)
    main = sum(x.predicted_us for x in plan.launches if x.stream == "main")
    assert plan.predicted_us == pytest.approx(main)
