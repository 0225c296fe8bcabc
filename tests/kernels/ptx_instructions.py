"""PTX instructions that access memory, wait, or need other lanes.

Each function takes a machine, an opcode and its operands and gives what the instruction does to
the lanes of a mask; True asks the machine to choose anew who runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.kernels.ptx_arithmetic import DTYPES, halves
from tests.kernels.ptx_memory import Fault

if TYPE_CHECKING:
    from tests.kernels.ptx_machine import Machine

CTA_SHIFT = 24  # of a cluster's shared addresses: one more than the rank of the CTA
EVER = np.iinfo(np.int64).max
LANE = np.arange(32)


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes missing in this phase, and the copies on their way:
    target, source or data, bytes."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[int, Any, int]] = field(default_factory=list)


@dataclass
class Copies:
    """One cp.async of some lanes: group of each lane, targets and sources as word indices."""

    lanes: Any
    group: Any
    target: Any
    source: Any
    words: int


def load(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    kind, size = op[-1], np.dtype(DTYPES[op[-1]]).itemsize
    names = operands[0] if isinstance(operands[0], list) else [operands[0]]
    targets = [machine.target(name, kind) for name in names]
    if op[1] == "param":
        address, params = machine.address(operands[1]), machine.params

        def param(mask: Any) -> None:
            lanes = np.flatnonzero(mask)
            targets[0][lanes] = params[address(lanes) // 8].astype(DTYPES[kind])

        return param
    memory, place = machine.place(op, operands[1], size * len(names))
    words, waits = memory.words[size].view(DTYPES[kind]), "acquire" in op

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        at = place(lanes) // size
        for j, target in enumerate(targets):
            target[lanes] = words[at + j]
        if waits:
            machine.left = min(machine.left, 8)
            machine.looking[lanes // 32] = True

    return run


def store(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    kind, size = f"b{op[-1][1:]}", np.dtype(DTYPES[op[-1]]).itemsize
    names = operands[1] if isinstance(operands[1], list) else [operands[1]]
    sources = [machine.source(name, kind) for name in names]
    memory, place = machine.place(op, operands[0], size * len(names))
    words = memory.words[size]

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        at = place(lanes) // size
        for j, source in enumerate(sources):
            words[at + j] = source[lanes] if source.ndim else source

    return run


def atomic(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    """Adds or ors 32-bit words; with a result where there are three operands."""
    target = machine.target(operands[0], "u32") if op[0] == "atom" else None
    memory, place = machine.place(op, operands[-2], 4)
    source, words = machine.source(operands[-1], "u32"), memory.words[4]
    assert op[-2] in ("add", "or"), op

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        for lane, at in zip(lanes, place(lanes) // 4, strict=True):
            old, given = words[at], source[lane] if source.ndim else source
            words[at] = old + given if op[-2] == "add" else old | given
            if target is not None:
                target[lane] = old

    return run


def end(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    def run(mask: Any) -> bool:
        machine.done |= mask
        return True

    return run


def cta_barrier(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    name = machine.source(operands[0], "u32")
    size = machine.source(operands[1], "u32") if len(operands) > 1 else np.uint32(machine.threads)

    def run(mask: Any) -> bool:
        for warp in machine.whole_warps(mask):
            first = 32 * warp
            number, wanted = (int(x[first]) if x.ndim else int(x) for x in (name, size))
            key = int(machine.cta[first]), number
            here = machine.arrived.setdefault(key, [])
            if any(other != wanted for _, other in here) or wanted % 32 or number > 15:
                raise Fault(f"barrier {number} of {wanted} threads and of others")
            here.append((warp, wanted))
            machine.blocked[first : first + 32] = True
            if len(here) * 32 == wanted:
                for other, _ in machine.arrived.pop(key):
                    machine.blocked[32 * other : 32 * other + 32] = False
        return True

    return run


def cluster_barrier(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    of = machine.cta // machine.cluster

    def arrive(mask: Any) -> None:
        machine.phase_of[mask] = machine.cluster_phase[of[mask]]
        np.add.at(machine.cluster_arrivals, of[mask], 1)
        full = machine.cluster_arrivals == machine.cluster * machine.threads
        machine.cluster_arrivals[full] = 0
        machine.cluster_phase[full] += 1
        over = machine.at_cluster & full[of]
        machine.blocked[over] = machine.at_cluster[over] = False

    def wait(mask: Any) -> bool:
        early = mask & (machine.cluster_phase[of] == machine.phase_of)
        machine.at_cluster |= early
        machine.blocked |= early
        return True

    return arrive if op[2] == "arrive" else wait


def warp_barrier(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    return lambda mask: machine.whole_warps(mask) is None


def shuffle(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    target, source = machine.target(operands[0], "b32"), machine.source(operands[1], "b32")
    by, clamp = machine.source(operands[2], "u32"), int(machine.source(operands[3], "u32"))
    lane, segment, how = np.arange(machine.lanes) % 32, clamp >> 8 & 31, op[2]
    first, last = lane & segment, (lane & segment) | (clamp & 31 & ~segment)

    def run(mask: Any) -> None:
        machine.whole_warps(mask)
        count = (by & np.uint32(31)).astype(np.int64)
        other = {
            "up": lane - count,
            "down": lane + count,
            "bfly": lane ^ count,
            "idx": first | (count & ~segment),
        }[how]
        there = other >= last if how == "up" else other <= last
        value = source[machine.base + np.where(there, other, lane)]
        np.copyto(target, value, where=mask)

    return run


def vote(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    target, source = machine.target(operands[0], "b32"), machine.source(operands[1], "pred")

    def run(mask: Any) -> None:
        machine.whole_warps(mask)
        bits = (source & mask).reshape(-1, 32) @ (np.uint64(1) << LANE.astype(np.uint64))
        np.copyto(target, np.repeat(bits, 32), where=mask, casting="unsafe")

    return run


def reduce(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    kind = op[-1]
    target, source = machine.target(operands[0], kind), machine.source(operands[1], kind)
    across = {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[op[2]]

    def run(mask: Any) -> None:
        machine.whole_warps(mask)
        value = across(source.reshape(-1, 32), axis=1)
        np.copyto(target, np.repeat(value, 32), where=mask, casting="unsafe")

    return run


def matrix_product(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    """m16n8k16 with float32 sums."""
    kind = op[7]
    assert op[3:] == ("m16n8k16", "row", "col", "f32", kind, kind, "f32"), op
    targets = [machine.target(name, "f32") for name in operands[0]]
    a, b = ([machine.source(name, "b32") for name in part] for part in operands[1:3])
    sums = [machine.source(name, "f32") for name in operands[3]]
    row, col = LANE // 4, 2 * (LANE % 4)

    def by_warp(source: Any, warps: Any) -> Any:
        return np.broadcast_to(source, machine.lanes).reshape(-1, 32)[warps]

    def run(mask: Any) -> None:
        warps = machine.whole_warps(mask)
        left, right = np.empty((len(warps), 16, 16)), np.empty((len(warps), 16, 8))
        total = np.empty((len(warps), 16, 8))
        for i, source in enumerate(a):
            low, high = halves(by_warp(source, warps), kind)
            left[:, row + i % 2 * 8, col + i // 2 * 8] = low
            left[:, row + i % 2 * 8, col + i // 2 * 8 + 1] = high
        for i, source in enumerate(b):
            low, high = halves(by_warp(source, warps), kind)
            right[:, col + 8 * i, row], right[:, col + 8 * i + 1, row] = low, high
        for i, source in enumerate(sums):
            total[:, row + i // 2 * 8, col + i % 2] = by_warp(source, warps)
        total += left @ right
        for i, target in enumerate(targets):
            target.reshape(-1, 32)[warps] = total[:, row + i // 2 * 8, col + i % 2]

    return run


def load_matrices(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    """ldmatrix: 8 x 8 matrices of 16-bit elements, rows given by the lanes."""
    targets = [machine.target(name, "b32") for name in operands[0]]
    memory, place = machine.place(op, operands[1], 16)
    assert (op[3], memory) == ("m8n8", machine.shared), op

    def run(mask: Any) -> None:
        warps = machine.whole_warps(mask)
        given = (32 * warps[:, None] + np.arange(8 * len(targets))).ravel()
        rows = place(given).reshape(len(warps), len(targets), 8)
        for number, target in enumerate(targets):
            at = rows[:, number]
            if "trans" in op:
                pair = [at[:, 2 * (LANE % 4) + i] // 2 + LANE // 4 for i in range(2)]
                low, high = (memory.words[2][p].astype(np.uint32) for p in pair)
                value = low | high << np.uint32(16)
            else:
                value = memory.words[4][at[:, LANE // 4] // 4 + LANE % 4]
            target.reshape(-1, 32)[warps] = value

    return run


def map_address(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    target = machine.target(operands[0], "u32")
    source, rank = machine.source(operands[1], "u32"), machine.source(operands[2], "u32")

    def run(mask: Any) -> None:
        value = ((rank + np.uint32(1)) << np.uint32(CTA_SHIFT)) | source
        np.copyto(target, value, where=mask)

    return run


def copy(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    size = int(operands[2])
    wanted = machine.source(operands[3], "u32") if len(operands) > 3 else np.uint32(size)
    shared, to = machine.place(("shared",), operands[0], size)
    _, source = machine.place(("global",), operands[1], size)

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        count = wanted[lanes] if wanted.ndim else np.full(len(lanes), wanted)
        if not np.isin(count, (0, size)).all():
            raise Fault(f"copies {count} of {size} bytes")
        target, origin = to(lanes) // 4, np.full(len(lanes), -1)
        if (count > 0).any():
            origin[count > 0] = source(lanes[count > 0]) // 4
        for j in range(size // 4):
            shared.words[4][target + j] = 0xFFFFFFFF
        group = machine.committed[lanes]
        machine.copies.append(Copies(lanes, group, target, origin, size // 4))

    return run


def commit(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    def run(mask: Any) -> None:
        machine.committed[mask] += 1

    return run


def await_copies(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    def run(mask: Any) -> None:
        limit = np.full(machine.lanes, -1)
        limit[mask] = machine.committed[mask] - int(operands[0]) if operands else EVER
        left: list[Copies] = []
        for copy in machine.copies:
            now = copy.group < limit[copy.lanes]
            for j in range(copy.words if now.any() else 0):
                origin = copy.source[now]
                data = np.where(origin < 0, 0, machine.memory.words[4][np.maximum(origin, 0) + j])
                machine.shared.words[4][copy.target[now] + j] = data
            if not now.all():
                parts = (copy.lanes, copy.group, copy.target, copy.source)
                left.append(Copies(*(part[~now] for part in parts), copy.words))
        machine.copies = left

    return run


def copy_bulk(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    to, source = machine.address(operands[0]), machine.address(operands[1])
    size, (_, barrier) = machine.source(operands[2], "u32"), machine.place(op, operands[3], 8)

    def run(mask: Any) -> None:
        for lane in np.flatnonzero(mask):
            one = np.array([lane])
            count = int(size[lane] if size.ndim else size)
            if count % 16 or to(one)[0] % 16 or source(one)[0] % 16:
                raise Fault(f"misaligned: {count} bytes to {to(one)} from {source(one)}")
            target = int(machine.shared_place(to(one), one, count)[0])
            origin = int(machine.memory.place(source(one), count)[0])
            machine.shared.words[1][target : target + count] = 0xFF
            _barrier(machine, int(barrier(one)[0])).copies.append((target, origin, count))

    return run


def send(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    """st.async: the words come when the barrier's phase ends."""
    names = operands[1] if isinstance(operands[1], list) else [operands[1]]
    words = [machine.source(name, "b32") for name in names]
    size = 4 * len(words)
    _, to = machine.place(("shared",), operands[0], size)
    _, barrier = machine.place(("shared",), operands[2], 8)

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        for lane, target, at in zip(lanes, to(lanes), barrier(lanes), strict=True):
            found = _barrier(machine, int(at))
            _finish(machine, found)
            data = np.array([w[lane] if w.ndim else w for w in words], np.uint32).view(np.uint8)
            machine.shared.words[1][target : target + size] = 0xFF
            found.copies.append((int(target), data, size))

    return run


