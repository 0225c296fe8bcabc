"""Co-residency: launches whose CTAs wait for one another must all be on the GPU at once.

A launch that spins needs an SM for each of its CTAs (or fewer, if its launch bounds let several
share one) beside whatever may hold SMs at that time: every launch that no chain of edges puts
before or after it. PDL neighbours take nothing from each other: a launch starts by PDL only when
every CTA of the one before has triggered, so all of those are resident already and will finish.
What runs beside is placed in the worst way: one SM a CTA, each in another cluster's place.

A launch that only waits for peers need not be resident as a whole while exchanges come in turn: all
launches that publish or poll follow one another, each use published before the launch that polls
it. Then whatever it waits for is done by launches that need nothing of it (docs/proofs.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3fuse.schedule.finding import Finding
from k3fuse.schedule.model import Schedule, ScheduledLaunch
from k3fuse.target import Target, get_target

MAX_THREADS_PER_CTA = 1024
MAX_CLUSTER = 16
"""CTAs; more than 8 need a non-portable launch attribute."""
RESERVED_SMEM_PER_CTA = 1024
"""Bytes that the system takes of an SM's shared memory for each resident CTA (CUDA guide)."""

_KIB = 1024


@dataclass
class Residency:
    """`checked`: launches whose resources were held against the target."""

    findings: list[Finding] = field(default_factory=list[Finding])
    not_proven: list[str] = field(default_factory=list[str])
    no_resources: list[str] = field(default_factory=list[str])
    assumptions: list[str] = field(default_factory=list[str])
    checked: int = 0


def prove_residency(schedule: Schedule) -> Residency:
    """Hold every launch's resources against the target; raises InputError if that is not known.

    Launches without a grid have no kernel yet: they are listed, not judged.
    """
    result = Residency()
    known = [launch for launch in schedule.launches if launch.grid > 0]
    result.no_resources = [launch.name for launch in schedule.launches if launch.grid <= 0]
    if not schedule.target:
        if known:
            result.not_proven.append("co-residency: the schedule names no target")
        return result
    target = get_target(schedule.target)
    overlaps = _Overlaps(schedule)
    spinning = {launch.name for launch in known if launch.spins}
    if not overlaps.exchanges_in_turn():
        spinning |= {launch.name for launch in known if _kinds(launch) & {"poll"}}
    for launch in known:
        result.checked += 1
        result.findings += _alone(launch, target)
        if launch.name not in spinning:
            continue
        beside = overlaps.beside(launch)
        unknown = [f"@{other.name}" for other in beside if other.grid <= 0]
        if unknown:
            result.not_proven.append(
                f"co-residency: @{launch.name} spins beside {', '.join(unknown)}, which have no "
                "grid yet"
            )
        result.findings += _together(launch, overlaps.at_once(beside), target)
    if any(launch.cluster > 2 and launch.name in spinning for launch in known):
        result.assumptions.append(
            "clusters of more than two CTAs find whole places on all SMs that are free"
        )
    return result


def largest_grid(launch: ScheduledLaunch, held: int, target: Target) -> int:
    """CTAs of a launch that are sure to be resident together while `held` SMs are taken."""
    places = target.sm_count // launch.cluster  # a cluster of two takes the two SMs of one TPC
    return max(places - held, 0) * launch.cluster * launch.ctas_per_sm


def _alone(launch: ScheduledLaunch, target: Target) -> Iterator[Finding]:
    """What a launch asks for by itself."""
    total = sum(size for _, size in launch.smem_parts)
    if launch.smem_parts and total != launch.smem:
        parts = " + ".join(f"{name} {size}" for name, size in launch.smem_parts)
        yield Finding(
            "shared memory",
            f"@{launch.name} asks for {launch.smem} bytes, its parts need {total} ({parts})",
        )
    if launch.smem > target.smem_per_block:
        yield Finding(
            "shared memory",
            f"@{launch.name} on {target.name}: needs {_kib(launch.smem)} KB, has "
            f"{_kib(target.smem_per_block)}",
        )
    if launch.threads > MAX_THREADS_PER_CTA:
        yield Finding(
            "threads", f"@{launch.name}: {launch.threads} threads a CTA, {MAX_THREADS_PER_CTA} fit"
        )
    shared = (launch.smem + RESERVED_SMEM_PER_CTA) * launch.ctas_per_sm
    if launch.ctas_per_sm > 1 and shared > target.smem_per_sm:
        yield Finding(
            "shared memory",
            f"@{launch.name} on {target.name}: {launch.ctas_per_sm} CTAs an SM need "
            f"{_kib(shared)} KB, has {_kib(target.smem_per_sm)}",
        )
    if launch.threads * launch.ctas_per_sm > target.threads_per_sm:
        yield Finding(
            "threads",
            f"@{launch.name} on {target.name}: {launch.ctas_per_sm} CTAs an SM need "
            f"{launch.threads * launch.ctas_per_sm} threads, has {target.threads_per_sm}",
        )
    if launch.cluster > MAX_CLUSTER:
        yield Finding("cluster", f"@{launch.name}: clusters of {launch.cluster}, {MAX_CLUSTER} fit")
    if launch.grid % launch.cluster:
        yield Finding(
            "cluster",
            f"@{launch.name}: grid {launch.grid} is not a multiple of its cluster {launch.cluster}",
        )


