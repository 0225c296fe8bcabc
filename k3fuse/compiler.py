"""The story: a model and a checkpoint become a checked, fused plan, one line a stage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from k3fuse import __version__
from k3fuse.errors import RefusedError
from k3fuse.ir import Graph, parse_graph, print_graph
from k3fuse.lowering.build_kernels import BuiltKernels
from k3fuse.lowering.lower import lower
from k3fuse.lowering.recipe import merge_recipes, weight_recipe
from k3fuse.lowering.select import Kernels, select
from k3fuse.models.registry import Config
from k3fuse.options import CompileOptions
from k3fuse.passes.base import PassResult, Refusal
from k3fuse.passes.form_launches import check_coverage
from k3fuse.passes.instruments import Dumps, Instrument
from k3fuse.passes.manager import run_passes
from k3fuse.passes.numeric_check import TOLERANCE, Load, NumericCheck, PassCheck
from k3fuse.passes.pipeline import PIPELINE, STOCK, pass_named
from k3fuse.report.contents import BucketReport, kind_of, pass_of
from k3fuse.roofline import roofline
from k3fuse.runtime.bundle import (
    Bucket,
    BucketContents,
    CheckpointRef,
    Contents,
    KernelFiles,
    Kind,
    PassRecord,
    RefusalRecord,
    cache_key,
)
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.selection import Resources, Selection
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.proof import ASSUMPTIONS, Proof, prove
from k3fuse.target import get_target
from k3fuse.trace import trace_commit, trace_step


@dataclass
class CompiledBucket:
    """What one bucket became, with everything that was seen on the way.

    selection, resources: of the kernels, if there are to be any (None and empty otherwise).
    """

    bucket: Bucket
    graph: Graph
    plan: Plan
    dumps: dict[str, str]
    results: list[PassResult]
    proof: Proof
    checks: list[PassCheck] = field(default_factory=list[PassCheck])
    selection: Selection | None = None
    resources: dict[str, Resources] = field(default_factory=dict[str, Resources])

    @property
    def refusals(self) -> list[Refusal]:
        return [refusal for result in self.results for refusal in result.refusals]


def buckets_of(options: CompileOptions) -> list[Bucket]:
    """The graphs that a compilation makes: a step a batch, and verify and commit if asked for."""
    rows = options.verify_rows
    found = [Bucket(batch, 1, "step") for batch in options.batches]
    if rows:
        kinds: tuple[Kind, ...] = ("step", "commit")
        found += [Bucket(batch, rows, kind) for batch in options.batches for kind in kinds]
    return found


def trace_bucket(model: nn.Module, name: str, bucket: Bucket, options: CompileOptions) -> Graph:
    """Trace the stock forward for a bucket and write what passes need to know into the graph."""
    rows, page_size = bucket.rows_per_request, options.page_size
    if bucket.kind == "commit":
        graph = trace_commit(model, rows_per_request=rows, page_size=page_size)
    else:
        mode = "verify" if rows > 1 else "commit"
        graph = trace_step(model, rows_per_request=rows, mode=mode, page_size=page_size)
    graph.attrs.update(
        {
            "model": name,
            "target": options.target,
            "tp": options.tp,
            "protocol": options.protocol,
            "prefetch": options.prefetch,
            "context": options.context,
            **{f"dim.{name}": size for name, size in bucket.dims(options).items()},
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
    kernels: Kernels | None = None,
) -> CompiledBucket:
    """Trace, run the pipeline, lower, select kernels, prove the order of all accesses.

    With `load` every pass is checked numerically. kernels: where those of all buckets are
    collected (None: none are selected). The proof is returned, not judged.
    """
    graph = trace_bucket(model, name, bucket, options)
    traced = [origin.site for node in graph.leaves() for origin in node.origins]
    dumps = Dumps()
    check = [NumericCheck(load)] if load is not None else []
    results = run_passes(
        graph,
        PIPELINE,
        instruments=[dumps, *check, *instruments],
        bisect_limit=options.bisect_limit,
    )
    check_coverage(graph, traced)
    stock = parse_graph(dumps.after_pass(STOCK), STOCK)
    checks = check[0].checks if check else []
    plan = lower(graph, stock)
    selection = None if kernels is None else select(graph, plan, kernels)
    resources = {} if kernels is None or selection is None else kernels.resources(selection)
    proof = prove(schedule_of(plan, resources))
    return CompiledBucket(
        bucket, graph, plan, dumps.texts, results, proof, checks, selection, resources
    )


def run_until(
    model: nn.Module,
    name: str,
    bucket: Bucket,
    options: CompileOptions,
    last_pass: str,
    instruments: Sequence[Instrument] = (),
) -> str:
    """The IR text of a bucket after the pass of that name."""
    passes = PIPELINE[: PIPELINE.index(pass_named(last_pass)) + 1]
    graph = trace_bucket(model, name, bucket, options)
    run_passes(graph, passes, instruments=instruments, bisect_limit=options.bisect_limit)
    return print_graph(graph)


def bucket_key(compiled: CompiledBucket) -> str:
    """How JSON output names a bucket: the batch of a plain step, else the bucket's name."""
    bucket = compiled.bucket
    plain = bucket.kind == "step" and bucket.rows_per_request == 1
    return str(bucket.batch) if plain else bucket.name


