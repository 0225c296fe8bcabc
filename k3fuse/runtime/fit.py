"""What a machine can do, and whether it can run a bundle: facts in, reasons and fixes out.

Pure logic on `runtime.machine`'s facts, so that every answer can be had without the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3fuse.runtime.bundle import Bundle
from k3fuse.runtime.machine import Gpu, Machine
from k3fuse.runtime.selection import CONTROL_BYTES
from k3fuse.target import LEAST_SMS, TARGETS, Target, get_target

SM_STEP = 8
"""SMs by which CUDA gives out parts of a GPU, on Hopper and later."""

_GPU_EXTRA = "cuda-python is not installed: pip install 'k3fuse[gpu]'"
_COMPILE_EXTRA = "nvidia-cutlass-dsl is not installed: pip install 'k3fuse[compile]'"


@dataclass(frozen=True)
class Answer:
    """Whether something can be done; missing: everything that is in the way, each with its fix."""

    name: str
    missing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Need:
    """Bytes of one rank for all buckets of a bundle together, without the CUDA context.

    Buckets share weights, state, arena and scratch; each has mailboxes of its own.
    """

    weights: int
    state: int
    arena: int
    mailboxes: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.arena + self.mailboxes + self.scratch


@dataclass(frozen=True)
class Demand:
    """What a bundle asks of a machine. unready: what is missing in the bundle or at its
    checkpoint for any run; kernels: what of its kernels is missing."""

    tp: int
    target: Target
    need: Need
    unready: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


def demand(bundle: Bundle) -> Demand:
    """Read it from the plans and selections of a bundle."""
    plans = [bundle.plan(bucket) for bucket in bundle.buckets]
    selections = [s for bucket in bundle.buckets if (s := bundle.selection(bucket)) is not None]
    weights = {weight.value: weight.bytes for plan in plans for weight in plan.weights}
    states = {state.name: state.bytes for plan in plans for state in plan.states}
    scratch = [sum(size for _, size in s.memory.scratch) for s in selections]
    control = [CONTROL_BYTES * s.memory.control_words for s in selections]
    return Demand(
        tp=bundle.manifest.tp,
        target=get_target(bundle.manifest.target),
        need=Need(
            weights=sum(weights.values()),
            state=sum(states.values()),
            arena=max((plan.memory.arena for plan in plans), default=0),
            mailboxes=sum(plan.memory.mailboxes for plan in plans),
            scratch=max(scratch, default=0) + sum(control),
        ),
        unready=tuple(_unready(bundle)),
        kernels=tuple(_kernels(bundle, sum(len(s.without) for s in selections))),
    )


def _unready(bundle: Bundle) -> Iterator[str]:
    checkpoint = bundle.manifest.checkpoint
    if checkpoint is None:
        yield "the bundle was compiled without weights: give run a --checkpoint"
    elif not Path(checkpoint.path).is_dir():
        yield f"the checkpoint {checkpoint.path} is not there: give run a --checkpoint"


def _kernels(bundle: Bundle, without: int) -> Iterator[str]:
    if not bundle.has_kernels:
        yield "the bundle has no kernels: compile again without --no-kernels"
    elif without:
        yield f"{without} launches have no kernel: k3fuse compile says which, and why"


def abilities(machine: Machine) -> list[Answer]:
    """What can be done here with any bundle."""
    return [
        Answer("compile plans"),
        Answer("run on the reference executor"),
        Answer("compile kernels", () if machine.cutlass else (_COMPILE_EXTRA,)),
        Answer("launch kernels", (*_launching(machine), *_known(machine))),
        Answer("several ranks over NVLink", tuple(_pair(machine))),
    ]


def ways(machine: Machine, wants: Demand) -> list[Answer]:
    """The ways to run a bundle, the fastest first."""
    fitting, unfit = _fitting(machine, wants)
    launching = (*wants.unready, *wants.kernels, *_launching(machine))
    ranks = fitting[: wants.tp]
    several = unfit if len(fitting) < wants.tp else ()
    largest = sorted(fitting, key=lambda gpu: -gpu.free)[:1]
    one = () if fitting else unfit
    return [
        Answer(
            f"one process a GPU, {wants.tp} GPUs",
            (*launching, *several, *_several(machine, ranks, wants.tp), *_memory(ranks, wants, 1)),
        ),
        Answer(
            f"{wants.tp} virtual ranks on one GPU, for tests",
            (*launching, *one, *_shared(largest, wants), *_memory(largest, wants, wants.tp)),
        ),
        Answer(
            f"loopback: one rank of {wants.tp}, for times, with wrong tokens",
            (*launching, *one, *_memory(largest, wants, 1)),
        ),
        Answer("reference executor on the CPU", wants.unready),
    ]


def stands_for(gpu: Gpu) -> Target | None:
    """The row of this GPU: by its architecture, and among those by its name; None: no row."""
    rows = [row for row in TARGETS.values() if row.arch == gpu.arch]
    name = gpu.name.lower().replace(" ", "-")
    named = [row for row in rows if f"-{row.name}" in f"-{name}"]
    return max(named or rows[:1], key=lambda row: len(row.name), default=None)


def _launching(machine: Machine) -> Iterator[str]:
    if not machine.gpus:
        yield machine.no_gpu
    if not machine.cuda_python:
        yield _GPU_EXTRA
    for gpu in machine.gpus:
        if gpu.trouble:
            yield f"GPU {gpu.index} cannot be used ({gpu.trouble}): nvidia-smi -q -i {gpu.index}"


def _known(machine: Machine) -> Iterator[str]:
    if machine.gpus and not any(stands_for(gpu) for gpu in machine.gpus):
        found = ", ".join(dict.fromkeys(gpu.arch for gpu in machine.gpus))
        known = ", ".join(dict.fromkeys(row.arch for row in TARGETS.values()))
        yield f"no target has the architecture {found}: kernels are made for {known}"


def _pair(machine: Machine) -> Iterator[str]:
    if not machine.gpus:
        yield machine.no_gpu
    yield from _several(machine, machine.gpus, max(2, len(machine.gpus)))


def _several(machine: Machine, gpus: Sequence[Gpu], count: int) -> Iterator[str]:
    """What keeps `count` ranks from running on these GPUs; nothing is said of no GPUs at all."""
    if not gpus or count == 1:
        return
    if len(gpus) < count:
        yield f"{len(gpus)} of {count} GPUs are here: {_more(len(gpus), count)}"
    if not machine.symmetric_memory:
        yield "torch has no symmetric memory: pip install 'torch>=2.11', a CUDA build"
    indices = [gpu.index for gpu in gpus]
    apart = [f"{i}-{j}" for i in indices for j in indices if not machine.peers[i][j]]
    if apart:
        yield (
            f"GPUs cannot reach each other's memory ({', '.join(apart)}): nvidia-smi topo -p2p r "
            "says why"
        )


def _more(have: int, count: int) -> str:
    if count % have == 0:
        return (
            f"torchrun --nnodes {count // have} --nproc-per-node {have}, on machines that share "
            "NVLink, or compile with a smaller --tp"
        )
    return "compile with a smaller --tp"


def _fitting(machine: Machine, wants: Demand) -> tuple[list[Gpu], tuple[str, ...]]:
    """GPUs that run the bundle's kernels, and why the others do not."""
    target = wants.target
    fitting: list[Gpu] = []
    reasons: list[str] = []
    for gpu in machine.gpus:
        row = stands_for(gpu)
        other = "" if row is None else f": compile with --target {row.name}"
        where = f"GPU {gpu.index} ({gpu.name})"
        if gpu.arch != target.arch:
            reasons.append(f"{where} is {gpu.arch}, the bundle's kernels are {target.arch}{other}")
        elif gpu.sm_count < target.sm_count:
            reasons.append(
                f"{where} has {gpu.sm_count} SMs, {target.name} has {target.sm_count}: CTAs that "
                "wait for each other would not all run: use a whole GPU of its kind"
            )
        elif gpu.smem_per_block < target.smem_per_block:
            reasons.append(
                f"{where} gives a CTA {gpu.smem_per_block} bytes of shared memory, {target.name} "
                f"{target.smem_per_block}: use a GPU of its kind"
            )
        elif not gpu.trouble:
            fitting.append(gpu)
    return fitting, tuple(reasons)


def _shared(gpus: Sequence[Gpu], wants: Demand) -> Iterator[str]:
    """What keeps all ranks from having SMs of their own on one of these GPUs."""
    each = wants.target.sm_count
    for gpu in gpus:
        if gpu.sm_count < each * wants.tp:
            most = gpu.sm_count // wants.tp // SM_STEP * SM_STEP
            row = stands_for(gpu)
            name = wants.target.arch if row is None else row.name
            fix = f"compile with --target {name}:{most}" if most >= LEAST_SMS else "use fewer ranks"
            have = f"GPU {gpu.index} has {gpu.sm_count}"
            yield f"{wants.tp} ranks take {each} SMs each, {have}: {fix}"


def _memory(gpus: Sequence[Gpu], wants: Demand, ranks: int) -> Iterator[str]:
    need = wants.need.total * ranks
    for gpu in gpus:
        if gpu.free < need:
            yield (
                f"GPU {gpu.index} has {gpu.free / 1e9:.2f} GB free of {gpu.total / 1e9:.2f}, "
                f"{need / 1e9:.2f} GB are needed: end what else runs there, or compile with a "
                "larger --tp, a smaller --batch or --max-context"
            )
