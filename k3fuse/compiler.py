"""The story: a model and a checkpoint become a checked, fused plan, one line a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from k3fuse.ir import Graph, parse_graph
from k3fuse.lowering.lower import lower
from k3fuse.options import CompileOptions
from k3fuse.passes.base import Pass, PassResult, Refusal
from k3fuse.passes.form_launches import check_coverage
from k3fuse.passes.instruments import Dumps, Instrument
from k3fuse.passes.manager import run_passes
from k3fuse.passes.numeric_check import Load, NumericCheck, PassCheck
from k3fuse.passes.pipeline import PIPELINE, STOCK
from k3fuse.runtime.plan import Plan
from k3fuse.trace import trace_commit, trace_step

Kind = Literal["step", "verify", "commit"]


@dataclass(frozen=True)
class Bucket:
    """One graph to compile: a batch of requests, rows a request, and what the graph does."""

    batch: int
    rows_per_request: int
    kind: Kind

    @property
    def name(self) -> str:
        if self.kind == "step":
            return f"b{self.batch}"
        return f"b{self.batch}q{self.rows_per_request}.{self.kind}"


@dataclass
class CompiledBucket:
    """What one bucket became, with everything that was seen on the way."""

    bucket: Bucket
    graph: Graph
    plan: Plan
    dumps: dict[str, str]
    results: list[PassResult]
    checks: list[PassCheck] = field(default_factory=list[PassCheck])

    @property
    def refusals(self) -> list[Refusal]:
        return [refusal for result in self.results for refusal in result.refusals]


def buckets_of(options: CompileOptions) -> list[Bucket]:
    """The graphs that a compilation makes: a step a batch, and verify and commit if asked for."""
    found = [Bucket(batch, 1, "step") for batch in options.batches]
    if options.verify_rows:
        for batch in options.batches:
            found += [
                Bucket(batch, options.verify_rows, "verify"),
                Bucket(batch, options.verify_rows, "commit"),
            ]
    return found


def trace_bucket(model: nn.Module, name: str, bucket: Bucket, options: CompileOptions) -> Graph:
    """Trace the stock forward for a bucket and write what passes need to know into the graph."""
    rows, page_size = bucket.rows_per_request, options.page_size
    if bucket.kind == "commit":
        graph = trace_commit(model, rows_per_request=rows, page_size=page_size)
    else:
        mode = "verify" if bucket.kind == "verify" else "commit"
        graph = trace_step(model, rows_per_request=rows, mode=mode, page_size=page_size)
    graph.attrs.update(
        {
            "model": name,
            "target": options.target,
            "tp": options.tp,
            "protocol": options.protocol,
            "prefetch": options.prefetch,
            "context": options.context,
            "dim.R": bucket.batch,
            "dim.M": bucket.batch * rows,
            "dim.slots": options.slots,
            "dim.pages": options.pages,
            "dim.table": options.max_pages,
        }
    )
    return graph


def compile_bucket(
    model: nn.Module,
    name: str,
    bucket: Bucket,
    options: CompileOptions,
    *,
    load: Load | None = None,
    instruments: Sequence[Instrument] = (),
    on_pass: Callable[[str], None] | None = None,
) -> CompiledBucket:
    """Trace, run the pipeline, lower. With `load` every pass is checked numerically."""
    graph = trace_bucket(model, name, bucket, options)
    traced = [origin.site for node in graph.leaves() for origin in node.origins]
    dumps = Dumps()
    check = [NumericCheck(load)] if load is not None else []
    watchers = [dumps, *check, *instruments, *([_Report(on_pass)] if on_pass else [])]
    results = run_passes(graph, PIPELINE, instruments=watchers, bisect_limit=options.bisect_limit)
    check_coverage(graph, traced)
    stock = parse_graph(dumps.after_pass(STOCK), STOCK)
    checks = check[0].checks if check else []
    return CompiledBucket(bucket, graph, lower(graph, stock), dumps.texts, results, checks)


class _Report(Instrument):
    """Tells a progress bar which pass has just run."""

    def __init__(self, on_pass: Callable[[str], None]) -> None:
        self._on_pass = on_pass

    def after(self, item: Pass, graph: Graph, result: PassResult, before: str, text: str) -> None:
        self._on_pass(item.name)


def pipeline_names() -> list[str]:
    """The passes in order, for cache keys and reports."""
    return [item.name for item in PIPELINE]