def _together(
    launch: ScheduledLaunch, beside: list[ScheduledLaunch], target: Target
) -> Iterator[Finding]:
    """Whether a spinning launch finds room beside the others."""
    held = min(sum(other.grid for other in beside), target.sm_count)
    fits = largest_grid(launch, held, target)
    if launch.grid <= fits:
        return
    needs = -(-launch.grid // launch.ctas_per_sm)
    holders = ", ".join(f"@{other.name} holds {other.grid}" for other in beside if other.grid)
    yield Finding(
        "co-residency",
        f"@{launch.name} spins and needs {needs} SMs for its grid of {launch.grid}, has "
        f"{target.sm_count - held} of {target.sm_count} on {target.name}"
        + (f" ({holders})" if holders else "")
        + f": the largest grid that fits is {fits}"
        + (f" in clusters of {launch.cluster}" if launch.cluster > 1 else ""),
    )


class _Overlaps:
    """Which launches may run at the same time, by chains of edges of any kind."""

    def __init__(self, schedule: Schedule) -> None:
        self.launches = schedule.launches
        self.index = {launch.name: i for i, launch in enumerate(schedule.launches)}
        self.before: list[int] = []  # bit sets of launches that come earlier for sure
        for launch in schedule.launches:
            found = 0
            for edge in launch.after:
                source = self.index.get(edge.source, len(self.before))
                if source < len(self.before):  # anything else is a finding of the order
                    found |= self.before[source] | 1 << source
            self.before.append(found)

    def beside(self, launch: ScheduledLaunch) -> list[ScheduledLaunch]:
        """Launches that no chain of edges puts before or after this one."""
        mine = self.index[launch.name]
        others = range(len(self.launches))
        return [self.launches[i] for i in others if i != mine and not self._ordered(i, mine)]

    def exchanges_in_turn(self) -> bool:
        """Whether launches that publish or poll follow one another, publishers first."""
        sent: set[tuple[str, int]] = set()
        last: int | None = None
        for index, launch in enumerate(self.launches):
            if not _kinds(launch) & {"publish", "poll"}:
                continue
            if last is not None and not self.before[index] >> last & 1:
                return False
            polled = {(a.target, a.use) for a in launch.program if a.kind == "poll"}
            if not polled <= sent:
                return False
            sent |= {(a.target, a.use) for a in launch.program if a.kind == "publish"}
            last = index
        return True

    def at_once(self, launches: list[ScheduledLaunch]) -> list[ScheduledLaunch]:
        """The most of them that can hold SMs together: of those that follow one another, the
        largest."""
        chains: list[list[ScheduledLaunch]] = []
        for launch in launches:
            mine = self.index[launch.name]
            chain = next((c for c in chains if self._ordered(self.index[c[-1].name], mine)), None)
            if chain is None:
                chains.append([launch])
            else:
                chain.append(launch)
        return [max(chain, key=lambda launch: launch.grid) for chain in chains]

    def _ordered(self, a: int, b: int) -> bool:
        return bool(self.before[a] >> b & 1 or self.before[b] >> a & 1)


def _kinds(launch: ScheduledLaunch) -> set[str]:
    return {action.kind for action in launch.program}


def _kib(size: int) -> str:
    """Rounded up, so that a byte too much shows."""
    return f"{-(-size * 10 // _KIB) / 10:.1f}".removesuffix(".0")
