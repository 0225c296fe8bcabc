"""Every op that is in no group becomes a launch of its own; static ones become the recipe."""

from __future__ import annotations

from typing import ClassVar

from k3fuse.errors import PassError
from k3fuse.ir import Graph
from k3fuse.passes.base import Edit, Pass
from k3fuse.passes.fuse_comm import launch_name
from k3fuse.schedule.roles import static_leaf


class FormLaunches(Pass):
    """Make the graph a list: first the weight recipe, then launches and nothing else.

    Before:
        %u = mul(%norm, %proj)                // static
        %y.local = linear(%x, %w)
        %uk = slice(%kv_b)                    // static
    After:
        %u = mul(%norm, %proj)
        %uk = slice(%kv_b)
        fused @y { %y.local = linear(%x, %w) }

    Fails unless every traced op is in exactly one launch, in the recipe, or in the ledger of
    dropped ops. Order: after all fusions, before assign-streams.
    """

    name: ClassVar[str] = "form-launches"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        graph = edit.graph
        static = graph.static_values()
        for node in list(graph.nodes):
            if not node.is_fused and not static_leaf(node, static):
                edit.fuse([node], launch_name(node) if node.results else node.op)
        order = [n for n in graph.nodes if not n.is_fused] + [n for n in graph.nodes if n.is_fused]
        if order != graph.nodes:
            graph.nodes[:] = order
            edit.changes += 1


def check_coverage(graph: Graph, traced: list[str]) -> None:
    """Raise PassError unless each traced site is covered exactly once, part by part.

    Covered: by one node, by all parts 1/n..n/n once each, or by an entry in `graph.dropped`.
    """
    roles: dict[str, list[str]] = {}
    for node in graph.leaves():
        for origin in node.origins:
            if origin.role != "made":
                roles.setdefault(origin.site, []).append(origin.role)
    for site in traced:
        found = sorted(roles.pop(site, []))
        if site in graph.dropped and not found:
            continue
        parts = int(found[0].partition("/")[2]) if found and "/" in found[0] else 1
        wanted = ["op"] if parts == 1 else sorted(f"{i + 1}/{parts}" for i in range(parts))
        if found != wanted:
            op = site.rpartition("/")[2]
            state = f"covered {len(found)} times ({', '.join(found)})" if found else "missing"
            raise PassError(f"coverage: {op} {state}: {site}")
    if roles:
        raise PassError(f"coverage: ops that nobody traced: {', '.join(sorted(roles)[:5])}")
