"""What a pass is, and what it reports: its changes, and every site it refused with the reason."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from k3fuse.ir import Graph, Node, Rewriter, Value, sort_nodes
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.target import Target, get_target


@dataclass(frozen=True)
class Refusal:
    """A site where a pass looked and did not act: the nearest miss, with the value to blame."""

    pass_name: str
    site: str
    reason: str
    value: str = ""


@dataclass
class PassResult:
    """What one run of a pass did. `changes` is 0 exactly when the text of the graph is the same."""

    name: str
    changes: int
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    seconds: float = 0.0


class Pass(ABC):
    """A rewriting of the graph that keeps its meaning.

    Everything a pass may depend on is in the graph and its attributes (tp, target, dim.M ...), so
    that a pass can run on a graph read from text. A pass never prints, dumps or verifies: those are
    instruments.
    """

    name: ClassVar[str]
    required: ClassVar[bool] = False
    """Whether a plan cannot be made without this pass (so that bisection keeps it)."""

    @abstractmethod
    def rewrite(self, edit: Edit) -> None:
        """Change the graph through `edit`."""

    def run(self, graph: Graph) -> PassResult:
        """Run on a graph in place and leave its nodes in topological order."""
        edit = Edit(graph, self.name)
        self.rewrite(edit)
        if edit.changes:
            sort_nodes(graph)
        return PassResult(self.name, edit.changes, edit.refusals)


class Edit(Rewriter):
    """A rewriter that also keeps the refusals of its pass, and knows the target."""

    def __init__(self, graph: Graph, pass_name: str) -> None:
        super().__init__(graph, pass_name)
        self.refusals: list[Refusal] = []

    @property
    def target(self) -> Target:
        name = self.graph.attrs["target"]
        assert isinstance(name, str)
        return get_target(name)

    @property
    def rows(self) -> int:
        """M of this bucket."""
        return self.graph.dims["M"]

    def refuse(self, node: Node, reason: str, value: Value | None = None) -> None:
        origins = node.all_origins()
        site = origins[0].site if origins else repr(node)
        self.refusals.append(
            Refusal(self.pass_name, site, reason, f"%{value.name}" if value is not None else "")
        )

    def try_fuse(self, members: Sequence[Node], name: str = "") -> Node | None:
        """Fuse, unless a path leaves the members and returns: then refuse, naming the value."""
        tops = list(dict.fromkeys(m.top for m in members))
        if len(tops) == 1 and tops[0].is_fused:
            return tops[0]
        if (value := _own_mailbox(tops)) is not None:
            self.refuse(members[-1], "it would read a mailbox that peers fill only later", value)
            return None
        if (value := self.closes_cycle(tops)) is not None:
            self.refuse(members[-1], "another launch lies between the two", value)
            return None
        for top in tops:
            for leaf in top.leaves:
                self.touch(leaf)
        return self.fuse(tops, name)


def _own_mailbox(tops: Sequence[Node]) -> Value | None:
    """A value that one of the nodes pushes to peers and another would read back."""
    inside = {id(leaf) for top in tops for leaf in top.leaves}
    for top in tops:
        for leaf in top.leaves:
            if leaf.op in PUSHES and any(id(user) in inside for user in leaf.result.users()):
                return leaf.result
    return None


def parent_name(name: str) -> str:
    """The module part of a value name: layers.3.self_attn.q_proj -> layers.3.self_attn."""
    return name.rpartition(".")[0]


__all__ = ["Edit", "Pass", "PassResult", "Refusal", "parent_name"]
