"""A machine for the PTX of kernels, without a GPU: all lanes of a grid as rows of numpy arrays.

It is unkind within the rules. Warps run in a random order, some far behind the others; shared
memory and registers start as garbage; an asynchronous copy spoils its target at once and brings
its bytes only when they are waited for. An access out of bounds or misaligned, a warp-wide
instruction that a lane misses, and a grid that does not end are faults that name the instruction.
Memory is consistent, though, and divergent lanes join as soon as they can: a missing fence or
`bar.warp.sync` is not found.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.ptx_arithmetic import DTYPES, halves, lanewise

SHARED_BASE = 1024  # address of the first byte of dynamic shared memory
CTA_SHIFT = 24  # of a cluster's shared addresses: one more than the rank of the CTA
EVER = np.iinfo(np.int64).max
LANE = np.arange(32)
NOTHING = ("griddepcontrol", "fence", "prefetch", "membar", "cp.async.bulk.prefetch")


class Fault(Exception):  # noqa: N818 (what a kernel did)
    """The kernel did something that it must not do; the message names the instruction."""


class Region(NamedTuple):
    """Memory of the process that a kernel may access."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Line:
    """An instruction; operands are texts, lists of texts where the PTX has braces."""

    text: str
    op: tuple[str, ...]
    operands: list[Any]
    guard: str | None
    negated: bool


@dataclass
class Code:
    """A kernel's text: its lines, the line that a label stands before, types of registers."""

    params: list[str]
    lines: list[Line] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


def parse(ptx: str) -> Code:
    """The text of the first entry. Names declared in an inner block get its number."""
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    code = Code(re.findall(r"\w+_param_\d+", head))
    found: list[tuple[str, list[int]]] = []
    names: dict[tuple[int, str], str] = {}
    blocks, count, held = [0], 0, ""
    for ch in re.sub(r"//[^\n]*", "", body):
        if ch in "{}" and not held.strip():
            count += ch == "{"
            blocks = [*blocks, count] if ch == "{" else blocks[:-1]
        elif ch == ":" and re.fullmatch(r"\s*[$\w]+", held):
            own = f"{held.strip()}@{blocks[-1]}"
            names[blocks[-1], held.strip()] = own
            code.labels[own] = len(found)
            held = ""
        elif ch == ";":
            words, held = held.split(), ""
            if words[0] == ".reg":
                for name in "".join(words[2:]).split(","):
                    plain = name.partition("<")[0]
                    own = f"{plain}@{blocks[-1]}" if plain == name else plain
                    names[blocks[-1], plain] = own
                    code.types[own] = words[1][1:]
            elif not words[0].startswith("."):
                found.append((" ".join(words), blocks))
        else:
            held += ch
        if not blocks:
            break
    for text, inside in found:

        def own_name(match: re.Match[str], inside: list[int] = inside) -> str:
            own = (names[b, match[0]] for b in reversed(inside) if (b, match[0]) in names)
            return next(own, match[0])

        code.lines.append(_line(text, own_name))
    return code


def _line(text: str, own_name: Callable[[re.Match[str]], str]) -> Line:
    match = re.fullmatch(r"(?:@(!?)(\S+) )?([\w.:]+) ?(.*)", text)
    assert match is not None, text
    parts = re.findall(r"\{[^}]*\}|[^,{}]+", re.sub(r"(?<![\w.])[$%\w]+", own_name, match[4]))
    operands: list[Any] = []
    for part in (p.strip() for p in parts if p.strip()):
        inner = [p.strip() for p in part[1:-1].split(",")]
        operands.append(inner if part[0] == "{" else part)
    guard = None if match[2] is None else re.sub(r"[$%\w]+", own_name, match[2])
    return Line(text, tuple(re.split(r"(?<!:)\.", match[3])), operands, guard, match[1] == "!")


class Bytes:
    """Memory as words of 1, 2, 4 and 8 bytes, by their index from a common start."""

    def __init__(self, raw: Any) -> None:
        self.words = {size: raw.view(DTYPES[f"b{8 * size}"]) for size in (1, 2, 4, 8)}