def _barrier(machine: Machine, at: int) -> Barrier:
    if at not in machine.barriers or machine.shared.words[8][at // 8] != at:
        raise Fault("no mbarrier there, or it was written over")
    return machine.barriers[at]


def mbarrier(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    """init, arrive and arrive.expect_tx: lane by lane."""
    first = op[1] == "init"
    _, place = machine.place(op, operands[0 if first else 1], 8)
    number = machine.source(operands[-1], "u32") if operands[-1][0] != "[" else np.uint32(0)

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        for lane, at in zip(lanes, place(lanes), strict=True):
            given = int(number[lane] if number.ndim else number)
            if first:
                machine.shared.words[8][at // 8] = at  # so that it shows when others write here
                machine.barriers[at] = Barrier(given, given)
                continue
            barrier = _barrier(machine, at)
            if not barrier.missing:
                raise Fault("more arrivals than the mbarrier counts")
            barrier.bytes += given
            barrier.missing -= 1
            if not barrier.bytes:
                _finish(machine, barrier)

    return run


def try_wait(machine: Machine, op: tuple[str, ...], operands: list[Any]) -> Any:
    """A failure gives way to other warps."""
    target, parity = machine.target(operands[0], "pred"), machine.source(operands[2], "u32")
    _, place = machine.place(op, operands[1], 8)

    def run(mask: Any) -> None:
        lanes = np.flatnonzero(mask)
        at = place(lanes)
        phase = np.zeros(len(lanes), np.int64)
        for one in np.unique(at):
            barrier = _barrier(machine, int(one))
            _finish(machine, barrier)
            phase[at == one] = barrier.phase
        over = phase % 2 != (parity[lanes] if parity.ndim else parity)
        target[lanes] = over
        machine.left = machine.left if over.all() else 0
        machine.looking[lanes[~over] // 32] = True

    return run


def _finish(machine: Machine, barrier: Barrier) -> None:
    """End the phase if all have arrived: only now the copies bring their bytes."""
    if barrier.missing or barrier.bytes != sum(count for _, _, count in barrier.copies):
        return
    for target, origin, count in barrier.copies:
        data = origin
        if isinstance(origin, int):
            data = machine.memory.words[1][origin : origin + count]
        machine.shared.words[1][target : target + count] = data
    barrier.missing, barrier.bytes, barrier.copies = barrier.count, 0, []
    barrier.phase += 1


OTHERS: dict[str, Callable[[Any, tuple[str, ...], list[Any]], Any]] = {
    "ld.": load,
    "st.async": send,
    "st.": store,
    "atom.": atomic,
    "red.": atomic,
    "ret": end,
    "bar.sync": cta_barrier,
    "bar.warp.sync": warp_barrier,
    "barrier.cluster": cluster_barrier,
    "shfl.sync": shuffle,
    "vote.sync.ballot": vote,
    "redux.sync": reduce,
    "mma.sync": matrix_product,
    "ldmatrix.sync": load_matrices,
    "mapa.": map_address,
    "cp.async.bulk.shared": copy_bulk,
    "cp.async.ca": copy,
    "cp.async.cg": copy,
    "cp.async.commit": commit,
    "cp.async.wait": await_copies,
    "mbarrier.try_wait.parity": try_wait,
    "mbarrier.init": mbarrier,
    "mbarrier.arrive": mbarrier,
}
