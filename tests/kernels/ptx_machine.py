"""A machine for the PTX of kernels, without a GPU: all lanes of a grid as rows of numpy arrays.

It is unkind within the rules. Warps run in a random order, some far behind the others; shared
memory and registers start as garbage; an asynchronous copy spoils its target at once and brings
its bytes only when they are waited for. An access out of bounds or misaligned, a warp-wide
instruction that a lane misses, and a grid that does not end are faults that name the instruction.
Memory is consistent, though, and divergent lanes join as soon as they can: a missing fence or
`bar.warp.sync` is not found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.kernels.ptx_arithmetic import DTYPES, lanewise
from tests.kernels.ptx_instructions import CTA_SHIFT, EVER, OTHERS, Barrier, Copies
from tests.kernels.ptx_memory import Bytes, Fault, GlobalMemory
from tests.kernels.ptx_text import Line, parse

SHARED_BASE = 1024  # address of the first byte of dynamic shared memory
NOTHING = ("griddepcontrol", "fence", "prefetch", "membar", "cp.async.bulk.prefetch")


class Machine:
    """One launch. params: values in order; cluster: CTAs of one; limit: instructions of groups of
    lanes, and ten for each change of the group, after which the launch counts as hanging."""

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
        limit: int = 400_000,
    ) -> None:
        self.code, self.memory = parse(ptx), memory
        self.ctas, self.threads, self.smem, self.cluster = ctas, threads, smem, cluster
        self.random, self.limit, self.steps = np.random.default_rng(seed), limit, 0
        self.lanes, self.warps = ctas * threads, ctas * threads // 32
        assert (threads % 32, ctas % cluster) == (0, 0)
        assert len(params) == len(self.code.params)
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
        self.at_cluster = np.zeros(self.lanes, bool)  # blocked there
        self.done = np.zeros(self.lanes, bool)
        self.late, self.looking = self._some_warps(), np.zeros(self.warps, bool)
        self.left = 0  # instructions of a group before the next choice
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
        """Warps that stand at one instruction and will go on together for a while: late ones only
        when no other can do more than look again whether it may go on."""
        at = np.where(self.done | self.blocked, EVER, self.pc).reshape(-1, 32).min(1)
        ready = at < EVER
        if not ready.any():
            stuck = np.flatnonzero(self.blocked)
            line = self.code.lines[self.pc[stuck[0]] - 1].text
            raise Fault(f"deadlock: {len(stuck)} lanes wait, the first at {line}")
        eager = ready & ~self.late & ~self.looking
        if not eager.any():
            self.looking[:] = False
            eager = ready & self.late if (ready & self.late).any() else ready
            if self.random.random() < 0.3:
                self.late = self._some_warps()
        leader = self.random.choice(np.flatnonzero(eager))
        self.steps += 10
        self.left = int(self.random.choice((20, 200, 2000)))
        return eager & (at == at[leader])

    def _some_warps(self) -> Any:
        """None, half of all, one of each CTA, one CTA; or all but these."""
        cta = self.cta[::32]
        warp = np.arange(self.warps) - cta * (self.threads // 32)
        chosen = (
            np.zeros(self.warps, bool),
            self.random.random(self.warps) < 0.5,
            warp == self.random.integers(self.threads // 32),
            cta == self.random.integers(self.ctas),
        )[self.random.integers(4)]
        return chosen if self.random.random() < 0.5 else ~chosen

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
        return text in self.registers or "@" in text or (text[0] == "%" and "." not in text)

    def source(self, text: str, kind: str) -> Any:
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

    def target(self, text: str, kind: str) -> Any:
        """A register to write; narrower results are extended to its width."""
        held = self._register(text)
        if kind in ("pred", "f32"):
            return held.view(DTYPES[kind])
        return held.view(DTYPES[f"{kind[0]}{8 * held.dtype.itemsize}"])

    def address(self, text: str) -> Callable[[Any], Any]:
        """Of "[base+offset]": lanes -> addresses."""
        base, _, offset = text.strip("[] ").partition("+")
        more = int(offset or "0", 0)
        if not self._is_register(base):
            return lambda lanes: np.full(len(lanes), int(self.source(base, "u64")) + more)
        held = self._register(base)
        if held.dtype.itemsize == 4:
            return lambda lanes: (held[lanes].astype(np.int64) + more) & 0xFFFFFFFF
        return lambda lanes: held[lanes].view(np.int64) + more

    def shared_place(self, address: Any, lanes: Any, size: int) -> Any:
        rank, at = address >> CTA_SHIFT, address & ((1 << CTA_SHIFT) - 1)
        own = self.cta[lanes]
        cta = np.where(rank > 0, own - own % self.cluster + rank - 1, own)
        wrong = (at < SHARED_BASE) | (at + size > SHARED_BASE + self.smem) | (rank > self.cluster)
        if wrong.any():
            at = int(at[wrong][0]) - SHARED_BASE
            raise Fault(f"out of bounds: shared + {at} of {self.smem}")
        return cta * self.stride + at

    def place(self, op: tuple[str, ...], text: str, size: int) -> tuple[Bytes, Any]:
        """The memory of an access, and: lanes -> offsets in it."""
        address = self.address(text)
        shared = any(part.startswith("shared") for part in op)

        def place(lanes: Any) -> Any:
            at = address(lanes)
            if (at & (size - 1)).any():
                raise Fault(f"misaligned: {hex(int(at[(at & (size - 1)) != 0][0]))}")
            return self.shared_place(at, lanes, size) if shared else self.memory.place(at, size)

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
        make = next((make for name, make in OTHERS.items() if full.startswith(name)), None)
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
        target = self.target(line.operands[0], known.result)
        given = zip(line.operands[1:], known.operands, strict=True)
        sources, compute = [self.source(o, k) for o, k in given], known.compute

        def run(mask: Any) -> None:
            np.copyto(target, compute(*sources), where=mask, casting="unsafe")

        return run

    def whole_warps(self, mask: Any) -> Any:
        """Numbers of the warps in a mask, which must be whole."""
        whole = mask.reshape(-1, 32)
        some = whole.any(1)
        if not whole[some].all():
            raise Fault("not all lanes of the warp are here")
        return np.flatnonzero(some)
