"""The helpers for pass authors find the faults that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from k3fuse.ir import Graph, parse_graph
from k3fuse.passes.base import Edit, Pass, PassResult
from k3fuse.passes.pipeline import pass_named
from k3fuse.testing import apply_pass, assert_golden, assert_refuses, launch_lines

TEXT = """graph g {dim.M=1, target="gb300", tp=1} {
  input %x: bf16[M,8]
  weight %w: bf16[8]
  %y: bf16[M,8] = rms_norm(%x, %w) {eps=0.5}
  return %y
}
"""


class Raises(Pass):
    """Adds to eps at every run."""

    name: ClassVar[str] = "raises"

    def rewrite(self, edit: Edit) -> None:
        for node in edit.graph.leaves():
            edit.set_attr(node, "eps", float(str(node.attrs["eps"])) + 1)


class Wrong(Pass):
    """Sets eps to another value."""

    name: ClassVar[str] = "wrong"

    def rewrite(self, edit: Edit) -> None:
        for node in edit.graph.leaves():
            edit.set_attr(node, "eps", 0.25)


class Lies(Wrong):
    """Changes the graph and reports nothing."""

    name: ClassVar[str] = "lies"

    def run(self, graph: Graph) -> PassResult:
        super().run(graph)
        return PassResult(self.name, 0)


class Breaks(Pass):
    """Writes an attribute that the op does not have."""

    name: ClassVar[str] = "breaks"

    def rewrite(self, edit: Edit) -> None:
        for node in edit.graph.leaves():
            edit.set_attr(node, "epsilon", 1.0)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Raises(), "raises changes its own result"),
        (Wrong(), "outputs differ by"),
        (Lies(), "lies reports 0 changes"),
        (Breaks(), "has no attribute epsilon"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_bad_pass_is_found(item: Pass, message: str) -> None:
    with pytest.raises(Exception, match=message):
        apply_pass(item, TEXT)


def test_meaning_can_be_left_out() -> None:
    _, result = apply_pass(Wrong(), TEXT, meaning=False)
    assert result.changes == 1


def test_a_missing_refusal_lists_those_that_are_there() -> None:
    text = """graph g {dim.M=1, target="gb300", tp=1} {
      input %x: bf16[M,8]
      %t: i64[M] = argmax(%x)
      return %t
    }"""
    with pytest.raises(AssertionError, match=r"no refusal 'other' among \['the logits are not"):
        assert_refuses(pass_named("split-argmax"), text, "other")


def test_golden_files(tmp_path: Path) -> None:
    path = tmp_path / "a.ir"
    with pytest.raises(AssertionError, match="is missing: run with --accept"):
        assert_golden(path, "one\n", accept=False)
    assert_golden(path, "one\n", accept=True)
    assert_golden(path, "one\n", accept=False)
    with pytest.raises(AssertionError, match=r"a\.ir differs"):
        assert_golden(path, "two\n", accept=False)


def test_launch_lines() -> None:
    graph = parse_graph(TEXT)
    pass_named("form-launches").run(graph)
    assert launch_lines(graph) == ["main @y: rms_norm"]
