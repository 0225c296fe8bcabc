"""`k3fuse inspect`: what a bundle does and why, in the terminal or as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from k3fuse.checkpoint.files import open_checkpoint
from k3fuse.cli.output import console, emit_json
from k3fuse.errors import InputError
from k3fuse.models.registry import Config, builtin_config, family_of, read_config
from k3fuse.report.contents import BucketReport, kind_of, report_of
from k3fuse.report.html import render_html
from k3fuse.report.summary import as_data, group_refusals, launch_rows, summarize
from k3fuse.report.tables import bucket_tables, launch_text, refusal_table
from k3fuse.roofline import roofline
from k3fuse.runtime.bundle import Bucket, Bundle, Manifest, read_bundle
from k3fuse.target import get_target


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("inspect")(inspect)


def inspect(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    batch: Annotated[
        int | None, typer.Option(help="Bucket of this many requests (default: the smallest).")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="The bucket's verify step.")] = False,
    layer: Annotated[
        int | None, typer.Option(help="Launches and IR of this layer; -1: embedding and head.")
    ] = None,
    pass_: Annotated[
        str | None, typer.Option("--pass", help="IR after this pass, by number or name.")
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="With --pass: what that pass changed.")
    ] = False,
    refusals: Annotated[
        bool, typer.Option("--refusals", help="What passes looked at and left, and why.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained page of the bucket.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show launches, bytes and predicted times; a layer; the IR after a pass; or refusals."""
    _check_flags(layer=layer, pass_=pass_, diff=diff, refusals=refusals, html=html)
    opened = read_bundle(bundle)
    if html is None and pass_ is None and layer is None and not refusals:
        _show_buckets(opened, _chosen(opened, batch, verify), json_output)
        return
    report = _report(opened, _smallest(_chosen(opened, batch, verify)))
    if html is not None:
        _write_page(report, html, json_output)
    elif pass_ is not None:
        _show_pass(report, pass_, layer, diff, json_output)
    elif layer is not None:
        _show_layer(report, layer, json_output)
    else:
        _show_refusals(report, json_output)


def _check_flags(
    *, layer: int | None, pass_: str | None, diff: bool, refusals: bool, html: Path | None
) -> None:
    if diff and pass_ is None:
        raise InputError("--diff shows what one pass changed: name it with --pass")
    asked = [
        flag
        for flag, given in (
            ("--html", html is not None),
            ("--refusals", refusals),
            ("--pass or --layer", pass_ is not None or layer is not None),
        )
        if given
    ]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} are different views: ask for one at a time")


def _chosen(bundle: Bundle, batch: int | None, verify: bool) -> list[Bucket]:
    """The buckets that --batch and --verify leave; InputError lists what there is."""
    buckets = sorted(bundle.buckets, key=lambda b: (b.batch, b.kind != "step", b.rows_per_request))
    kinds = ("verify",) if verify else ("step", "verify", "commit") if batch is None else ("step",)
    found = [b for b in buckets if kind_of(b) in kinds and batch in (None, b.batch)]
    if not found:
        flags = ["--verify"] * verify + ([f"--batch {batch}"] if batch is not None else [])
        known = ", ".join(
            f"batch {b.batch}{' (--verify)' if kind_of(b) == 'verify' else ''}"
            for b in buckets
            if kind_of(b) != "commit"
        )
        raise InputError(
            f"{' '.join(flags)}: {bundle.directory} has no such bucket; it has {known}"
        )
    return found


def _smallest(buckets: list[Bucket]) -> Bucket:
    steps = [b for b in buckets if kind_of(b) == "step"]
    return (steps or buckets)[0]


def _report(bundle: Bundle, bucket: Bucket) -> BucketReport:
    return report_of(bundle, bucket, _floor_us(bundle.manifest, bucket))


def _floor_us(manifest: Manifest, bucket: Bucket) -> float | None:
    """The roofline of the bucket's rows, if the model's configuration can be had."""
    if bucket.kind == "commit" or (config := _config(manifest)) is None:
        return None
    rows = bucket.batch * bucket.rows_per_request
    return 1e3 * roofline(config, get_target(manifest.target), manifest.tp, rows).floor_ms


def _config(manifest: Manifest) -> Config | None:
    """That of the checkpoint while it is still there; the built-in one if there was none."""
    try:
        if manifest.checkpoint is None:
            return builtin_config(manifest.model)
        path = manifest.checkpoint.path
        raw = cast("dict[str, object]", open_checkpoint(Path(path)).config)
        return read_config(family_of(manifest.model), raw, path)
    except InputError:
        return None


def _show_buckets(bundle: Bundle, buckets: list[Bucket], json_output: bool) -> None:
    summaries = [summarize(_report(bundle, bucket)) for bucket in buckets]
    if json_output:
        emit_json({"buckets": [as_data(summary) for summary in summaries]})
        return
    for summary in summaries:
        for part in bucket_tables(summary):
            console.print(part, highlight=False)
        console.print()


def _show_layer(report: BucketReport, layer: int, json_output: bool) -> None:
    rows = launch_rows(report, layer)
    last = len(report.dumps) - 1
    text = report.text_after(last, layer) if last >= 0 else ""
    if json_output:
        launches = [as_data(row) for row in rows]
        emit_json({"bucket": report.name, "layer": layer, "launches": launches, "ir": text})
        return
    for part in launch_text(rows):
        console.print(part, highlight=False)
    sys.stdout.write(f"\n{text}")


def _show_pass(
    report: BucketReport, wanted: str, layer: int | None, diff: bool, json_output: bool
) -> None:
    index = report.pass_index(wanted)
    if layer is not None:
        launch_rows(report, layer)  # the layer exists
    text = (
        "".join(f"{line}\n" for line in report.pass_diff(index, layer))
        if diff
        else report.text_after(index, layer)
    )
    if json_output:
        data: dict[str, Any] = {"bucket": report.name, "pass": report.passes[index]}
        data |= {"index": index, "layer": layer, "diff" if diff else "ir": text}
        emit_json(data)
    elif diff and not text:
        console.print(f"{report.passes[index]}: no change", markup=False, highlight=False)
    else:
        sys.stdout.write(text)


def _show_refusals(report: BucketReport, json_output: bool) -> None:
    groups = group_refusals(report.refusals)
    if json_output:
        data = [as_data(group) for group in groups]
        emit_json({"bucket": report.name, "refusals": data, "total": len(report.refusals)})
    elif groups:
        console.print(refusal_table(groups), highlight=False)
    else:
        console.print("no pass refused anything")


def _write_page(report: BucketReport, path: Path, json_output: bool) -> None:
    page = render_html(report)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: {error.strerror or error}") from None
    if json_output:
        emit_json({"bucket": report.name, "file": str(path), "bytes": len(page.encode())})
    else:
        console.print(f"wrote {path}", markup=False, highlight=False)
