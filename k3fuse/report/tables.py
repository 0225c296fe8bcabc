"""Summaries as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from k3fuse.report.summary import BucketSummary, KernelView, LaunchRow, RefusalGroup
from k3fuse.report.units import human_bytes, human_us


def bucket_tables(summary: BucketSummary) -> Iterator[RenderableType]:
    """A bucket at a glance: kinds of layers, memory, mailboxes."""
    yield Text(
        f"bucket {summary.bucket} ({summary.kind}): {summary.model}, {summary.target}, "
        f"tp {summary.tp}, batch {summary.batch}, {summary.rows_per_request} rows a request, "
        f"plan {summary.plan_hash[:12]}",
        style="bold",
    )
    kinds = _table(
        "kind", "layers", "stock", "main", "aux", "prefetch", "MB/layer", "us/layer", "us"
    )
    for kind in summary.kinds:
        kinds.add_row(
            kind.kind,
            str(len(kind.layers)),
            kind.stock_launches.text(),
            kind.main_launches.text(),
            kind.aux_launches.text(),
            kind.prefetch_launches.text(),
            kind.planned_bytes.text("{:.4g}", 1e6),
            kind.predicted_us.text("{:.1f}"),
            f"{kind.total_us:.1f}",
        )
    counts = summary.launches
    kinds.add_section()
    kinds.add_row(
        "step",
        "",
        str(summary.stock_launches),
        *(str(counts[stream]) for stream in ("main", "aux", "prefetch")),
        f"{summary.planned_bytes / 1e6:.4g}",
        "",
        f"{summary.predicted_us:.1f}",
    )
    yield kinds
    yield Text(_totals(summary))
    yield memory_table(summary)
    if summary.mailboxes:
        yield mailbox_table(summary)


def _totals(summary: BucketSummary) -> str:
    stock = f"stock reads {human_bytes(summary.stock_bytes)}"
    if summary.stock_padding_bytes:
        stock += f", {human_bytes(summary.stock_padding_bytes)} of it padding"
    text = f"one rank moves {human_bytes(summary.planned_bytes)} a step ({stock}); "
    text += f"predicted {human_us(summary.predicted_us)}"
    if summary.share_of_floor is not None and summary.floor_us is not None:
        text += (
            f", {100 * summary.share_of_floor:.3g} % of the floor of {human_us(summary.floor_us)}"
        )
    text = f"{text}; {summary.refusals} refusals"
    if summary.kernels is None:
        return f"{text}; no kernels"
    missing = f", {summary.without_kernel} launches without" if summary.without_kernel else ""
    return f"{text}; {summary.kernels} distinct kernels{missing}"


def memory_table(summary: BucketSummary) -> Table:
    """Bytes that the bucket holds on one rank."""
    memory = summary.memory
    table = _table("memory of a rank", "bytes")
    for name in ("weights", "state", "arena", "mailboxes"):
        table.add_row(name, human_bytes(getattr(memory, name)))
    table.add_section()
    table.add_row("total", human_bytes(memory.total))
    return table


def mailbox_table(summary: BucketSummary) -> Table:
    """The rings that peers write."""
    table = _table("mailbox", "type", "stage", "stages", "uses a step", "sentinel")
    for mailbox in summary.mailboxes:
        table.add_row(
            mailbox.protocol,
            Text(mailbox.type),
            human_bytes(mailbox.stage_bytes),
            str(mailbox.stages),
            str(mailbox.uses),
            mailbox.sentinel,
        )
    return table


def launch_text(rows: Sequence[LaunchRow]) -> Iterator[RenderableType]:
    """Launches by stream, each with its ops, edges and operands."""
    for stream in dict.fromkeys(row.stream for row in rows):
        yield Text(f"{stream} stream", style="bold")
        for row in rows:
            if row.stream == stream:
                yield Text(_launch(row))


def _launch(row: LaunchRow) -> str:
    head = (
        f"#{row.number} {row.name}  {human_us(row.predicted_us)} ({row.bound}), weights "
        f"{human_bytes(row.weight_bytes)}, state {human_bytes(row.state_bytes)}, activations "
        f"{human_bytes(row.activation_bytes)}"
    )
    wait = f"wait before {row.wait_op}" if row.wait_op else "no op waits"
    lines = [
        head,
        f"   ops: {' '.join(row.ops)}",
        f"   after: {' '.join(row.after) or 'nothing'}; {wait}; trigger {row.trigger}",
    ]
    if row.kernel is not None:
        lines += _kernel(row.kernel)
    elif row.no_kernel:
        lines.append(f"   no kernel: {row.no_kernel}")
    for access, operands in row.operands.items():
        lines.append(f"   {access}:")
        lines += [f"      {operand}" for operand in operands]
    return "\n".join(lines)


def _kernel(kernel: KernelView) -> list[str]:
    cluster = f" in clusters of {kernel.cluster}" if kernel.cluster > 1 else ""
    scratch = f", scratch {human_bytes(kernel.scratch)}" if kernel.scratch else ""
    head = (
        f"   kernel {kernel.name}: grid {kernel.grid}{cluster}, {kernel.threads} threads, "
        f"{kernel.registers} registers, shared memory {human_bytes(kernel.smem)}{scratch}"
    )
    return [head, *(f"      stage {i}: {stage}" for i, stage in enumerate(kernel.stages))]


def refusal_table(groups: Iterable[RefusalGroup]) -> Table:
    """What passes looked at and left."""
    table = _table("pass", "site", "reason", "value", "count", plain=True)
    for group in groups:
        table.add_row(
            group.pass_name,
            Text(group.site),
            Text(group.reason),
            Text(group.value),
            str(group.count),
        )
    return table


def _table(first: str, *others: str, plain: bool = False) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for header in others:
        table.add_column(header, justify="left" if plain else "right", overflow="fold")
    return table
