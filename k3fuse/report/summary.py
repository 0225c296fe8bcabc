"""The numbers of a bucket as plain data: what `inspect --json` prints and every table shows."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3fuse.passes.base import Refusal
from k3fuse.report.contents import BucketReport
from k3fuse.report.layers import launches_by_layer, layer_kinds, require_layer
from k3fuse.report.timeline import Bound, bound_of, reads_mailbox, timeline
from k3fuse.runtime.plan import Launch, Mailbox, Memory
from k3fuse.runtime.selection import KernelStage, LaunchKernel
from k3fuse.target import get_target

STREAMS = ("main", "aux", "prefetch")


@dataclass(frozen=True)
class Spread:
    """Least and most of a number over layers of one kind."""

    least: float
    most: float

    def text(self, form: str = "{:.4g}", unit: float = 1.0) -> str:
        """ "7", or "7-8" where layers differ; `form` formats one number, in units of `unit`."""
        low, high = form.format(self.least / unit), form.format(self.most / unit)
        return low if low == high else f"{low}-{high}"


@dataclass(frozen=True)
class KindSummary:
    """All layers of one kind. Spreads are over its layers; times are of the main stream."""

    kind: str
    layers: tuple[int, ...]
    stock_launches: Spread
    main_launches: Spread
    aux_launches: Spread
    prefetch_launches: Spread
    planned_bytes: Spread  # one rank, one layer
    predicted_us: Spread  # one layer
    total_bytes: int
    total_us: float


@dataclass(frozen=True)
class BucketSummary:
    """A bucket at a glance; bytes are of one rank, times in microseconds.

    share_of_floor is floor over predicted time; both are None when the floor is not known.
    """

    bucket: str
    kind: str
    batch: int
    rows_per_request: int
    model: str
    target: str
    tp: int
    plan_hash: str
    launches: dict[str, int]  # by stream
    stock_launches: int
    planned_bytes: int
    stock_bytes: int
    stock_padding_bytes: int
    predicted_us: float
    floor_us: float | None
    share_of_floor: float | None
    kinds: tuple[KindSummary, ...]
    memory: Memory
    mailboxes: tuple[Mailbox, ...]
    refusals: int
    kernels: int | None  # distinct ones of the bucket; None without kernels
    without_kernel: int


@dataclass(frozen=True)
class KernelView:
    """The kernel of a launch for people. grid and cluster in CTAs, bytes a CTA of shared memory;
    stages: their ops, each behind the grid barriers before it."""

    name: str
    grid: int
    threads: int
    cluster: int
    smem: int
    scratch: int
    registers: int
    stages: tuple[str, ...]


@dataclass(frozen=True)
class LaunchRow:
    """One launch as a table row. wait: the first op that must not run before the wait.

    kernel: None where no kernel was selected; no_kernel then says why, if one was looked for.
    """

    number: int  # position in the plan
    name: str
    layer: int
    stream: str
    ops: tuple[str, ...]
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    start_us: float
    predicted_us: float
    bound: Bound
    exchange: bool
    after: tuple[str, ...]
    wait: int
    wait_op: str  # empty when no op needs the wait
    trigger: str
    operands: dict[str, list[str]]  # access class -> "read %value: type (bytes)"
    kernel: KernelView | None
    no_kernel: str


@dataclass(frozen=True)
class RefusalGroup:
    """Refusals that differ in nothing but the layer, which stands as `*`."""

    pass_name: str
    site: str
    reason: str
    value: str
    count: int


def summarize(report: BucketReport) -> BucketSummary:
    """The totals of a bucket and one entry per kind of layer."""
    plan, chosen = report.plan, report.selection
    by_stream = Counter(launch.stream for launch in plan.launches)
    predicted = plan.predicted_us
    known = report.floor_us is not None and predicted > 0
    return BucketSummary(
        bucket=report.name,
        kind=report.kind,
        batch=plan.batch,
        rows_per_request=plan.rows_per_request,
        model=plan.model,
        target=plan.target,
        tp=plan.tp,
        plan_hash=report.plan_hash,
        launches={stream: by_stream[stream] for stream in STREAMS},
        stock_launches=sum(count for _, count in plan.stock_launches),
        planned_bytes=plan.planned_bytes,
        stock_bytes=plan.stock_bytes,
        stock_padding_bytes=plan.stock_padding_bytes,
        predicted_us=predicted,
        floor_us=report.floor_us,
        share_of_floor=report.floor_us / predicted if known and report.floor_us else None,
        kinds=tuple(_kinds(report)),
        memory=plan.memory,
        mailboxes=plan.mailboxes,
        refusals=len(report.refusals),
        kernels=None if chosen is None else len({x.kernel for x in chosen.launches if x.kernel}),
        without_kernel=0 if chosen is None else len(chosen.without),
    )


def _kinds(report: BucketReport) -> Iterable[KindSummary]:
    stock = dict(report.plan.stock_launches)
    launches = launches_by_layer(report.plan)
    members: dict[str, list[int]] = {}
    for layer, kind in layer_kinds(report.plan).items():
        members.setdefault(kind, []).append(layer)
    for kind, layers in sorted(members.items(), key=lambda item: -len(item[1])):
        groups = [launches[layer] for layer in layers]
        moved = [_moved(group) for group in groups]
        times = [sum(x.predicted_us for x in group if x.stream == "main") for group in groups]
        counts = {s: [sum(x.stream == s for x in group) for group in groups] for s in STREAMS}
        yield KindSummary(
            kind,
            tuple(layers),
            _spread([stock.get(layer, 0) for layer in layers]),
            _spread(counts["main"]),
            _spread(counts["aux"]),
            _spread(counts["prefetch"]),
            _spread(moved),
            _spread(times),
            sum(moved),
            sum(times),
        )


def _spread(numbers: Sequence[float]) -> Spread:
    return Spread(min(numbers), max(numbers))


def _moved(launches: Iterable[Launch]) -> int:
    return sum(launch.weight_bytes + launch.state_bytes for launch in launches)


def launch_rows(report: BucketReport, layer: int | None = None) -> list[LaunchRow]:
    """The launches of one layer, or of the whole step, in plan order.

    Raises InputError for a layer that the plan does not have.
    """
    plan = report.plan
    target = get_target(plan.target)
    spans = timeline(plan.launches)
    chosen = {} if report.selection is None else {x.launch: x for x in report.selection.launches}
    if layer is not None:
        require_layer(plan, layer)
    return [
        LaunchRow(
            number=number,
            name=launch.name,
            layer=launch.layer,
            stream=launch.stream,
            ops=launch.ops,
            weight_bytes=launch.weight_bytes,
            state_bytes=launch.state_bytes,
            activation_bytes=launch.activation_bytes,
            start_us=spans[launch.name].start,
            predicted_us=launch.predicted_us,
            bound=bound_of(launch, target),
            exchange=reads_mailbox(launch),
            after=launch.after,
            wait=launch.wait,
            wait_op=launch.ops[launch.wait] if launch.wait < len(launch.ops) else "",
            trigger=launch.trigger,
            operands=_operands(launch),
            kernel=_kernel(report, chosen.get(launch.name)),
            no_kernel=chosen[launch.name].reason if launch.name in chosen else "",
        )
        for number, launch in enumerate(plan.launches)
        if layer is None or launch.layer == layer
    ]


def _kernel(report: BucketReport, chosen: LaunchKernel | None) -> KernelView | None:
    if chosen is None or not chosen.kernel:
        return None
    record = report.kernels[chosen.kernel]
    taken = record.resources
    return KernelView(
        name=record.name,
        grid=taken.grid,
        threads=taken.threads,
        cluster=taken.cluster,
        smem=taken.smem,
        scratch=record.scratch,
        registers=record.registers,
        stages=tuple(_stage(stage) for stage in record.stages),
    )


def _stage(stage: KernelStage) -> str:
    where = f"behind barrier {stage.after_barriers}: " if stage.after_barriers else ""
    return f"{where}{' '.join(stage.ops)}{' (by every CTA)' if stage.private else ''}"


def _operands(launch: Launch) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for operand in launch.operands:
        text = f"{operand.mode} %{operand.value}: {operand.type} ({operand.bytes} B)"
        found.setdefault(operand.access, []).append(text)
    return found


def group_refusals(refusals: Iterable[Refusal]) -> list[RefusalGroup]:
    """Refusals with layer numbers taken out, in order of first appearance, and how many each."""
    counts = Counter(
        (r.pass_name, _any_layer(r.site), _any_layer(r.reason), _any_layer(r.value))
        for r in refusals
    )
    return [RefusalGroup(*key, count) for key, count in counts.items()]


def _any_layer(text: str) -> str:
    return re.sub(r"(?<!\w)layers\.\d+", "layers.*", text)


def as_data(record: BucketSummary | LaunchRow | RefusalGroup) -> dict[str, object]:
    """A record as plain data for JSON."""
    return dataclasses.asdict(record)
