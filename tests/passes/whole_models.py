"""Traced graphs of whole models with the attributes of one bucket, cached as text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from k3fuse.ir import Graph, parse_graph, print_graph
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.passes.pipeline import PIPELINE
from k3fuse.trace import trace_commit, trace_step

TINY = ("kimi-k3-tiny", "kimi-k3-tiny-9", "kimi-linear-tiny")
PAGE_SIZE = 32


@dataclass(frozen=True)
class Case:
    """One graph: a model for tp ranks and `batch` requests of `rows` rows each."""

    model: str
    tp: int = 1
    batch: int = 1
    rows: int = 1

    def __str__(self) -> str:
        verify = f"-verify{self.rows}" if self.rows > 1 else ""
        return f"{self.model}-tp{self.tp}-b{self.batch}{verify}"


def traced(case: Case) -> Graph:
    """The traced graph with the attributes that passes read."""
    graph = parse_graph(_text(case.model, case.rows, "verify" if case.rows > 1 else "commit"))
    graph.attrs.update(
        {
            "model": case.model,
            "target": "gb300",
            "tp": case.tp,
            "dim.R": case.batch,
            "dim.M": case.batch * case.rows,
            "dim.slots": case.batch,
            "dim.pages": 64,
            "dim.table": 16,
        }
    )
    return graph


@functools.cache
def _text(model: str, rows: int, mode: Literal["commit", "verify"]) -> str:
    module = KimiModel(BUILTIN_CONFIGS[model], "meta")
    graph = trace_step(module, rows_per_request=rows, mode=mode, page_size=PAGE_SIZE)
    return print_graph(graph)


def traced_commit(case: Case) -> Graph:
    """The graph that commits accepted rows, for the ranks of a case."""
    module = KimiModel(BUILTIN_CONFIGS[case.model], "meta")
    graph = trace_commit(module, rows_per_request=case.rows, page_size=PAGE_SIZE)
    graph.attrs.update({**traced(case).attrs, **graph.attrs})
    return graph


def compiled(case: Case) -> Graph:
    """The graph after the whole pipeline."""
    return run_pipeline(traced(case))


def run_pipeline(graph: Graph) -> Graph:
    for item in PIPELINE:
        item.run(graph)
    return graph


def sites(graph: Graph) -> list[str]:
    """Every traced op: what the coverage ledger must account for."""
    return [origin.site for node in graph.leaves() for origin in node.origins]
