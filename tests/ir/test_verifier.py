"""One broken graph for each clause of the verifier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from k3fuse.errors import VerifyError
from k3fuse.ir import FUSED, Graph, Node, Value, parse_graph, verify

APPEND = "mla_append(%cache, %x, %x, %table, %lengths, %slots) {rows_per_request=1}"
TEXT = """graph g {tp=2} {
  input %x: bf16[M,8]
  input %lengths: i32[R]
  input %slots: i32[R]
  input %table: i32[R,table]
  weight %w: bf16[8,8]@S(0)
  state %cache: bf16[pages,32,16] = "state.0"
  %y: bf16[M,8]@S(1) = linear(%x, %w)
  fused @z {
    %z: bf16[M,8]@S(1) = silu(%y)
  }
  %cache.1: bf16[pages,32,16] = APPEND
  return %z, %cache.1
}
""".replace("APPEND", APPEND)


def test_the_graph_is_good() -> None:
    verify(parse_graph(TEXT))


def undefined(g: Graph) -> None:
    g.nodes[:2] = [g.nodes[1], g.nodes[0]]


def undefined_output(g: Graph) -> None:
    g.outputs[0] = Value("gone", g.outputs[0].type)


def defined_twice(g: Graph) -> None:
    g.nodes[0].result.name = "x"


def use_not_listed(g: Graph) -> None:
    g.value("x").uses.clear()


def use_of_a_gone_node(g: Graph) -> None:
    g.value("x").uses.append((Node("silu", [g.value("x")], {}, []), 0))


def other_producer(g: Graph) -> None:
    g.value("z").producer = g.nodes[0]


def group_with_operands(g: Graph) -> None:
    g.nodes[1].operands.append(g.value("x"))


def empty_group(g: Graph) -> None:
    g.nodes.append(Node(FUSED, [], {}, [], name="empty"))


def leaf_at_top(g: Graph) -> None:
    g.nodes[0].parent = g.nodes[1]


def strange_leaf(g: Graph) -> None:
    g.nodes[1].body[0].parent = None


def two_launches_of_a_name(g: Graph) -> None:
    leaf = g.nodes[0]
    leaf.parent = g.nodes[0] = Node(FUSED, [], {}, [], name="z", body=[leaf])


def dead_version(g: Graph) -> None:
    g.outputs[1] = g.value("cache")


BROKEN: list[tuple[Callable[[Graph], None], str]] = [
    (undefined, "%y is read before it is defined"),
    (undefined_output, "returns %gone, which nothing defines"),
    (defined_twice, "%x is defined twice"),
    (use_not_listed, "%x does not list a use"),
    (use_of_a_gone_node, "%x lists a use that is not in the graph"),
    (other_producer, "%z names another producer"),
    (group_with_operands, "malformed top-level node"),
    (empty_group, "malformed top-level node"),
    (leaf_at_top, "malformed top-level node"),
    (strange_leaf, "a node does not know its group"),
    (two_launches_of_a_name, "two launches are called @z"),
    (dead_version, "returns dead version %cache"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN)
def test_structure(breaks: Callable[[Graph], None], message: str) -> None:
    graph = parse_graph(TEXT)
    breaks(graph)
    with pytest.raises(VerifyError, match=message):
        verify(graph)


WRONG: list[tuple[str, str, str]] = [
    ("%y: bf16[M,8]@S(1)", "%y: bf16[M,8]", "stated types differ from inferred \\(bf16\\[M,8\\]@S"),
    ("%y: bf16[M,8]@S(1)", "%y: f32[M,8]@S(1)", "stated types differ"),
    ("silu(%y)", "silu(%y) {beta=1.0}", "silu has no attribute beta"),
    (" {rows_per_request=1}", "", "mla_append needs attribute 'rows_per_request'"),
    ("silu(%y)", "silo(%y)", "unknown op 'silo' \\(similar: silu"),
    ("silu(%y)", "all_gather(%y) {dim=7}", "is not split along dim"),
    ("silu(%y)", 'cast(%y) {dtype="bf17"}', "'bf17' is not a valid DType"),
    ("silu(%y)", "slice(%y) {dim=-1, start=0, stop=8}", "has no dimension -1"),
    ("silu(%y)", "take_shard(%x) {dim=2}", "dimension 2|index"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_types_and_attributes(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message) as error:
        verify(parse_graph(TEXT.replace(old, new)))
    assert "%" in str(error.value).splitlines()[-1]  # the text of the bad node


def test_a_replaced_state_version_is_dead() -> None:
    late = f"  %cache.2: bf16[pages,32,16] = {APPEND}\n  return"
    with pytest.raises(
        VerifyError, match=r"reads version %cache of a state, but %cache.1 = .* has"
    ):
        verify(parse_graph(TEXT.replace("  return", late)))