class GlobalMemory(Bytes):
    """Regions of the memory of this process; nothing else may be touched."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted(set(regions), key=lambda r: r.start)
        self.starts = [r.start for r in self.regions]
        self.ends = np.array([r.start + r.size for r in self.regions])
        self.low = self.starts[0] & -16
        span = (int(self.ends.max()) - self.low + 15) & -16
        super().__init__(np.frombuffer((ctypes.c_uint8 * span).from_address(self.low), np.uint8))

    def place(self, address: Any, size: int) -> Any:
        """Offsets from the start of `size` bytes at each address."""
        first = bisect_right(self.starts, int(address.min())) - 1
        if first < 0 or int(address.max()) + size > self.ends[first]:
            region = np.searchsorted(self.starts, address, "right") - 1
            wrong = (region < 0) | (address + size > self.ends[region])
            if wrong.any():
                at, near = int(address[wrong][0]), self.regions[max(0, int(region[wrong][0]))]
                raise Fault(f"out of bounds: {near.name} + {at - near.start} of {near.size}")
        return address - self.low


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes missing in this phase, and the copies on their way."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Copies:
    """One cp.async of some lanes: group of each lane, targets and sources as word indices."""

    lanes: Any
    group: Any
    target: Any
    source: Any
    words: int


class Machine:
    """One launch. params: values in order; cluster: CTAs of one; limit: instructions of all
    groups of lanes together."""

    def __init__(
        self,
        ptx: str,
        params: Sequence[int],
        memory: GlobalMemory,
        *,
        ctas: int,
        threads: int,
        smem: int,
        cluster: int = 1,
        seed: int = 0,
        limit: int = 600_000,
    ) -> None:
        self.code, self.memory = parse(ptx), memory
        self.ctas, self.threads, self.smem, self.cluster = ctas, threads, smem, cluster
        self.random, self.limit, self.steps = np.random.default_rng(seed), limit, 0
        self.lanes, self.warps = ctas * threads, ctas * threads // 32
        assert threads % 32 == 0 and ctas % cluster == 0 and len(params) == len(self.code.params)
        self.params = np.array([p & (2**64 - 1) for p in params], np.uint64)
        self.stride = (SHARED_BASE + smem + 127) & -128
        self.shared = Bytes(self.random.integers(0, 256, ctas * self.stride, np.uint8))
        lane = np.arange(self.lanes)
        self.cta, self.base = lane // threads, lane & -32
        numbers = {"%tid.x": lane % threads, "%ctaid.x": self.cta, "%laneid": lane % 32}
        numbers |= {"%cluster_ctarank": self.cta % cluster}
        self.registers = {name: n.astype(np.uint32) for name, n in numbers.items()}
        self.constants = {"%ntid.x": threads, "%nctaid.x": ctas, "__dynamic_shmem__0": SHARED_BASE}
        self.constants |= {name: 8 * i for i, name in enumerate(self.code.params)}
        self.pc = np.zeros(self.lanes, np.int64)
        self.blocked = np.zeros(self.lanes, bool)
        self.done = np.zeros(self.lanes, bool)
        self.late = np.zeros(self.warps, bool)
        self.late_until = self.left = 0
        self.arrived: dict[tuple[int, int], list[Any]] = {}  # at a named barrier of a CTA
        self.cluster_arrivals = np.zeros(ctas // cluster, np.int64)
        self.cluster_phase = np.zeros(ctas // cluster, np.int64)
        self.phase_of = np.zeros(self.lanes, np.int64)
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[Copies] = []
        self.committed = np.zeros(self.lanes, np.int64)
        self.program = [self._compile(line) for line in self.code.lines]

    # -- scheduling ----------------------------------------------------------------------------
    def run(self) -> int:
        """Run to the end; how many instructions that took."""
        with np.errstate(all="ignore"):
            while not self.done.all():
                group = self._choose()
                while self.left > 0 and self._go(group):
                    pass
        return self.steps

    def _choose(self) -> Any:
        """Warps that stand at one instruction and will go on together for a while."""
        at = np.where(self.done | self.blocked, EVER, self.pc).reshape(-1, 32).min(1)
        ready = at < EVER
        if not ready.any():
            stuck = np.flatnonzero(self.blocked)
            line = self.code.lines[self.pc[stuck[0]] - 1].text
            raise Fault(f"deadlock: {len(stuck)} lanes wait, the first at {line}")
        if self.steps > self.late_until or not (ready & ~self.late).any():
            kind = self.random.integers(4)  # none late, some warps, one warp, one CTA
            some = self.random.random(self.warps) < (0, 0.5, 0, 0)[kind]
            one = np.arange(self.warps) == self.random.integers(self.warps)
            cta = self.cta[::32] == self.random.integers(self.ctas)
            self.late = (some, some, one, cta)[kind]
            self.late_until = self.steps + int(self.random.choice((100, 1000, 5000)))
        ready = ready & ~self.late if (ready & ~self.late).any() else ready
        leader = self.random.choice(np.flatnonzero(ready))
        self.left = int(self.random.choice((50, 500, 5000)))
        return ready & (at == at[leader])

    def _go(self, group: Any) -> bool:
        """Run the lanes that are furthest behind, up to where others wait; False: none is left."""
        ready = np.repeat(group, 32) & ~(self.done | self.blocked)
        if not ready.any():
            return False
        places = self.pc[ready]
        pc = int(places.min())
        mask = ready & (self.pc == pc)
        rest = places[places > pc]
        stop = int(rest.min()) if len(rest) else EVER
        count = int(np.count_nonzero(mask))
        while True:
            run, guard, negated, target = self.program[pc]
            taken = mask if guard is None else mask & (~guard if negated else guard)
            self.steps += 1
            self.left -= 1
            if target is None:
                leave = False
                if guard is None or taken.any():
                    leave = run(taken)
                pc += 1
            else:
                jumping = count if guard is None else int(np.count_nonzero(taken))
                following, leave = pc + 1, False
                if jumping == count:
                    pc = target
                else:
                    pc = following
                    if jumping and target > pc:
                        self.pc[taken], mask, stop = target, mask & ~taken, min(stop, target)
                    elif jumping:
                        self.pc[mask & ~taken], mask, pc = following, taken, target
                        stop = min(stop, following)
                    if jumping:
                        count = int(np.count_nonzero(mask))
            if leave or pc >= stop or self.left <= 0:
                self.pc[mask] = pc
                break
        if self.steps > self.limit:
            raise Fault(f"a hang: {self.steps} instructions, now at {self.code.lines[pc - 1].text}")
        return True

    # -- operands ------------------------------------------------------------------------------
    def _register(self, name: str) -> Any:
        if name not in self.registers:
            kind = self.code.types[name if "@" in name else re.sub(r"\d+$", "", name)]
            garbage = self.random.integers(0, 256, self.lanes * 8, np.uint8)
            if kind == "pred":
                self.registers[name] = garbage[: self.lanes] > 127
            else:
                dtype = DTYPES[f"b{kind[1:]}"]
                self.registers[name] = garbage.view(dtype)[: self.lanes].copy()
        return self.registers[name]

    def _is_register(self, text: str) -> bool:
        return text in self.registers or "@" in text or text[0] == "%" and "." not in text

    def _source(self, text: str, kind: str) -> Any:
        """An operand as a live view of a register's low bytes, or as a constant."""
        dtype = np.dtype(DTYPES[kind])
        if text not in self.constants and self._is_register(text):
            held = self._register(text)
            assert held.dtype.itemsize >= dtype.itemsize, text
            return held.view(dtype)[:: held.dtype.itemsize // dtype.itemsize]
        if text in self.constants:
            return dtype.type(self.constants[text])
        if text[:2] == "0f":
            return np.uint32(int(text[2:], 16)).view(np.float32).view(dtype)
        if kind == "pred":
            return np.bool_(int(text) != 0)
        number = int(text, 0) & (2 ** (8 * dtype.itemsize) - 1)
        return np.array(number, f"u{dtype.itemsize}").view(dtype)[()]

    def _target(self, text: str, kind: str) -> Any:
        """A register to write; narrower results are extended to its width."""
        held = self._register(text)
        if kind in ("pred", "f32"):
            return held.view(DTYPES[kind])
        return held.view(DTYPES[f"{kind[0]}{8 * held.dtype.itemsize}"])

    def _address(self, text: str) -> Callable[[Any], Any]:
        """Of "[base+offset]": lanes -> addresses."""
        base, _, offset = text.strip("[] ").partition("+")
        more = int(offset or "0", 0)
        if not self._is_register(base):
            return lambda lanes: np.full(len(lanes), int(self._source(base, "u64")) + more)
        held = self._register(base)
        if held.dtype.itemsize == 4:
            return lambda lanes: (held[lanes].astype(np.int64) + more) & 0xFFFFFFFF
        return lambda lanes: held[lanes].view(np.int64) + more

    def _shared_place(self, address: Any, lanes: Any, size: int) -> Any:
        rank, at = address >> CTA_SHIFT, address & ((1 << CTA_SHIFT) - 1)
        own = self.cta[lanes]
        cta = np.where(rank > 0, own - own % self.cluster + rank - 1, own)
        wrong = (at < SHARED_BASE) | (at + size > SHARED_BASE + self.smem) | (rank > self.cluster)
        if wrong.any():
            at = int(at[wrong][0]) - SHARED_BASE
            raise Fault(f"out of bounds: shared + {at} of {self.smem}")
        return cta * self.stride + at

    def _place(self, op: tuple[str, ...], text: str, size: int) -> tuple[Bytes, Any]:
        """The memory of an access, and: lanes -> offsets in it."""
        address = self._address(text)
        shared = any(part.startswith("shared") for part in op)

        def place(lanes: Any) -> Any:
            at = address(lanes)
            if (at & (size - 1)).any():
                raise Fault(f"misaligned: {hex(int(at[(at & (size - 1)) != 0][0]))}")
            return self._shared_place(at, lanes, size) if shared else self.memory.place(at, size)

        return (self.shared if shared else self.memory), place

    # -- instructions --------------------------------------------------------------------------
    def _compile(self, line: Line) -> tuple[Any, Any, bool, int | None]:
        guard = None if line.guard is None else self._register(line.guard)
        if line.op[0] == "bra":
            return None, guard, line.negated, self.code.labels[line.operands[0]]
        known = lanewise(line.op)
        if known is not None:
            return self._lanewise(line, known), guard, line.negated, None
        full = ".".join(line.op)
        make = next((make for name, make in _OTHERS.items() if full.startswith(name)), None)
        if full.startswith(NOTHING):
            return (lambda mask: False), guard, line.negated, None
        if make is None:
            raise Fault(f"{line.text}: unknown to this machine")
        act = make(self, line.op, line.operands)

        def run(mask: Any) -> Any:
            try:
                return act(mask)
            except Fault as fault:
                raise Fault(f"{line.text}: {fault}") from None

        return run, guard, line.negated, None

    def _lanewise(self, line: Line, known: Any) -> Any:
        target = self._target(line.operands[0], known.result)
        given = zip(line.operands[1:], known.operands, strict=True)
        sources, compute = [self._source(o, k) for o, k in given], known.compute

        def run(mask: Any) -> None:
            np.copyto(target, compute(*sources), where=mask, casting="unsafe")

        return run

    def _warps(self, mask: Any) -> Any:
        """Numbers of the warps in a mask, which must be whole."""
        whole = mask.reshape(-1, 32)
        some = whole.any(1)
        if not whole[some].all():
            raise Fault("not all lanes of the warp are here")
        return np.flatnonzero(some)

    def _load(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        kind, size = op[-1], np.dtype(DTYPES[op[-1]]).itemsize
        names = operands[0] if isinstance(operands[0], list) else [operands[0]]
        targets = [self._target(name, kind) for name in names]
        if op[1] == "param":
            address, params = self._address(operands[1]), self.params

            def param(mask: Any) -> None:
                lanes = np.flatnonzero(mask)
                targets[0][lanes] = params[address(lanes) // 8].astype(DTYPES[kind])

            return param
        memory, place = self._place(op, operands[1], size * len(names))
        words, waits = memory.words[size].view(DTYPES[kind]), "acquire" in op

        def run(mask: Any) -> None:
            lanes = np.flatnonzero(mask)
            at = place(lanes) // size
            for j, target in enumerate(targets):
                target[lanes] = words[at + j]
            if waits:
                self.left = min(self.left, 8)

        return run

    def _store(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        kind, size = f"b{op[-1][1:]}", np.dtype(DTYPES[op[-1]]).itemsize
        names = operands[1] if isinstance(operands[1], list) else [operands[1]]
        sources = [self._source(name, kind) for name in names]
        memory, place = self._place(op, operands[0], size * len(names))
        words = memory.words[size]

        def run(mask: Any) -> None:
            lanes = np.flatnonzero(mask)
            at = place(lanes) // size
            for j, source in enumerate(sources):
                words[at + j] = source[lanes] if source.ndim else source

        return run

    def _atomic(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        """Adds or ors 32-bit words; with a result where there are three operands."""
        target = self._target(operands[0], "u32") if op[0] == "atom" else None
        memory, place = self._place(op, operands[-2], 4)
        source, words = self._source(operands[-1], "u32"), memory.words[4]
        assert op[-2] in ("add", "or"), op

        def run(mask: Any) -> None:
            lanes = np.flatnonzero(mask)
            for lane, at in zip(lanes, place(lanes) // 4, strict=True):
                old, given = words[at], source[lane] if source.ndim else source
                words[at] = old + given if op[-2] == "add" else old | given
                if target is not None:
                    target[lane] = old

        return run

    def _return(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        def run(mask: Any) -> bool:
            self.done |= mask
            return True

        return run

    def _cta_barrier(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        name = self._source(operands[0], "u32")
        size = self._source(operands[1], "u32") if len(operands) > 1 else np.uint32(self.threads)

        def run(mask: Any) -> bool:
            for warp in self._warps(mask):
                first = 32 * warp
                number, wanted = (int(x[first]) if x.ndim else int(x) for x in (name, size))
                key = int(self.cta[first]), number
                here = self.arrived.setdefault(key, [])
                if any(other != wanted for _, other in here) or wanted % 32 or number > 15:
                    raise Fault(f"barrier {number} of {wanted} threads and of others")
                here.append((warp, wanted))
                self.blocked[first : first + 32] = True
                if len(here) * 32 == wanted:
                    for other, _ in self.arrived.pop(key):
                        self.blocked[32 * other : 32 * other + 32] = False
            return True

        return run

    def _cluster_barrier(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        of = self.cta // self.cluster

        def arrive(mask: Any) -> None:
            self.phase_of[mask] = self.cluster_phase[of[mask]]
            np.add.at(self.cluster_arrivals, of[mask], 1)
            full = self.cluster_arrivals == self.cluster * self.threads
            self.cluster_arrivals[full] = 0
            self.cluster_phase[full] += 1
            self.blocked[self.blocked & full[of]] = False

        def wait(mask: Any) -> bool:
            self.blocked |= mask & (self.cluster_phase[of] == self.phase_of)
            return True

        return arrive if op[2] == "arrive" else wait

    def _warp_barrier(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        return lambda mask: self._warps(mask) is None

    def _shuffle(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        target, source = self._target(operands[0], "b32"), self._source(operands[1], "b32")
        by, clamp = self._source(operands[2], "u32"), int(self._source(operands[3], "u32"))
        lane, segment, how = np.arange(self.lanes) % 32, clamp >> 8 & 31, op[2]
        first, last = lane & segment, (lane & segment) | (clamp & 31 & ~segment)

        def run(mask: Any) -> None:
            self._warps(mask)
            count = (by & np.uint32(31)).astype(np.int64)
            other = {
                "up": lane - count,
                "down": lane + count,
                "bfly": lane ^ count,
                "idx": first | (count & ~segment),
            }[how]
            there = other >= last if how == "up" else other <= last
            value = source[self.base + np.where(there, other, lane)]
            np.copyto(target, value, where=mask)

        return run

    def _vote(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        target, source = self._target(operands[0], "b32"), self._source(operands[1], "pred")

        def run(mask: Any) -> None:
            self._warps(mask)
            bits = (source & mask).reshape(-1, 32) @ (np.uint64(1) << LANE.astype(np.uint64))
            np.copyto(target, np.repeat(bits, 32), where=mask, casting="unsafe")

        return run

    def _reduce(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        kind = op[-1]
        target, source = self._target(operands[0], kind), self._source(operands[1], kind)
        across = {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[op[2]]

        def run(mask: Any) -> None:
            self._warps(mask)
            value = across(source.reshape(-1, 32), axis=1)
            np.copyto(target, np.repeat(value, 32), where=mask, casting="unsafe")

        return run

    def _matrix_product(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        """m16n8k16 with float32 sums."""
        assert op[3] == "m16n8k16" and op[6] == "f32" and op[7] in ("bf16", "f16"), op
        kind = op[7]
        targets = [self._target(name, "f32") for name in operands[0]]
        a, b = ([self._source(name, "b32") for name in part] for part in operands[1:3])
        sums = [self._source(name, "f32") for name in operands[3]]
        row, col = LANE // 4, 2 * (LANE % 4)

        def by_warp(source: Any, warps: Any) -> Any:
            return np.broadcast_to(source, self.lanes).reshape(-1, 32)[warps]

        def run(mask: Any) -> None:
            warps = self._warps(mask)
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

    def _load_matrices(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        """ldmatrix: 8 x 8 matrices of 16-bit elements, rows given by the lanes."""
        targets = [self._target(name, "b32") for name in operands[0]]
        memory, place = self._place(op, operands[1], 16)
        assert "m8n8" in op and memory is self.shared, op

        def run(mask: Any) -> None:
            warps = self._warps(mask)
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

    def _map_address(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        target = self._target(operands[0], "u32")
        source, rank = self._source(operands[1], "u32"), self._source(operands[2], "u32")

        def run(mask: Any) -> None:
            value = ((rank + np.uint32(1)) << np.uint32(CTA_SHIFT)) | source
            np.copyto(target, value, where=mask)

        return run

    # -- asynchronous copies -------------------------------------------------------------------
    def _copy(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        size = int(operands[2])
        wanted = self._source(operands[3], "u32") if len(operands) > 3 else np.uint32(size)
        shared, to = self._place(("shared",), operands[0], size)
        _, source = self._place(("global",), operands[1], size)

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
            group = self.committed[lanes]
            self.copies.append(Copies(lanes, group, target, origin, size // 4))

        return run

    def _commit(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        def run(mask: Any) -> None:
            self.committed[mask] += 1

        return run

    def _await_copies(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        def run(mask: Any) -> None:
            limit = np.full(self.lanes, -1)
            limit[mask] = self.committed[mask] - int(operands[0]) if operands else EVER
            left: list[Copies] = []
            for copy in self.copies:
                now = copy.group < limit[copy.lanes]
                for j in range(copy.words if now.any() else 0):
                    origin = copy.source[now]
                    data = np.where(origin < 0, 0, self.memory.words[4][np.maximum(origin, 0) + j])
                    self.shared.words[4][copy.target[now] + j] = data
                if not now.all():
                    parts = (copy.lanes, copy.group, copy.target, copy.source)
                    left.append(Copies(*(part[~now] for part in parts), copy.words))
            self.copies = left

        return run

    def _copy_bulk(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        to, source = self._address(operands[0]), self._address(operands[1])
        size, (_, barrier) = self._source(operands[2], "u32"), self._place(op, operands[3], 8)

        def run(mask: Any) -> None:
            for lane in np.flatnonzero(mask):
                one = np.array([lane])
                count = int(size[lane] if size.ndim else size)
                if count % 16 or to(one)[0] % 16 or source(one)[0] % 16:
                    raise Fault(f"misaligned: {count} bytes to {to(one)} from {source(one)}")
                target = int(self._shared_place(to(one), one, count)[0])
                origin = int(self.memory.place(source(one), count)[0])
                self.shared.words[1][target : target + count] = 0xFF
                self._barrier(int(barrier(one)[0])).copies.append((target, origin, count))

        return run

    def _barrier(self, at: int) -> Barrier:
        if at not in self.barriers or self.shared.words[8][at // 8] != at:
            raise Fault("no mbarrier there, or it was written over")
        return self.barriers[at]

    def _mbarrier(self, op: tuple[str, ...], operands: list[Any]) -> Any:
        how = ".".join(op[1:3])
        named = how.startswith("init")
        _, place = self._place(op, operands[0 if named else 1], 8)
        number = self._source(operands[-1], "u32") if operands[-1][0] != "[" else np.uint32(0)
        target = self._target(operands[0], "pred") if op[1] == "try_wait" else None

        def act(lane: int, at: int) -> None:
            given = int(number[lane] if number.ndim else number)
            if named:
                self.shared.words[8][at // 8] = at  # so that it shows when others write here
                self.barriers[at] = Barrier(given, given)
                return
            barrier = self._barrier(at)
            if target is not None:
                self._finish(barrier)
                target[lane] = barrier.phase % 2 != given
                self.left = self.left if target[lane] else min(self.left, 8)
                return
            if not barrier.missing:
                raise Fault("more arrivals than the mbarrier counts")
            barrier.bytes += given if how == "arrive.expect_tx" else 0
            barrier.missing -= 1
            if not barrier.bytes:
                self._finish(barrier)

        def run(mask: Any) -> None:
            lanes = np.flatnonzero(mask)
            for lane, at in zip(lanes, place(lanes), strict=True):
                act(int(lane), int(at))

        return run

    def _finish(self, barrier: Barrier) -> None:
        """End the phase if all have arrived: only now the copies bring their bytes."""
        if barrier.missing or barrier.bytes != sum(count for _, _, count in barrier.copies):
            return
        for target, origin, count in barrier.copies:
            data = self.memory.words[1][origin : origin + count]
            self.shared.words[1][target : target + count] = data
        barrier.missing, barrier.bytes, barrier.copies = barrier.count, 0, []
        barrier.phase += 1


_OTHERS: dict[str, Callable[[Machine, tuple[str, ...], list[Any]], Any]] = {
    "ld.": Machine._load,
    "st.": Machine._store,
    "atom.": Machine._atomic,
    "red.": Machine._atomic,
    "ret": Machine._return,
    "bar.sync": Machine._cta_barrier,
    "bar.warp.sync": Machine._warp_barrier,
    "barrier.cluster": Machine._cluster_barrier,
    "shfl.sync": Machine._shuffle,
    "vote.sync.ballot": Machine._vote,
    "redux.sync": Machine._reduce,
    "mma.sync": Machine._matrix_product,
    "ldmatrix.sync": Machine._load_matrices,
    "mapa.": Machine._map_address,
    "cp.async.bulk.shared": Machine._copy_bulk,
    "cp.async.ca": Machine._copy,
    "cp.async.cg": Machine._copy,
    "cp.async.commit": Machine._commit,
    "cp.async.wait": Machine._await_copies,
    "mbarrier.": Machine._mbarrier,
}