def bucket_report(
    compiled: CompiledBucket, config: Config, built: BuiltKernels | None = None
) -> BucketReport:
    """A bucket as the reports see it, with the floor of its step. built: its kernels, if any."""
    bucket, plan = compiled.bucket, compiled.plan
    floor = roofline(config, get_target(plan.target), plan.tp, plan.rows)
    return BucketReport(
        name=bucket.name,
        kind=kind_of(bucket),
        plan=plan,
        plan_hash=plan.hash(),
        dumps=compiled.dumps,
        refusals=tuple(compiled.refusals),
        floor_us=None if bucket.kind == "commit" else 1e3 * floor.floor_ms,
        selection=None if built is None else compiled.selection,
        kernels={} if built is None else built.manifest.by_name(),
    )


def joint_hash(plans: Sequence[Plan]) -> str:
    """One hash over the plans of all buckets, in order."""
    return hashlib.sha256("".join(plan.hash() for plan in plans).encode()).hexdigest()


def without_kernel(compiled: Sequence[CompiledBucket]) -> list[tuple[str, str, str]]:
    """(bucket, launch, reason) of every launch that no kernel does, where kernels are selected."""
    return [
        (item.bucket.name, found.launch, found.reason)
        for item in compiled
        if item.selection is not None
        for found in item.selection.without
    ]


def proofs(compiled: Sequence[CompiledBucket], built: BuiltKernels | None = None) -> dict[str, str]:
    """What was established of every bucket, and what was not, in words. built: the kernels."""
    checks = [check for item in compiled for check in item.checks]
    if checks:
        worst = max(check.max_rel_err for check in checks)
        numbers = (
            f"checked: after each pass outputs equal the traced forward within {worst:.1e} "
            f"relative in float64 (allowed {TOLERANCE:.0e})"
        )
    else:
        numbers = "not checked: no weights, or switched off"
    return {
        "structure": "verified after each pass: SSA, types and placements, state versions",
        "coverage": "every traced op is in one launch, the recipe or the ledger of dropped ops",
        "buffers": "no two live values overlap",
        "numerics": numbers,
        **_schedule_proofs([item.proof for item in compiled]),
        **_kernel_proofs(built),
    }


def _kernel_proofs(built: BuiltKernels | None) -> dict[str, str]:
    if built is None:
        return {"ptx": "not audited: no kernels were compiled"}
    if built.findings:
        return {"ptx": "not proven: " + "; ".join(built.findings)}
    return {
        "ptx": f"audited {built.distinct} kernels: nothing but weights is read before the wait, "
        "mailboxes are polled for their empty pattern, memory is as declared"
    }


