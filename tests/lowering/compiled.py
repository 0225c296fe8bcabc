"""Graphs and plans for tests: a built-in model through the whole pipeline, without weights."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from k3fuse.ir import Graph, parse_graph, print_graph
from k3fuse.lowering.lower import lower
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.passes.pipeline import PIPELINE, STOCK
from k3fuse.runtime.plan import Plan
from k3fuse.trace.decode import trace_commit, trace_step

PAGE, PAGES, TABLE = 8, 12, 3


class Compiled(NamedTuple):
    """A final graph, the stock graph it came from, and their plan."""

    graph: Graph
    stock: Graph
    plan: Plan


@cache
def compiled(
    model: str,
    tp: int = 1,
    batch: int = 1,
    *,
    rows: int = 1,
    kind: Literal["step", "verify", "commit"] = "step",
    context: int = 1,
    target: str = "gb300",
) -> Compiled:
    """Read-only: shared by the tests of a session."""
    module = KimiModel(BUILTIN_CONFIGS[model], "meta")
    if kind == "commit":
        graph = trace_commit(module, rows_per_request=rows, page_size=PAGE)
    else:
        mode = "verify" if kind == "verify" else "commit"
        graph = trace_step(module, rows_per_request=rows, mode=mode, page_size=PAGE)
    graph.attrs.update(
        {
            "model": model,
            "tp": tp,
            "target": target,
            "context": context,
            "rows_per_request": rows,
            "dim.M": batch * rows,
            "dim.R": batch,
            "dim.slots": batch + 1,
            "dim.pages": PAGES,
            "dim.table": TABLE,
        }
    )
    stock = graph
    for item in PIPELINE:
        item.run(graph)
        if item.name == STOCK:
            stock = parse_graph(print_graph(graph))
    return Compiled(graph, stock, lower(graph, stock))
