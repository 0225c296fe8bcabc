"""The only way to change a graph: insert, replace, erase, fuse. Keeps uses and order right."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from k3fuse.errors import PassError
from k3fuse.ir.graph import FUSED, Attr, Graph, Node, Origin, Value
from k3fuse.ir.op import Context, op_named
from k3fuse.tensor_type import TensorType


def sort_nodes(graph: Graph) -> None:
    """Put top-level nodes into a topological order, changing as little of the order as possible."""
    nodes = graph.nodes
    rank = {id(node): i for i, node in enumerate(nodes)}
    waiting = dict.fromkeys(rank, 0)
    readers: dict[int, list[Node]] = {id(n): [] for n in nodes}
    for node in nodes:
        sources = {id(v.producer.top): v.producer.top for v in node.inputs() if v.producer}
        sources.update((id(n), n) for n in _state_readers(node))
        sources.pop(id(node), None)
        waiting[id(node)] = len(sources)
        for source in sources:
            readers[source].append(node)
    ready = [(rank[id(n)], n) for n in nodes if waiting[id(n)] == 0]
    heapq.heapify(ready)
    done: list[Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        node.position = len(done)
        done.append(node)
        for reader in readers[id(node)]:
            waiting[id(reader)] -= 1
            if waiting[id(reader)] == 0:
                heapq.heappush(ready, (rank[id(reader)], reader))
    if len(done) != len(nodes):
        stuck = next(n for n in nodes if waiting[id(n)] > 0)
        raise PassError(f"{stuck} depends on itself: a fusion closed a cycle")
    graph.nodes[:] = done


def _state_readers(node: Node) -> Iterable[Node]:
    """Nodes that must come before `node` because it replaces a state version that they read."""
    for leaf in node.leaves:
        for operand in op_named(leaf.op).updates:
            for reader, _ in leaf.operands[operand].uses:
                if reader is not leaf:
                    yield reader.top


def _free(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}.{count}"
    taken.add(candidate)
    return candidate


class Rewriter:
    """Edits one graph on behalf of one pass; counts the changes and stamps the origins."""

    def __init__(self, graph: Graph, pass_name: str) -> None:
        self.graph = graph
        self.pass_name = pass_name
        self.changes = 0
        self._names = {v.name for v in graph.values()}
        self._launch_names = {n.name for n in graph.nodes if n.is_fused}
        for position, node in enumerate(graph.nodes):
            node.position = position

    def unique(self, name: str) -> str:
        """`name`, or `name.2`, `name.3` ... when another value has it."""
        return _free(name, self._names)

    def unique_launch(self, name: str) -> str:
        """The same among launches, which have names of their own: @y may hold %y."""
        return _free(name, self._launch_names)

    def make(
        self,
        op: str,
        operands: Sequence[Value],
        attrs: dict[str, Attr] | None = None,
        *,
        name: str,
        origins: Iterable[Origin],
        role: str | None = None,
    ) -> Node:
        """A node with inferred result types, not yet in the graph. Results: name, name.1, ..."""
        given = dict(attrs or {})
        types = op_named(op).infer([v.type for v in operands], given, Context(self.graph.tp))
        node = Node(
            op=op,
            operands=list(operands),
            attrs=given,
            results=[],
            origins=tuple(dict.fromkeys(o.then(self.pass_name, role) for o in origins)),
        )
        for index, type_ in enumerate(types):
            result_name = self.unique(name if index == 0 else f"{name}.{index}")
            node.results.append(Value(result_name, type_, producer=node))
        for index, value in enumerate(node.operands):
            value.uses.append((node, index))
        return node

    def insert_before(self, anchor: Node, node: Node) -> None:
        self._insert(anchor, node, 0)

    def insert_after(self, anchor: Node, node: Node) -> None:
        self._insert(anchor, node, 1)

    def append(self, node: Node) -> None:
        node.position = len(self.graph.nodes)
        self.graph.nodes.append(node)
        self.changes += 1

    def _insert(self, anchor: Node, node: Node, offset: int) -> None:
        home = self.graph.nodes if anchor.parent is None else anchor.parent.body
        home.insert(home.index(anchor) + offset, node)
        node.parent = anchor.parent
        node.position = anchor.top.position
        self.changes += 1

    def replace_uses(self, old: Value, new: Value, *, keep: Iterable[Node] = ()) -> None:
        """Let every reader of `old` (but those in `keep`) and the graph's outputs read `new`."""
        kept = {id(n) for n in keep}
        stay: list[tuple[Node, int]] = []
        for node, index in old.uses:
            if id(node) in kept:
                stay.append((node, index))
            else:
                node.operands[index] = new
                new.uses.append((node, index))
        old.uses = stay
        self.graph.outputs = [new if v is old else v for v in self.graph.outputs]
        self.changes += 1

    def set_operand(self, node: Node, index: int, value: Value) -> None:
        node.operands[index].uses.remove((node, index))
        node.operands[index] = value
        value.uses.append((node, index))
        self.changes += 1

    def retype(self, value: Value, type_: TensorType) -> None:
        if value.type != type_:
            value.type = type_
            self.changes += 1

    def set_attr(self, node: Node, key: str, value: Attr) -> None:
        if node.attrs.get(key, _MISSING) != value:
            node.attrs[key] = value
            self.changes += 1

    def touch(self, node: Node) -> None:
        """Record on a leaf's origins that this pass shaped it."""
        node.origins = tuple(dict.fromkeys(o.then(self.pass_name) for o in node.origins))

    def erase(self, node: Node) -> None:
        """Remove a leaf whose results nobody reads."""
        for result in node.results:
            if result.uses or any(v is result for v in self.graph.outputs):
                raise PassError(f"{self.pass_name}: erased {node} is still read")
        for index, value in enumerate(node.operands):
            value.uses.remove((node, index))
        home = self.graph.nodes if node.parent is None else node.parent.body
        home.remove(node)
        if node.parent is not None and not node.parent.body:
            self.graph.nodes.remove(node.parent)
        self.changes += 1

    def drop(self, node: Node, reason: str) -> None:
        """Erase a leaf and write into the ledger that its traced ops are gone, and why."""
        for origin in node.origins:
            if origin.role != "made":
                self.graph.dropped[origin.site] = f"{self.pass_name}: {reason}"
        self.erase(node)

    def closes_cycle(self, members: Sequence[Node]) -> Value | None:
        """The value through which a path leaves the members and comes back, if one does."""
        tops = {id(m.top) for m in members}
        last = max(m.top.position for m in members)
        for member in members:
            for value in member.top.outputs(self.graph):
                outside = [u.top for u in value.users() if id(u.top) not in tops]
                seen: set[int] = set()
                while outside:
                    node = outside.pop()
                    if id(node) in tops:
                        return value
                    if id(node) in seen or node.position > last:
                        continue
                    seen.add(id(node))
                    for result in node.outputs(self.graph):
                        outside.extend(u.top for u in result.users())
        return None

    def fuse(
        self, members: Sequence[Node], name: str = "", attrs: dict[str, Attr] | None = None
    ) -> Node:
        """Group top-level nodes; groups among them dissolve into the new one.

        The name defaults to that of the first group among the members. The caller has asked
        `closes_cycle`. The group takes the place of its first member if it can, else of its last.
        """
        tops = list(dict.fromkeys(m.top for m in members))
        tops.sort(key=lambda n: n.position)
        groups = [top for top in tops if top.is_fused]
        self._launch_names.difference_update(g.name for g in groups)
        name = name or (groups[0].name if groups else "")
        group = Node(FUSED, [], dict(attrs or {}), [], name=self.unique_launch(name))
        for top in tops:
            for leaf in top.leaves:
                leaf.parent = group
                group.body.append(leaf)
        sources = (v.producer.top for v in group.inputs() if v.producer is not None)
        # At the first member's place no reader can come too early; it needs all operands there.
        place = tops[0] if all(s.position < tops[0].position for s in sources) else tops[-1]
        self.graph.nodes[self.graph.nodes.index(place)] = group
        group.position = place.position
        gone = {id(t) for t in tops if t is not place}
        if gone:
            self.graph.nodes[:] = [n for n in self.graph.nodes if id(n) not in gone]
            self._restore_order(group)
        self.changes += 1
        return group

    def _restore_order(self, group: Node) -> None:
        """Re-sort the leaves of a group, and the graph when a reader now stands before it."""
        inner = {id(r): leaf for leaf in group.body for r in leaf.results}
        ordered: list[Node] = []
        placed: set[int] = set()

        def place(leaf: Node) -> None:
            if id(leaf) in placed:
                return
            placed.add(id(leaf))
            for value in leaf.operands:
                if (source := inner.get(id(value))) is not None:
                    place(source)
            ordered.append(leaf)

        for leaf in group.body:
            place(leaf)
        group.body[:] = ordered
        if any(
            user.top.position < group.position
            for value in group.outputs(self.graph)
            for user in value.users()
        ):
            sort_nodes(self.graph)

    def split(self, group: Node, leaves: Sequence[Node]) -> None:
        """Move the last leaves of a group out again, to top level right behind it."""
        moved = {id(n) for n in leaves}
        at = self.graph.nodes.index(group) + 1
        group.body[:] = [n for n in group.body if id(n) not in moved]
        for offset, leaf in enumerate(leaves):
            leaf.parent = None
            leaf.position = group.position
            self.graph.nodes.insert(at + offset, leaf)
        self.changes += 1


_MISSING = object()
