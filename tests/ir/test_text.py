"""Text and graph are two forms of one thing, and bad text is named by its line."""

from __future__ import annotations

import pytest

from k3fuse.errors import ParseError
from k3fuse.ir import parse_graph, print_graph

TEXT = """graph g {flag=true, list=["a", [1, 2.5]], none=null, tp=2} {
  input %x: bf16[M,8] = "inputs.x"
  weight %w: bf16[8,8]@S(0) = "a.weight"
  dropped "a/view": "dce: nobody reads its results"
  %y: bf16[M,8]@S(1) = linear(%x, %w) from a/linear (one, two) + b/linear[1/2]
  fused @z {after=["pdl:y"], wait=0} {  // (%y) -> (%m)
    %m: bf16[M,8]@S(1) = silu(%y) from c/silu[made]
  }
  l2_prefetch(%w) {bytes=64}
  return %m, %m
}
"""


def test_round_trip_is_exact() -> None:
    assert print_graph(parse_graph(TEXT)) == TEXT


def test_structure() -> None:
    graph = parse_graph(TEXT)
    assert graph.attrs == {"flag": True, "list": ("a", (1, 2.5)), "none": None, "tp": 2}
    assert graph.tp == 2
    assert graph.dropped == {"a/view": "dce: nobody reads its results"}
    linear, group, hint = graph.nodes
    assert [o.site for o in linear.origins] == ["a/linear", "b/linear"]
    assert linear.origins[0].passes == ("one", "two")
    assert linear.origins[1].role == "1/2"
    assert group.is_fused
    assert group.body[0].parent is group
    assert group.inputs() == [linear.result]
    assert group.outputs(graph) == graph.outputs[:1]
    assert hint.results == []
    assert graph.value("w").users() == [linear, hint]


def test_comments_and_blank_lines_are_skipped() -> None:
    noisy = "// a dump\n\n" + TEXT.replace("{bytes=64}", "{bytes=64}  // L2")
    assert print_graph(parse_graph(noisy)) == TEXT


def test_an_empty_graph() -> None:
    assert print_graph(parse_graph("graph g {\n  return\n}\n")) == "graph g {\n  return\n}\n"


BAD: list[tuple[str, str, int, str]] = [
    ("graph g", "grph g", 1, "expected 'graph NAME {'"),
    ('%x: bf16[M,8] = "inputs.x"', "%x: bf17[M,8]", 2, "not a tensor type: 'bf17"),
    ("weight %w", "weight %x", 3, "%x is defined twice"),
    ("linear(%x, %w)", "linear(%x, %q)", 5, "%q is read before it is defined"),
    ("linear(%x, %w)", "linear(x, %w)", 5, "x is read before it is defined"),
    ("= linear(%x, %w)", "= linear %x", 5, "not a node"),
    ("%y: bf16[M,8]@S(1) =", "%y =", 5, "not a result"),
    ("b/linear[1/2]", "b linear", 5, "not an origin"),
    ("{bytes=64}", "{bytes}", 9, "attribute 'bytes' has no JSON value"),
    ("{bytes=64}", "{bytes=six}", 9, "attribute 'bytes' has no JSON value"),
    ("{bytes=64}", "{bytes={}}", 9, "attribute value {} is no number"),
    ("{bytes=64}", "bytes=64", 9, "not attributes"),
    ("return %m, %m", "return %n", 10, "%n is read before it is defined"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), BAD)
def test_parse_errors_name_the_line(old: str, new: str, line: int, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ParseError) as error:
        parse_graph(TEXT.replace(old, new), "dump.ir")
    assert str(error.value).startswith(f"dump.ir, line {line}: ")
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", TEXT.rstrip().removesuffix("}")])
def test_an_unfinished_graph(text: str) -> None:
    with pytest.raises(ParseError, match=r"no 'graph NAME \{' line|is not closed"):
        parse_graph(text)


def test_text_behind_the_graph_is_an_error() -> None:
    with pytest.raises(ParseError, match="line 12: text behind the graph"):
        parse_graph(TEXT + "graph h {\n}\n")
