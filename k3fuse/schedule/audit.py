"""Audit of compiled kernels: what the PTX of a launch does against what the schedule says of it.

Works from the PTX text and the operand table alone. A compiler may move, drop or guard what the
source says, so the order of loads and the PDL wait is checked on what it printed. PTX may still be
reordered when it is assembled (a `.nc` load can sink below the wait, which is safe).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3fuse.schedule.finding import Finding
from k3fuse.schedule.ptx import Instruction, Kernel, Parameter, read_kernel
from k3fuse.schedule.ptx_access import MemoryAccess, access_of
from k3fuse.schedule.ptx_conditions import Conditions
from k3fuse.schedule.ptx_flags import SENTINELS, flag_findings
from k3fuse.schedule.ptx_origins import KernelOperand, OriginMap
from k3fuse.schedule.ptx_paths import TRIGGER, WAIT, Reached, explore


@dataclass(frozen=True)
class PdlUse:
    """Lines of the PDL instructions that some thread reaches."""

    waits: tuple[int, ...]
    triggers: tuple[int, ...]


def pdl_use(ptx: str, entry: str) -> PdlUse:
    """Where a kernel waits and triggers; ParseError when the PTX is not understood."""
    kernel = read_kernel(ptx, entry)
    reached = explore(kernel, Conditions(kernel), pass_waits=True)
    lines = {
        name: tuple(sorted(i.line for i in reached.branches if i.opcode == name))
        for name in (WAIT, TRIGGER)
    }
    return PdlUse(lines[WAIT], lines[TRIGGER])


def audit_kernel(
    ptx: str,
    entry: str,
    operands: Sequence[KernelOperand],
    *,
    pdl: bool,
    declared_smem: int,
    dynamic_smem: int = 0,
    trigger: bool | None = None,
    sentinels: Sequence[int] = SENTINELS,
) -> list[Finding]:
    """What is wrong with a compiled kernel, or not proven (kind "not proven"); empty when sound.

    ptx: the text given to ptxas. pdl: it is launched with programmatic stream serialization.
    declared_smem: bytes that the schedule reserves; dynamic_smem: bytes given at launch. trigger:
    whether the schedule says that it triggers early (None: either). sentinels: words that mean
    "not arrived". Findings name kernel, line of the text and parameter; ParseError when the text
    has no such entry or is not understood.

    Hand-over between threads is not followed. A thread that never waits itself must not read
    dynamic data, even behind a barrier that a waiting thread has reached; its stores are taken to
    be results of what a waiting thread handed to it, and only stores that a wait can follow are
    refused.
    """
    kernel = read_kernel(ptx, entry)
    conditions = Conditions(kernel)
    origins = OriginMap(kernel, operands)
    reached = explore(kernel, conditions, pass_waits=True)
    findings = [*_table(kernel, operands)]
    if pdl:
        findings += _before_wait(kernel, conditions, origins, reached)
    if trigger is not None:
        findings += _trigger(kernel, reached, trigger)
    findings += flag_findings(kernel, origins, reached, sentinels)
    for item in reached.branches:
        findings += _store_class(kernel, origins, item)
        findings += _static_store(kernel, origins, item)
    findings += _shared_memory(kernel, declared_smem, dynamic_smem)
    return findings


def _at(kernel: Kernel, item: Instruction) -> str:
    return f"{kernel.name} line {item.line}: {item}"


def _table(kernel: Kernel, operands: Sequence[KernelOperand]) -> Iterator[Finding]:
    """Every pointer has an operand, and every operand a parameter that can hold it."""
    listed = {operand.parameter for operand in operands}
    for parameter in kernel.parameters:
        address = parameter.pointer or parameter.bytes > 8 or parameter.type in ("u64", "b64")
        if address and parameter.index not in listed:
            yield Finding(
                "operand table",
                f"{kernel.name} line {kernel.line}: parameter {parameter.index} "
                f"({parameter.type}, {parameter.bytes} bytes) has no operand",
            )
    for operand in operands:
        if not _holds(kernel.parameters, operand):
            yield Finding(
                "operand table",
                f"{kernel.name} line {kernel.line}: {operand} lies outside of the "
                f"{len(kernel.parameters)} parameters",
            )


def _holds(parameters: tuple[Parameter, ...], operand: KernelOperand) -> bool:
    inside = 0 <= operand.parameter < len(parameters)
    return inside and 0 <= operand.offset < parameters[operand.parameter].bytes


def _before_wait(
    kernel: Kernel, conditions: Conditions, origins: OriginMap, reached: Reached
) -> Iterator[Finding]:
    early = explore(kernel, conditions, pass_waits=False)
    written = [item for item in kernel.instructions() if item.opcode == WAIT]
    waits = [item for item in written if item in reached]
    unordered = [f for item in early.branches for f in _early(kernel, origins, early, waits, item)]
    if not waits:
        first = f"; first unordered access: {unordered[0].message}" if unordered else ""
        for item in written:
            how = f"@{'!' * item.negated}{item.guard} is never true" if item.guard else "no way in"
            yield Finding("dead wait", f"{_at(kernel, item)} is never executed ({how}){first}")
        if not written:
            yield Finding(
                "missing wait",
                f"{kernel.name} line {kernel.line}: launched with PDL, but has no {WAIT}{first}",
            )
    if not early.exact:
        yield Finding(
            "not proven",
            f"{kernel.name} line {kernel.line}: too many paths to relate its branches",
        )
    yield from unordered


def _early(
    kernel: Kernel, origins: OriginMap, early: Reached, waits: list[Instruction], item: Instruction
) -> Iterator[Finding]:
    """Findings on one instruction that a thread reaches without having waited."""
    access = access_of(item)
    if access is None or access.space in ("shared", "local", "param", "const"):
        return
    where = f"{_at(kernel, item)}{_path(early, waits, item)}"
    if access.kind == "unknown":
        yield Finding("not proven", f"{where}: its memory accesses are not known")
        return
    if access.kind == "write" and not _waits_later(kernel, waits, item):
        return  # another thread waits; the order of its hand-over is the kernel's own
    direct, loaded, other = origins.pointers(access.address)
    if access.space == "generic" and not direct | loaded and _is_on_chip(other):
        return
    faults = _dynamic(origins, direct)
    through = _dynamic(origins, loaded)
    if not faults and through and len(through) == len(direct | loaded):
        faults = through
    for operand in faults:
        how = " (an address loaded from it)" if operand in through and not direct else ""
        yield Finding(
            f"{_VERB[access.kind]} before wait",
            f"{where} uses {operand}{how} before {WAIT}",
        )
    if faults:
        return
    if through:
        names = ", ".join(str(operand) for operand in through)
        yield Finding("not proven", f"{where}: the address may have been loaded from {names}")
    elif not direct | loaded or any(o.space == "global" for o in other):
        yield Finding("not proven", f"{where}: the address comes from no known parameter")


_VERB = {"read": "read", "write": "write", "update": "atomic", "prefetch": "prefetch"}


def _is_on_chip(other: frozenset[object]) -> bool:
    return bool(other) and all(getattr(o, "space", "") in ("shared", "local") for o in other)


def _dynamic(origins: OriginMap, indices: set[int]) -> list[KernelOperand]:
    found = [origins.operands[i] for i in sorted(indices)]
    return [operand for operand in found if operand.access != "weight"]


def _path(early: Reached, waits: list[Instruction], item: Instruction) -> str:
    """How the instruction is reached around the waits, when some wait stands above it."""
    above = [wait.line for wait in waits if wait.line < item.line]
    if not above:
        return ""
    branches = ", ".join(early.branches[item]) or "no branch"
    return f" (path around the wait of line {above[-1]}: {branches})"


def _waits_later(kernel: Kernel, waits: list[Instruction], item: Instruction) -> bool:
    """Whether a wait can follow the instruction."""
    inside = next(b for b in kernel.blocks if any(i is item for i in b.instructions))
    at = next(n for n, i in enumerate(inside.instructions) if i is item)
    if any(i.opcode == WAIT for i in inside.instructions[at:]):
        return True
    seen: set[int] = set()
    pending = list(inside.successors)
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            if any(i in waits for i in kernel.blocks[index].instructions):
                return True
            pending += kernel.blocks[index].successors
    return False


def _trigger(kernel: Kernel, reached: Reached, expected: bool) -> Iterator[Finding]:
    lines = [item.line for item in reached.branches if item.opcode == TRIGGER]
    if expected and not lines:
        yield Finding(
            "trigger", f"{kernel.name} line {kernel.line}: no reachable {TRIGGER}, one is planned"
        )
    if lines and not expected:
        yield Finding("trigger", f"{kernel.name} line {lines[0]}: {TRIGGER}, but none is planned")


def _store_class(kernel: Kernel, origins: OriginMap, item: Instruction) -> Iterator[Finding]:
    """Multicast addresses are written by multimem instructions, and nothing else is."""
    access = access_of(item)
    if access is None or access.space not in ("global", "generic"):
        return
    if not access.multimem and access.kind not in ("write", "update"):
        return
    direct, loaded, other = origins.pointers(access.address)
    behind = [origins.operands[i] for i in sorted(direct | loaded)]
    multicast = any(operand.multicast for operand in origins.operands)
    if not behind:
        if (access.multimem or multicast) and not _is_on_chip(other):
            yield _unknown_target(kernel, item, access)
        return
    for operand in behind:
        if operand.multicast and not access.multimem:
            yield Finding(
                "store class",
                f"{_at(kernel, item)} stores to multicast {operand}: only multimem may",
            )
        if access.multimem and not operand.multicast:
            yield Finding(
                "store class",
                f"{_at(kernel, item)} uses multimem on {operand}, which is not multicast",
            )


def _static_store(kernel: Kernel, origins: OriginMap, item: Instruction) -> Iterator[Finding]:
    """Weights are never written, so that others may read them above their waits.

    Only what is sure: pointers that pass through shared memory are not told apart.
    """
    access = access_of(item)
    if access is None or access.kind not in ("write", "update"):
        return
    if access.space not in ("global", "generic"):
        return
    direct, _, _ = origins.pointers(access.address)
    found = [origins.operands[i] for i in sorted(direct)]
    weights = [operand for operand in found if operand.access == "weight"]
    if weights and len(weights) == len(direct):
        yield Finding("write to weight", f"{_at(kernel, item)} stores to {weights[0]}")


def _unknown_target(kernel: Kernel, item: Instruction, access: MemoryAccess) -> Finding:
    what = "multimem" if access.multimem else "a store"
    return Finding("not proven", f"{_at(kernel, item)}: {what} to no known parameter")


def _shared_memory(kernel: Kernel, declared: int, dynamic: int) -> Iterator[Finding]:
    """Declared bytes are the static variables plus the dynamic bytes of the launch.

    A launch may give bytes that its kernel leaves alone: they are taken, and declared.
    """
    where = f"{kernel.name} line {kernel.line}"
    external = [item.name for item in kernel.shared if item.external]
    if external and not dynamic:
        yield Finding("shared memory", f"{where}: uses {external[0]}, but the launch gives 0 bytes")
    used = kernel.static_shared + dynamic
    if used != declared:
        yield Finding(
            "shared memory",
            f"{where}: {used} bytes ({kernel.static_shared} static, {dynamic} dynamic), the "
            f"schedule declares {declared}",
        )
