"""Selected kernels -> cubins with their launch facts, each one's PTX audited.

Cubins come from the cache of `kernels.build`, and so do the answers of the audit: both are kept by
the contents of what they depend on.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k3fuse.errors import ParseError
from k3fuse.kernels.build import Request, build, cache_folder, dsl_version
from k3fuse.kernels.launch import LaunchConfig, describe
from k3fuse.kernels.spec import CompiledKernel
from k3fuse.lowering.select import Kernels
from k3fuse.runtime.selection import (
    KernelManifest,
    KernelParameter,
    KernelRecord,
    KernelStage,
)
from k3fuse.schedule import audit
from k3fuse.schedule.ptx_origins import KernelOperand

REGISTERS = 65536
"""32-bit registers of an SM, and the most that a CTA can have; given to warps 256 at a time."""

ALONE = 24
"""Kernels that are audited faster here than by processes that have yet to start."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuiltKernels:
    """compiled: how many the cache did not hold. findings: of the audit, in words."""

    manifest: KernelManifest
    cubins: dict[str, bytes]
    compiled: int
    seconds: float
    findings: tuple[str, ...]

    @property
    def distinct(self) -> int:
        return len(self.manifest.kernels)


def build_kernels(
    kernels: Kernels,
    *,
    folder: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> BuiltKernels:
    """Compile and audit the kernels of a compilation. progress(what, done, total) is called as
    they come."""
    begin = time.perf_counter()
    configs = [kernels.configs[name] for name in sorted(kernels.configs)]
    requests = [Request(config, kernels.target.arch) for config in configs]
    made = build(requests, folder=folder, workers=workers, progress=progress)
    audited = audit_all(made.kernels, folder=folder, workers=workers)
    pairs = list(zip(configs, made.kernels, strict=True))
    return BuiltKernels(
        manifest=KernelManifest(
            compiler=dsl_version(),
            kernels=tuple(
                _record(config, kernel, not found)
                for (config, kernel), found in zip(pairs, audited, strict=True)
            ),
        ),
        cubins={_file(kernel): kernel.cubin for kernel in made.kernels},
        compiled=made.compiled,
        seconds=time.perf_counter() - begin,
        findings=tuple(text for found in audited for text in found),
    )


def _file(kernel: CompiledKernel) -> str:
    return f"{kernel.name}.cubin"


def _record(config: LaunchConfig, kernel: CompiledKernel, audited: bool) -> KernelRecord:
    return KernelRecord(
        name=kernel.name,
        arch=kernel.arch,
        symbol=kernel.symbol,
        cubin=_file(kernel),
        sha256=hashlib.sha256(kernel.cubin).hexdigest(),
        params=tuple(KernelParameter(p.name, p.kind, p.access) for p in kernel.params),
        grid=kernel.grid,
        block=kernel.block,
        cluster=kernel.cluster,
        smem=kernel.smem,
        pdl=kernel.pdl,
        registers=kernel.registers,
        stack=kernel.stack,
        code=kernel.code,
        scratch=config.scratch_bytes,
        barriers=config.barriers,
        spins=config.spins,
        stages=tuple(
            KernelStage(
                kind=s["kind"],
                family=s["family"],
                refused=tuple(s["refused"]),
                ops=tuple(s["ops"]),
                after_barriers=s["after_barriers"],
                private=s["private"],
            )
            for s in describe(config)["stages"]
        ),
        audited=audited,
    )


def audit_all(
    kernels: Sequence[CompiledKernel], *, folder: Path | None = None, workers: int | None = None
) -> list[tuple[str, ...]]:
    """The findings on each kernel, in words; empty for one that is sound."""
    folder = cache_folder() if folder is None else folder
    places = [folder / f"{_key(kernel)}.audit.json" for kernel in kernels]
    known = {place: found for place in places if (found := _load(place)) is not None}
    missing = {p: k for p, k in zip(places, kernels, strict=True) if p not in known}
    for place, found in zip(missing, _run(list(missing.values()), workers), strict=True):
        known[place] = found
        _save(place, found)
    return [known[place] for place in places]


def _run(kernels: list[CompiledKernel], workers: int | None) -> list[tuple[str, ...]]:
    if len(kernels) <= ALONE:
        return [audit_one(kernel) for kernel in kernels]
    context = multiprocessing.get_context("spawn")
    processes = min(workers or os.cpu_count() or 1, len(kernels) // ALONE + 1)
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(audit_one, kernels, chunksize=8))


def audit_one(kernel: CompiledKernel) -> tuple[str, ...]:
    """What is wrong with a compiled kernel, or not proven of it; empty when it is sound."""
    operands = [KernelOperand(p.name, p.access, i) for i, p in enumerate(kernel.params)]
    found: list[str] = []
    warps = -(-kernel.block[0] // 32)
    needs = warps * -(-kernel.registers * 32 // 256) * 256
    if needs > REGISTERS:
        found.append(
            f"registers: {kernel.name}: {kernel.block[0]} threads need {needs}, {REGISTERS} fit"
        )
    try:
        findings = audit.audit_kernel(
            kernel.ptx,
            kernel.symbol,
            operands,
            pdl=kernel.pdl,
            declared_smem=kernel.smem,
            dynamic_smem=kernel.smem,
            trigger=True,
        )
    except ParseError as error:
        return (*found, f"not proven: {kernel.name}: {error}")
    return (*found, *map(str, findings))


@cache
def _audit_hash() -> str:
    """SHA-256 over the files of the audit."""
    folder = Path(audit.__file__).parent
    files = [folder / "audit.py", *sorted(folder.glob("ptx*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _key(kernel: CompiledKernel) -> str:
    """What the answer depends on."""
    facts = {**kernel.launch_facts(), "audit": _audit_hash()}
    text = json.dumps(facts, sort_keys=True) + kernel.ptx
    return hashlib.sha256(text.encode()).hexdigest()


def _load(path: Path) -> tuple[str, ...] | None:
    try:
        return tuple(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _save(path: Path, found: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(found, file)
    os.replace(file.name, path)