def require_kernels(compiled: Sequence[CompiledBucket]) -> None:
    """RefusedError naming launches that no kernel does."""
    reasons = [
        f"@{launch} of {bucket}: {reason}" for bucket, launch, reason in without_kernel(compiled)
    ]
    if reasons:
        raise RefusedError(
            f"{len(reasons)} launches have no kernel: {_first(reasons)}; compile with --no-strict "
            "for a bundle with the other kernels, or --no-kernels"
        )


def require_audited(built: BuiltKernels) -> None:
    """RefusedError for a compiled kernel that the audit does not accept."""
    if built.findings:
        raise RefusedError(f"PTX audit: {_first(built.findings)}")


def _first(reasons: Sequence[str], most: int = 3) -> str:
    more = f" (and {len(reasons) - most} more)" if len(reasons) > most else ""
    return f"{'; '.join(reasons[:most])}{more}"


def require_proven(compiled: Sequence[CompiledBucket], *, strict: bool) -> None:
    """Raise RefusedError for a schedule that is wrong, or with `strict` one that is not proven."""
    for item in compiled:
        proof = item.proof
        reasons = [str(finding) for finding in proof.findings]
        if strict:
            reasons += [f"not proven: {reason}" for reason in proof.not_proven]
        if reasons:
            raise RefusedError(f"schedule of {item.bucket}: {_first(reasons)}")


def _schedule_proofs(found: Sequence[Proof]) -> dict[str, str]:
    open_ends = [
        reason for proof in found for reason in (*map(str, proof.findings), *proof.not_proven)
    ]
    if open_ends:
        return {"happens_before": "not proven: " + "; ".join(open_ends)}
    checks, seconds = sum(p.checks for p in found), sum(p.seconds for p in found)
    without = sum(len(p.no_resources) for p in found)
    return {
        "happens_before": f"proved: {checks} accesses are ordered over streams, ranks and replays",
        "mailboxes": "explored: no interleaving of 2 or 3 ranks deadlocks or loses a value",
        "co_residency": f"not proven: {without} launches have no kernel, so no resources, yet"
        if without or not found
        else "proved: launches that spin fit beside what may run with them",
        "schedule": f"took {seconds:.2f} s; assumes {len(ASSUMPTIONS)} facts of the memory model "
        "(k3fuse prove BUNDLE lists them)",
    }


def bundle_contents(
    model: str,
    config: Config,
    options: CompileOptions,
    compiled: Sequence[CompiledBucket],
    checkpoint: CheckpointRef | None,
    built: BuiltKernels | None = None,
    *,
    dumps: bool = True,
) -> Contents:
    """Everything that goes into the bundle of a compilation. built: its kernels, if any. dumps:
    whether the IR after every pass is part of it."""
    return Contents(
        model=model,
        target=options.target,
        tp=options.tp,
        dtype="bf16",
        checkpoint=checkpoint,
        options=options.as_dict(),
        cache_key=cache_key(
            {
                "version": __version__,
                "options": options.as_dict(),
                "config": config,
                "target": get_target(options.target),
                "pipeline": [item.name for item in PIPELINE],
            }
        ),
        recipe=merge_recipes([weight_recipe(item.graph) for item in compiled]),
        buckets=[
            BucketContents(
                item.bucket,
                item.plan,
                item.graph,
                [(pass_of(file), text) for file, text in item.dumps.items()] if dumps else [],
                None if built is None else item.selection,
            )
            for item in compiled
        ],
        refusals=[
            RefusalRecord(item.bucket.name, r.pass_name, r.site, r.reason, r.value)
            for item in compiled
            for r in item.refusals
        ],
        passes=[
            PassRecord(item.bucket.name, result.name, result.changes)
            for item in compiled
            for result in item.results
        ],
        kernels=None if built is None else KernelFiles(built.manifest, built.cubins),
    )
