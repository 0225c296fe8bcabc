"""From a program to the configuration of one kernel: stages, grid, memory, parameters.

One kernel does a whole launch. Its grid is persistent: stages loop over their items, and between
stages that pass values from CTA to CTA stands a barrier of the grid, so that all CTAs must be
resident, also beside the side streams.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from k3fuse.kernels import rowwise
from k3fuse.kernels.families import Chosen, choose
from k3fuse.kernels.family import NotSupported, StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.spec import Parameter
from k3fuse.kernels.stages import POINTWISE, PUSHES, Stage, cut, normalize, whole_heads
from k3fuse.target import Target

SIDE_SMS = 10
"""SMs left to launches of the side streams by a grid whose CTAs wait for one another."""

PRIVATE_BYTES = 48 * 1024
"""Shared memory for rows that every CTA computes for itself."""

PRIVATE_READS = 300 * 1024
"""Bytes that every CTA may read to do so: 132 CTAs take them from the L2 at 5 TB/s, so 8 us; a
barrier of the grid instead costs 1.5 us and a pass over memory."""

BOARD_BYTES = 1024
ALIGNMENT = 256


@dataclass(frozen=True)
class LaunchConfig:
    """The configuration of one kernel, plain data: picklable, and the key of the kernel cache.

    ctas: grid; cluster: CTAs that share a row (1: none). plans, families: one a stage. scratch:
    (value, offset) of what passes between stages; private: (value, offset in shared memory) of
    what every CTA keeps. askers: the last threads, which ask for the weights of the first level and
    take part in nothing else before its end. stage_smem, stage_scratch: offsets of each stage's
    own memory. debug: spins are bounded and reported.
    """

    program: Program
    stages: tuple[Stage, ...]
    plans: tuple[StagePlan, ...]
    families: tuple[Chosen, ...]
    threads: int
    askers: int
    ctas: int
    cluster: int
    smem: int
    scratch: tuple[tuple[int, int], ...]
    scratch_bytes: int
    private: tuple[tuple[int, int], ...]
    stage_smem: tuple[int, ...]
    stage_scratch: tuple[int, ...]
    peers: tuple[tuple[int, int], ...]
    debug: bool

    board_offset = 0

    @cached_property
    def label(self) -> str:
        """A name that is a C identifier and unique for the configuration."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        ops = list(dict.fromkeys(step.op for step in self.program.steps))
        return "_".join([*ops[:3], digest])

    @property
    def barriers(self) -> int:
        """Grid barriers of a launch."""
        return max((stage.level for stage in self.stages), default=0)

    @property
    def spins(self) -> bool:
        """Whether its CTAs wait for one another, so that all must be resident together."""
        return self.barriers > 0

    @property
    def polls(self) -> bool:
        """Whether it waits for peers. What it waits for was sent by launches before, so that its
        CTAs may come and go one by one."""
        return any(v.place == "mailbox" for v in self.program.values)

    @cached_property
    def rings(self) -> tuple[int, ...]:
        """Values that live in mailboxes: the own one, or the peers'."""
        return tuple(i for i, v in enumerate(self.program.values) if v.ring is not None)

    @cached_property
    def pushed(self) -> tuple[int, ...]:
        """Values that are sent to peers."""
        return tuple(i for i, v in enumerate(self.program.values) if v.place == "pushed")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Pointers first, then numbers. v<i>: memory of value i; of a pushed value, a table of tp
        addresses, its ring on each rank. use<i>: which use of its ring in the step."""
        found: list[Parameter] = []
        for i, held in enumerate(self.program.values):
            if held.place == "internal" or held.root != i:
                continue
            access = "mailbox" if held.place == "pushed" else held.place
            found.append(Parameter(f"v{i}", "u64", access))
        if self.scratch_bytes:
            found.append(Parameter("scratch", "u64", "activation"))
        if self.barriers:
            found.append(Parameter("control", "u64", "activation"))
        if self.rings:
            found.append(Parameter("step", "u64", "host"))
        if self.debug and self.polls:
            found.append(Parameter("errors", "u64", "activation"))
        if self.program.tp > 1:
            found.append(Parameter("rank", "i32", "host"))
        found += [Parameter(f"use{i}", "i32", "host") for i in self.rings]
        if self.debug and self.polls:
            found.append(Parameter("launch", "i32", "host"))
        return tuple(found)

    @cached_property
    def _scratch(self) -> dict[int, int]:
        return dict(self.scratch)

    def scratch_offset(self, value: int) -> int | None:
        """Offset of a value that only passes between stages; None for other values."""
        return self._scratch.get(value)

    def private_offset(self, value: int) -> int | None:
        """Offset in shared memory of a value that every CTA keeps; None for other values."""
        return dict(self.private).get(value)

    def peers_offset(self, value: int) -> int:
        """Offset in shared memory of the peers' stages of a pushed value."""
        return dict(self.peers)[value]

    def in_memory(self, value: int) -> bool:
        """Whether a result must be stored in memory of the rank."""
        held = self.program.values[value]
        return value in self._scratch or value in self.program.written or held.place == "state"


