"""`k3fuse verify`: run every dump of a bundle against the traced graph, on real weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from k3fuse.cli.load import bundle_source, use_one_thread
from k3fuse.cli.output import Task, console, emit_json, progress
from k3fuse.compiler import trace_bucket
from k3fuse.errors import RefusedError, VerifyError
from k3fuse.ir import Graph, parse_graph, print_graph, verify
from k3fuse.lowering.lower import lower
from k3fuse.lowering.recipe import merge_recipes, weight_recipe
from k3fuse.lowering.select import Kernels, resources_of, select
from k3fuse.passes.numeric_check import Load, NumericCheck, PassCheck
from k3fuse.passes.pipeline import STOCK
from k3fuse.runtime.bundle import MANIFEST, Bucket, Bundle, read_bundle
from k3fuse.runtime.plan import Plan
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.proof import prove
from k3fuse.target import get_target


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("verify")(verify_)


@dataclass(frozen=True)
class _Row:
    bucket: Bucket
    check: PassCheck


def verify_(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint, if not where the bundle was compiled from.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check every pass against the traced forward in float64, and the plan of the last graph."""
    use_one_thread()
    opened = read_bundle(bundle)
    source = bundle_source(opened, checkpoint)
    options = opened.options
    cache = {name: p.data for name, p in source.module().named_parameters()}
    rows: list[_Row] = []
    problems: list[str] = []
    with progress("verify") as task:
        task.total(sum(len(opened.dumps(bucket)) for bucket in opened.buckets))
        for bucket in opened.buckets:
            trace = trace_bucket(source.meta_module(), opened.manifest.model, bucket, options)
            check = _BucketCheck(opened, bucket, print_graph(trace), rows, task)
            try:
                check.run(lambda value: cache[value.binding])
            except (RefusedError, VerifyError) as error:
                problems.append(f"{bucket}: {error}")
    if not problems and _recipe_differs(opened):
        problems.append("recipe.ir is not the weight recipe of the graphs: compile again")
    if json_output:
        emit_json(
            {
                "ok": not problems,
                "passes": [
                    {
                        "name": row.check.name,
                        "bucket": row.bucket.name,
                        "max_rel_err": row.check.max_rel_err,
                        "tolerance": row.check.tolerance,
                        "ok": row.check.ok,
                    }
                    for row in rows
                ],
                "problems": problems,
            }
        )
    else:
        console.print(_table(rows))
    if problems:
        raise RefusedError(f"{bundle}: {'; '.join(problems)}")


@dataclass
class _BucketCheck:
    """Goes through what a bundle holds of one bucket; appends to `rows`, a row a pass."""

    bundle: Bundle
    bucket: Bucket
    traced: str
    rows: list[_Row]
    task: Task

    def run(self, load: Load) -> None:
        """Raises RefusedError or VerifyError that says what is wrong, naming the pass."""
        dumps = self.bundle.dumps(self.bucket)
        if not dumps:
            raise RefusedError("there are no dumps to check: compile again")
        (first, trace_text), *later = dumps
        if trace_text != self.traced:
            raise RefusedError(f"dump {first} is not what tracing the model gives")
        check = NumericCheck(load)
        check.start(parse_graph(trace_text, first), trace_text)
        self.task.advance()
        before = stock = trace_text
        for stem, text in later:
            name = stem.partition("_")[2]
            self.task.label(f"{self.bucket} {name}")
            self._after(check, stem, name, text, before)
            stock = text if name == STOCK else stock
            before = text
            self.task.advance()
        self._last(before, stock)

    def _after(self, check: NumericCheck, stem: str, name: str, text: str, before: str) -> None:
        graph = parse_graph(text, stem)
        try:
            verify(graph)
            found = check.repeat(name) if text == before else check.compare(name, graph)
        except VerifyError as error:
            raise VerifyError(f"after {name}: {error}") from None
        self.rows.append(_Row(self.bucket, found))
        if not found.ok:
            raise RefusedError(
                f"after {name} outputs differ by {found.max_rel_err:.2e} relative "
                f"(allowed {found.tolerance:.0e})"
            )

    def _last(self, text: str, stock: str) -> None:
        manifest, final = self.bundle.manifest, self.bundle.graph(self.bucket)
        plan = self.bundle.plan(self.bucket)
        if print_graph(final) != text:
            raise RefusedError("the graph that runs is not its last dump")
        if lower(final, parse_graph(stock, STOCK)).hash() != plan.hash():
            raise RefusedError("the plan is not that of its graph")
        if (plan.tp, get_target(plan.target)) != (manifest.tp, get_target(manifest.target)):
            raise RefusedError(f"{MANIFEST} names another target or TP than the plan")
        self._kernels(final, plan)
        proof = prove(schedule_of(plan, self.bundle.resources(self.bucket)))
        if not proof.proved:
            reasons = [*map(str, proof.findings), *proof.not_proven]
            raise RefusedError(f"its schedule is not proven: {'; '.join(reasons[:3])}")

    def _kernels(self, graph: Graph, plan: Plan) -> None:
        """The selection is the one that this graph and plan give, and its kernels are those."""
        found, manifest = self.bundle.selection(self.bucket), self.bundle.kernels()
        if found is None or manifest is None:
            return
        kernels = Kernels(get_target(plan.target), self.bundle.options.debug)
        if select(graph, plan, kernels) != found:
            raise RefusedError("the selection of kernels is not that of its plan")
        records = manifest.by_name()
        for name, config in kernels.configs.items():
            if records[name].resources != resources_of(config):
                raise RefusedError(f"kernel {name} takes other resources than its launches do")
            if not records[name].audited:
                raise RefusedError(f"kernel {name} did not pass the PTX audit")


def _recipe_differs(bundle: Bundle) -> bool:
    recipes = [weight_recipe(bundle.graph(bucket)) for bucket in bundle.buckets]
    return print_graph(merge_recipes(recipes)) != print_graph(bundle.recipe())


def _table(rows: list[_Row]) -> Table:
    buckets = list(dict.fromkeys(row.bucket for row in rows))
    table = Table("pass", *(str(b) for b in buckets), title="largest relative error in float64")
    for name in dict.fromkeys(row.check.name for row in rows):
        cells = [
            f"{row.check.max_rel_err:.1e}{'' if row.check.ok else ' FAILED'}"
            for bucket in buckets
            for row in rows
            if row.bucket == bucket and row.check.name == name
        ]
        table.add_row(name, *cells)
    return table
