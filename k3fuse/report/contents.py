"""What the views show: one bucket of a bundle, with the text after every pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from k3fuse.errors import InputError
from k3fuse.passes.base import Refusal
from k3fuse.passes.instruments import diff_lines
from k3fuse.report.layers import layer_lines
from k3fuse.runtime.bundle import Bucket, Bundle
from k3fuse.runtime.plan import Plan
from k3fuse.runtime.selection import KernelRecord, Selection


@dataclass(frozen=True)
class BucketReport:
    """One bucket: its plan, the IR after each pass in order, and what the passes refused.

    name: "step_b8_q1". kind: step, verify or commit. dumps: file stem of a dump
    ("003_absorb-mla") -> text, in pipeline order. floor_us: time that the step's least bytes
    take on all GPUs of the group at their nominal bandwidth; None when no configuration tells.
    selection, kernels (by name): None and empty without kernels.
    """

    name: str
    kind: str
    plan: Plan
    plan_hash: str
    dumps: Mapping[str, str]
    refusals: tuple[Refusal, ...]
    floor_us: float | None = None
    selection: Selection | None = None
    kernels: Mapping[str, KernelRecord] = field(default_factory=dict[str, KernelRecord])

    @property
    def passes(self) -> list[str]:
        """Names of the dumps in order: "trace", then every pass."""
        return [pass_of(file) for file in self.dumps]

    def pass_index(self, wanted: str) -> int:
        """Position of a pass given by number or name; InputError lists what there is."""
        names = self.passes
        if wanted in names:
            return names.index(wanted)
        if wanted.isdecimal() and int(wanted) < len(names):
            return int(wanted)
        if not names:
            raise InputError(f"--pass {wanted}: bucket {self.name} holds no IR dumps")
        known = ", ".join(f"{i} {name}" for i, name in enumerate(names))
        raise InputError(f"--pass {wanted}: bucket {self.name} has no such pass; it has {known}")

    def text_after(self, index: int, layer: int | None = None) -> str:
        """IR after the pass at `index`: all of it, or what belongs to one layer."""
        text = list(self.dumps.values())[index]
        return text if layer is None else "".join(f"{line}\n" for line in layer_lines(text, layer))

    def pass_diff(self, index: int, layer: int | None = None) -> list[str]:
        """Unified diff of the IR after a pass against the one before it; empty for the first."""
        if index == 0:
            return []
        names = self.passes
        return diff_lines(
            self.text_after(index - 1, layer),
            self.text_after(index, layer),
            names[index - 1],
            names[index],
        )


def pass_of(stem: str) -> str:
    """The pass a dump was made after: "003_absorb-mla" -> "absorb-mla"."""
    return stem.partition("_")[2].removesuffix(".ir")


def kind_of(bucket: Bucket) -> str:
    """What a bucket does: step, verify (a step of several rows a request) or commit."""
    return "verify" if bucket.kind == "step" and bucket.rows_per_request > 1 else bucket.kind


def report_of(bundle: Bundle, bucket: Bucket, floor_us: float | None = None) -> BucketReport:
    """What a bundle says of one of its buckets; InputError when a file of it is bad."""
    plan, kernels = bundle.plan(bucket), bundle.kernels()
    return BucketReport(
        name=bucket.name,
        kind=kind_of(bucket),
        plan=plan,
        plan_hash=plan.hash(),
        dumps=dict(bundle.dumps(bucket)),
        refusals=tuple(
            Refusal(r.pass_name, r.site, r.reason, r.value)
            for r in bundle.manifest.refusals
            if r.bucket == bucket.name
        ),
        floor_us=floor_us,
        selection=bundle.selection(bucket),
        kernels={} if kernels is None else kernels.by_name(),
    )