def configure(program: Program, target: Target, *, debug: bool = False) -> LaunchConfig:
    """The kernel of a program. Raises NotSupported with the reason when no family does it."""
    require(target.pdl, f"{target.name} has no programmatic dependent launch")
    _check_rings(program)
    program = normalize(program)
    for step in program.steps:
        require(
            step.op not in PUSHES or step.attribute("dim", 1) == 1,
            f"{step.op} along dimension {step.attribute('dim')}: rows travel by columns",
        )
    stages = cut(program, private_limit=PRIVATE_BYTES, private_reads=PRIVATE_READS)
    fewer = cut(program, private_limit=0, private_reads=PRIVATE_READS)
    # Whole heads are for few requests; rows that every CTA keeps may not fit beside the rest.
    for choice in dict.fromkeys([whole_heads(program, stages), stages]):
        try:
            return _configure(program, target, choice, debug)
        except NotSupported:
            continue
    return _configure(program, target, fewer, debug)


def _configure(
    program: Program, target: Target, stages: tuple[Stage, ...], debug: bool
) -> LaunchConfig:
    chosen = [choose(program, stage, target) for stage in stages]
    plans = [plan for _, plan in chosen]
    for stage, plan in zip(stages, plans, strict=True):
        require(plan.near or not _takes_near(program, stages, stage), "operands are not in memory")
    askers = _askers(stages, plans)
    threads = askers + max(plan.threads - (plan.askers if askers else 0) for plan in plans)
    levels = max(stage.level for stage in stages)
    most = target.sm_count - (SIDE_SMS if levels else 0)
    shared = [p.items for p, s in zip(plans, stages, strict=True) if not s.private]
    cluster, ctas = 1, max(1, min(most, max(shared, default=1)))
    if len(stages) == 1 and stages[0].kind == "row":
        cluster = rowwise.cluster_of(program, stages[0], most)
        threads = rowwise.threads_of(program, stages[0], cluster)
        ctas = cluster * min(most // cluster, plans[0].items)
    elif not levels and (askers or len(stages) == 1):
        # Beside launches of the side streams no pairs of SMs may be free.
        cluster = max(plan.cluster for plan in plans)
        ctas = _aligned(ctas, cluster)
    made = _made_in(program, stages)
    private = _private_values(program, stages)
    at = BOARD_BYTES
    peers: list[tuple[int, int]] = []
    for i, held in enumerate(program.values):
        if held.place == "pushed":
            peers.append((i, at))
            at = _aligned(at + 8 * program.tp, 16)
    kept: list[tuple[int, int]] = []
    for value in private:
        at = _aligned(at, 128)
        kept.append((value, at))
        at += program.values[value].bytes
    stage_smem: list[int] = []
    base = _aligned(at, 128)
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True)):
        through = all(b.level < stage.level or b.private for b in stages[:number])
        place = _aligned(at, 128)
        if plan.smem and plan.late and through:
            place = max(base, _aligned(at - (plan.smem - plan.early), 128))
        stage_smem.append(place)
        at = max(at, place + plan.smem)
    require(
        at <= target.smem_per_block,
        f"needs {at} bytes of shared memory, {target.name} has {target.smem_per_block}",
    )
    scratch, size = _scratch(program, stages, made, private)
    stage_scratch: list[int] = []
    for plan in plans:
        stage_scratch.append(size)
        size = _aligned(size + plan.scratch, ALIGNMENT)
    return LaunchConfig(
        program=program,
        stages=stages,
        plans=tuple(plans),
        families=tuple(family for family, _ in chosen),
        threads=threads,
        askers=askers,
        ctas=ctas,
        cluster=cluster,
        smem=at,
        scratch=scratch,
        scratch_bytes=size,
        private=tuple(kept),
        stage_smem=tuple(stage_smem),
        stage_scratch=tuple(stage_scratch),
        peers=tuple(peers),
        debug=debug,
    )


