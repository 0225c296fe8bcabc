"""The graph: values in SSA form, nodes in one straight block, launches as groups of nodes.

A *fused* node is a group: it owns the nodes it fused, in order, and their values stay what they
were. So its meaning is its body, its operands and results are derived, and fusing or splitting
again loses nothing. Data only; mutation goes through `ir.rewriter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from k3fuse.tensor_type import TensorType

Attr = int | float | str | bool | None | tuple["Attr", ...]
ValueKind = Literal["input", "weight", "state", "result"]
FUSED = "fused"


@dataclass(frozen=True)
class Origin:
    """Where a node comes from: the traced op, and the passes that have touched it since.

    `role` is "op" for the traced op itself, "i/n" for the i-th of the n parts a pass split it
    into, and "made" for a helper that a pass inserted because of it (a collective, a view).
    """

    site: str
    passes: tuple[str, ...] = ()
    role: str = "op"

    def then(self, pass_name: str, role: str | None = None) -> Origin:
        passes = self.passes if self.passes[-1:] == (pass_name,) else (*self.passes, pass_name)
        return replace(self, passes=passes, role=self.role if role is None else role)


@dataclass(eq=False)
class Value:
    """One SSA value. `binding` names the parameter or the state storage of a graph input."""

    name: str
    type: TensorType
    kind: ValueKind = "result"
    binding: str = ""
    producer: Node | None = None
    uses: list[tuple[Node, int]] = field(default_factory=list["tuple[Node, int]"])

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"

    def users(self) -> list[Node]:
        """The nodes that read this value, each once, in order of use."""
        return list(dict.fromkeys(node for node, _ in self.uses))


@dataclass(eq=False)
class Node:
    """One op application, or (op == "fused") a group of them."""

    op: str
    operands: list[Value]
    attrs: dict[str, Attr]
    results: list[Value]
    origins: tuple[Origin, ...] = ()
    body: list[Node] = field(default_factory=list["Node"])
    parent: Node | None = None
    name: str = ""  # of a group
    position: int = 0  # of a top-level node, as of the last sort

    def __repr__(self) -> str:
        head = (
            f"@{self.name}" if self.op == FUSED else ", ".join(f"%{r.name}" for r in self.results)
        )
        return f"{head} = {self.op}(...)"

    @property
    def is_fused(self) -> bool:
        return self.op == FUSED

    @property
    def leaves(self) -> list[Node]:
        """The plain nodes of a group; of a plain node, itself."""
        return self.body if self.is_fused else [self]

    @property
    def top(self) -> Node:
        """The top-level node this one lies in."""
        return self if self.parent is None else self.parent

    @property
    def result(self) -> Value:
        (only,) = self.results
        return only

    def inputs(self) -> list[Value]:
        """Values read from outside, each once (for a plain node: its distinct operands)."""
        inner = {id(r) for leaf in self.leaves for r in leaf.results}
        outer = (v for leaf in self.leaves for v in leaf.operands if id(v) not in inner)
        return list(dict.fromkeys(outer))

    def outputs(self, graph: Graph) -> list[Value]:
        """Values that others read, or that the graph returns."""
        returned = {id(v) for v in graph.outputs}
        mine = {id(leaf) for leaf in self.leaves}
        return [
            r
            for leaf in self.leaves
            for r in leaf.results
            if id(r) in returned or any(id(n) not in mine for n, _ in r.uses)
        ]

    def all_origins(self) -> tuple[Origin, ...]:
        """Origins of the node, or of all that a group fused."""
        return tuple(dict.fromkeys(o for leaf in self.leaves for o in leaf.origins))


@dataclass(eq=False)
class Graph:
    """A decode step (or another straight-line program) with its context as attributes.

    attrs: model, tp (ranks), rows (M), rows_per_request (q), target, batch ... whatever later
    stages need to know and text must keep. `dropped` maps a traced site that no node carries any
    more to the pass and reason that removed it: the other half of the coverage ledger.
    """

    name: str
    attrs: dict[str, Attr] = field(default_factory=dict[str, Attr])
    inputs: list[Value] = field(default_factory=list[Value])
    nodes: list[Node] = field(default_factory=list[Node])
    outputs: list[Value] = field(default_factory=list[Value])
    dropped: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def tp(self) -> int:
        value = self.attrs.get("tp", 1)
        assert isinstance(value, int)
        return value

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the symbolic dimensions, from the attributes that bind them (`dim.M=8`)."""
        return {
            key.removeprefix("dim."): value
            for key, value in self.attrs.items()
            if key.startswith("dim.") and isinstance(value, int)
        }

    def leaves(self) -> Iterator[Node]:
        """Every plain node, in execution order."""
        for node in self.nodes:
            yield from node.leaves

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        for node in self.leaves():
            yield from node.results

    def value(self, name: str) -> Value:
        return next(v for v in self.values() if v.name == name)

    def static_values(self) -> set[int]:
        """ids of the values that depend on weights only: they are computed once, at load."""
        static = {id(v) for v in self.inputs if v.kind == "weight"}
        for node in self.leaves():
            if node.operands and all(id(v) in static for v in node.operands):
                static.update(id(r) for r in node.results)
        return static
