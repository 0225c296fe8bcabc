"""The whole pipeline on a tiny model: how much each pass changed, and every kind of refusal."""

from __future__ import annotations

from collections import Counter

from k3fuse.compiler import compile_bucket
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.passes.instruments import PrintChanged
from k3fuse.report.summary import group_refusals
from k3fuse.runtime.bundle import Bucket


def show(text: str) -> None:
    print(text, end="")


def main() -> None:
    model = family_of("kimi-k3-tiny").build(builtin_config("kimi-k3-tiny"), "meta")
    compiled = compile_bucket(
        model,
        "kimi-k3-tiny",
        Bucket(batch=1, rows_per_request=1, kind="step"),
        CompileOptions(target="gb300", tp=4),
        instruments=[PrintChanged(show, "quiet")],
    )
    streams = Counter(launch.stream for launch in compiled.plan.launches)
    stock = sum(count for _, count in compiled.plan.stock_launches)
    print(f"\n{stock} launches with one op each became", dict(streams))
    for group in group_refusals(compiled.refusals):
        print(f"{group.count:3d} x {group.pass_name} at {group.site}: {group.reason}")


if __name__ == "__main__":
    main()