def _askers(stages: tuple[Stage, ...], plans: list[StagePlan]) -> int:
    """Threads that ask for weights alone: where the first level is one stage that has such, and
    private rows before it, which are not held up by them then."""
    first = [(s, p) for s, p in zip(stages, plans, strict=True) if s.level == 0]
    found = [plan.askers for stage, plan in first if not stage.private]
    return found[0] if len(found) == 1 else 0


def supports(program: Program, target: Target) -> str | None:
    """None, or why no kernel does the program."""
    try:
        configure(program, target)
    except NotSupported as reason:
        return str(reason)
    return None


def inlined(config: LaunchConfig, number: int) -> frozenset[int]:
    """Values that a stage evaluates where it reads them: its own elementwise steps, and those of
    no stage."""
    program = config.program
    others = {i for n, s in enumerate(config.stages) if n != number for i in s.steps}
    return frozenset(
        step.results[0]
        for i, step in enumerate(program.steps)
        if step.op in POINTWISE and i not in others
    )


def _check_rings(program: Program) -> None:
    """A ring that is read and filled by one launch could be re-armed after a peer's next use."""
    read = {v.ring.channel for v in program.values if v.place == "mailbox" and v.ring}
    sent = {v.ring.channel for v in program.values if v.place == "pushed" and v.ring}
    require(not read & sent, "one launch reads and fills the same mailbox ring")


def _made_in(program: Program, stages: tuple[Stage, ...]) -> dict[int, int]:
    """Value -> the first stage that makes it."""
    found: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for i in stage.steps:
            for result in program.steps[i].results:
                found.setdefault(result, number)
    return found


def _private_values(program: Program, stages: tuple[Stage, ...]) -> list[int]:
    found: list[int] = []
    for stage in stages:
        if stage.private:
            steps = [program.steps[i] for i in stage.steps]
            found += steps[-1].results
    return found


def _takes_near(program: Program, stages: tuple[Stage, ...], stage: Stage) -> bool:
    """Whether experts take routes of their own CTA, or tokens from the mailbox."""
    if stage.kind not in ("experts_up", "experts_down"):
        return False
    taken = program.steps[stage.steps[0]].operands
    placed = {i for s in stages for i in s.steps if not (s.kind == "route" and s.private)}
    return any(set(s.results) & set(taken) for i, s in enumerate(program.steps) if i not in placed)


def _scratch(
    program: Program, stages: tuple[Stage, ...], made: dict[int, int], private: list[int]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Offsets of internal values that another stage reads, and the bytes of all."""
    at = 0
    found: list[tuple[int, int]] = []
    for number, stage in enumerate(stages):
        for i in stage.steps:
            if program.steps[i].op in PUSHES:
                continue
            for value in program.steps[i].results:
                if program.values[value].place != "internal" or made[value] != number:
                    continue
                if value in private or not _read_elsewhere(program, stages, value, number):
                    continue
                if value not in dict(found):
                    found.append((value, at))
                    at = _aligned(at + program.values[value].bytes, ALIGNMENT)
    return tuple(found), at


def _read_elsewhere(program: Program, stages: tuple[Stage, ...], value: int, number: int) -> bool:
    placed = {i: n for n, stage in enumerate(stages) for i in stage.steps}
    double = {i for i in placed if sum(i in stage.steps for stage in stages) > 1}
    for i, step in enumerate(program.steps):
        reads = value in step.operands and step.op not in PUSHES
        if reads and (i not in placed or placed[i] != number or i in double):
            return True
    return False


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def describe(config: LaunchConfig) -> dict[str, Any]:
    """What was chosen, for people: stages with their ops, barriers, memory."""
    return {
        "kernel": config.label,
        "stages": [
            {
                "kind": stage.kind,
                "family": family.name,
                "refused": [f"{name}: {reason}" for name, reason in family.refusals],
                "ops": [config.program.steps[i].op for i in stage.steps],
                "after_barriers": stage.level,
                "private": stage.private,
            }
            for stage, family in zip(config.stages, config.families, strict=True)
        ],
        "grid": config.ctas,
        "threads": config.threads,
        "cluster": config.cluster,
        "smem": config.smem,
        "scratch": config.scratch_bytes,
    }
