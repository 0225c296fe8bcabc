"""Rewrites the generated parts of the documentation: `python docs/refresh.py`.

A generated part lies between `<!-- generated: NAME -->` and `<!-- end -->`. A test fails when one
of them is not what this script would write today.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from k3fuse.compiler import compile_bucket, trace_bucket
from k3fuse.ir import parse_graph, print_graph
from k3fuse.lowering.lower import lower
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.passes.pipeline import PIPELINE, STOCK
from k3fuse.report.contents import BucketReport
from k3fuse.report.layers import layer_lines
from k3fuse.report.summary import summarize
from k3fuse.runtime.bundle import Bucket

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/architecture.md")
EXCERPT_LAUNCH = "fused @layers.1.self_attn.o_proj {"


def pass_table() -> str:
    """Every pass in order: what it does, and where it has to stand."""
    lines = ["| pass | what it does | order |", "| --- | --- | --- |"]
    for item in PIPELINE:
        doc = type(item).__doc__ or ""
        first, rest = doc.split("\n", 1)
        prose = " ".join(rest.split())
        order = re.search(r"Order: (.*?\.)(?: [A-Z(]|$)", prose)
        name = f"`{item.name}`{'' if item.required else ' (optional)'}"
        lines.append(f"| {name} | {first} | {order[1] if order else ''} |")
    return "\n".join(lines)


def ir_excerpt() -> str:
    """One fused launch as `inspect --layer 1` prints it: an o_proj of the tiny K3 at TP 4."""
    model = family_of("kimi-k3-tiny").build(builtin_config("kimi-k3-tiny"), "meta")
    options = CompileOptions(target="sm_90a", tp=4)
    compiled = compile_bucket(model, "kimi-k3", Bucket(1, 1, "step"), options)
    lines = layer_lines(list(compiled.dumps.values())[-1], 1)
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(EXCERPT_LAUNCH))
    stop = next(i for i, line in enumerate(lines) if i > start and line.strip() == "}")
    return "\n".join(["```text", *lines[start : stop + 1], "```"])


def launch_table() -> str:
    """Launches of one layer and bytes of one rank of the full K3 at TP 16, as `inspect` counts."""
    config = builtin_config("kimi-k3")
    model = family_of("kimi-k3").build(config, "meta")
    options = CompileOptions(target="gb300", tp=16, batches=(1, 8))
    traced = print_graph(trace_bucket(model, "kimi-k3", Bucket(1, 1, "step"), options))
    rows: dict[str, list[str]] = {}
    bytes_read: list[str] = []
    for batch in options.batches:
        graph = parse_graph(traced)
        graph.attrs.update({"dim.R": batch, "dim.M": batch})
        stock = graph
        for item in PIPELINE:
            item.run(graph)
            stock = parse_graph(print_graph(graph)) if item.name == STOCK else stock
        plan = lower(graph, stock)
        summary = summarize(BucketReport("", "step", plan, "", {}, ()))
        for kind in summary.kinds:
            if kind.kind != "ends":
                stock_launches = kind.stock_launches.text()
                rows.setdefault(kind.kind, [stock_launches]).append(kind.main_launches.text())
        planned, whole, padding = (
            f"{count / 1e9:.2f} GB"
            for count in (plan.planned_bytes, plan.stock_bytes, plan.stock_padding_bytes)
        )
        cells = f"{planned} | " if batch == 1 else f" | {planned}"
        bytes_read.append(
            f"| bytes of a rank, M = {batch} | {whole} ({padding} padding) | {cells} |"
        )
    lines = ["| | stock | planned, M = 1 | planned, M = 8 |", "| --- | --- | --- | --- |"]
    lines += [f"| launches, {kind} | {' | '.join(row)} |" for kind, row in rows.items()]
    lines += bytes_read
    return "\n".join(lines)


PARTS: Mapping[str, Callable[[], str]] = {
    "passes": pass_table,
    "excerpt": ir_excerpt,
    "launches": launch_table,
}


def refreshed(text: str) -> str:
    """The text with every generated part as it should be."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- generated: (\w+) -->)\n.*?(<!-- end -->)", part, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the files in place and say which were stale."""
    for name in FILES:
        path = ROOT / name
        old = path.read_text()
        new = refreshed(old)
        if new != old:
            path.write_text(new)
        print(f"{name}: {'written' if new != old else 'fresh'}")


if __name__ == "__main__":
    main()
