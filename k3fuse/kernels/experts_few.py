"""Routed experts of up to 8 tokens with MXFP4 weights: what `experts_up` and `experts_down` take.

All tokens are the 8 columns of m16n8k16, whichever experts they chose, so that a warp keeps its
tokens in registers; results of tokens that did not choose an expert are dropped. Two producer warps
fill a ring of slots in shared memory by bulk copies, `WORKERS` warps multiply, and a reducer warp
adds up what the workers leave.

`experts_up`: a slot is a unit, 8 gate and 8 up rows of one expert. The workers split its columns;
each leaves its sums in its own part of the slot. h goes to scratch as bfloat16. Units left after
whole rounds of the grid are cut by rows: their slots are filled, and their sums kept, in part.

`experts_down`: a slot holds `rows` rows of `entries` experts, and a worker takes 16 rows of one. It
waits until all CTAs have left h of those experts: for the first and second half of the slots the
grid has a counter, where a reducer arrives when its CTA has no unit left of those experts. (An
arrival takes a reducer 1 us, so that one for each slot is slower.) The first slots are asked for
before.

Codes are multiplied as bfloat16 of value * 2^-126. So that products stay far from the ends of
float32, a token is multiplied by the power of two that brings its largest element near 2^100, and
h, which is bounded, by a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3fuse.kernels import linear
from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import PUSHES, Stage
from k3fuse.target import Target

MAX_TOKENS = 8  # the n of the mma
MAX_PAIRS = 256
UP_COLUMNS = 8  # intermediate columns of a unit: 8 gate rows and 8 up rows
GROUP = 32  # K of two mma, and of one MXFP4 scale
WORKERS = 16
REDUCER = 16  # warp numbers
PRODUCER = 17  # two of them, each for half of a slot
THREADS = 19 * 32
MAX_UP_GROUPS = 8  # of a worker: tokens in registers
MAX_DOWN_GROUPS = 8  # whose h is fetched ahead; of more, a few at a time
MAX_SLOTS = 6
LET_PASS = 1  # of units on their way, the last must be there before `experts_down` asks for slots
SHARED_BYTES = 212 * 1024
OTHER_BYTES = 4 * 1024  # of shared memory: what the launch itself keeps there
COUNTERS_AT = 32  # words from the start of the launch's control word
HALVES = 2  # of the slots of `experts_down`; a lane and a counter each
CODE_SCALE = 2.0**126
TOKEN_EXPONENT = 100  # of the largest element of a scaled token


@dataclass(frozen=True)
class FewOptions:
    """Sizes of both stages, and offsets in the shared memory of `experts_up`, which both use. The
    slots stand at its start; the rest is filled above the wait.

    workers: warps that share a unit, `groups` scale groups each. stride: bytes between rows of
    a unit in its slot. rows: of the result, of a CTA at a time; entries: experts of a slot.
    h_scale: what h is multiplied with. vector: columns that a thread stores at once. met_at:
    barriers of the halves of the slots, whose h is there.
    """

    m: int
    k: int
    experts: int
    z: int
    i: int
    beta: float
    linear_beta: float
    workers: int
    groups: int
    stride: int
    rows: int
    down_groups: int
    h_scale: float
    slots: int
    slot_bytes: int
    vector: int
    barriers_at: int
    met_at: int
    weights_at: int
    table_at: int
    experts_at: int
    places_at: int
    counts_at: int
    factors_at: int
    largest_at: int
    results_at: int
    smem: int

    @property
    def pairs(self) -> int:
        return self.m * self.k

    @property
    def up_tiles(self) -> int:
        return self.i // UP_COLUMNS

    @property
    def z_groups(self) -> int:
        return self.z // GROUP

    @property
    def i_groups(self) -> int:
        return self.i // GROUP

    @property
    def halves(self) -> int:
        return self.rows // 16

    @property
    def entries(self) -> int:
        return WORKERS // self.halves

    @property
    def down_tiles(self) -> int:
        return self.z // self.rows

    @property
    def max_entries(self) -> int:
        return min(self.pairs, self.experts)


def options_of(program: Program, stage: Stage, target: Target) -> FewOptions:
    """Sizes and memory of both stages."""
    step = program.steps[stage.steps[0]]
    held = [program.values[v] for v in step.operands]
    require(len(held) == 9, "weights are not MXFP4")
    require(step.attribute("activation") == "situ", "h is not bounded: takes SiTU only")
    z, ids, _, w1 = held[:4]
    m, k = ids.shape
    experts, i = w1.shape[0], w1.shape[1]
    groups = z.width // GROUP
    bound = float(step.attribute("beta") or 0.0) * float(step.attribute("linear_beta") or 0.0)
    require(m <= MAX_TOKENS, f"{m} rows: holds up to {MAX_TOKENS}")
    require(m * k <= MAX_PAIRS, f"{m} rows of {k} experts: holds {MAX_PAIRS} together")
    require(i % GROUP == 0, f"I={i}: must be a multiple of {GROUP}")
    require(groups % 2 == 0, f"Z={z.width}: must be a multiple of {2 * GROUP}")
    require(0 < bound < 2**30, f"h is bounded by {bound:g}: must be within 2^30")
    workers = next((w for w in range(WORKERS, 0, -1) if groups % w == 0 and groups // w >= 2), 0)
    share = groups // workers if workers else 0
    require(0 < share <= MAX_UP_GROUPS, f"Z={z.width}: no even share for the registers of a warp")
    stride = z.width // 2 + 16  # an odd number of 16 bytes: no two rows meet in a bank
    rows = 16 if z.width // 16 <= target.sm_count else 32
    i_groups = i // GROUP
    down = rows * (i // 2 + i_groups) * (WORKERS * 16 // rows)
    slot = -(-max(16 * (stride + groups) + 4, down) // 128) * 128  # a word may be read past scales
    pairs = m * k
    sizes = (
        MAX_SLOTS * 24,
        HALVES * 8,
        pairs * 4,
        experts * 4 if m > 1 else 0,
        pairs * 4,
        pairs * 32,
        80,
        32,
        WORKERS * 32,
        pairs * rows * 4,
    )
    lists = sum(-(-size // 16) * 16 for size in sizes)
    limit = target.smem_per_block - OTHER_BYTES - beside(program, target)
    slots = min(MAX_SLOTS, (min(SHARED_BYTES, limit) - lists) // slot)
    at = slots * slot
    places: list[int] = []
    for size in sizes:
        places.append(at)
        at += -(-size // 16) * 16
    require(slots >= 2, f"I={i}, Z={z.width}: two slots do not fit shared memory")
    return FewOptions(
        m=m,
        k=k,
        experts=experts,
        z=z.width,
        i=i,
        beta=float(step.attribute("beta") or 0.0),
        linear_beta=float(step.attribute("linear_beta") or 0.0),
        workers=workers,
        groups=share,
        stride=stride,
        rows=rows,
        down_groups=i_groups if i_groups <= MAX_DOWN_GROUPS else math.gcd(i_groups, 4),
        h_scale=2.0 ** (TOKEN_EXPONENT - math.ceil(math.log2(bound))),
        slots=slots,
        slot_bytes=slot,
        vector=columns_at_once(program, step.results[0]),
        barriers_at=places[0],
        met_at=places[1],
        weights_at=places[2],
        table_at=places[3],
        experts_at=places[4],
        places_at=places[5],
        counts_at=places[6],
        factors_at=places[7],
        largest_at=places[8],
        results_at=places[9],
        smem=at,
    )


def beside(program: Program, target: Target) -> int:
    """Shared memory of the linear maps of the launch, whose weights are there from the start."""
    steps = tuple(i for i, step in enumerate(program.steps) if step.op == "linear")
    return linear.plan_few(program, Stage("linear", steps), target).smem if steps else 0


def columns_at_once(program: Program, result: int) -> int:
    """Columns of the result that a thread stores at once."""
    sizes = [program.values[result].width]
    for step in program.consumers(result):
        if step.op in PUSHES:
            sizes.append(program.values[result].width // program.tp)
    return next(w for w in (4, 2, 1) if all(size % w == 0 for size in sizes))


def plan_up(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Units of the longest list; h in scratch."""
    o = options_of(program, stage, target)
    return StagePlan(
        items=o.max_entries * o.up_tiles,
        threads=THREADS,
        smem=o.smem,
        scratch=o.pairs * o.i * 2,
        options=o,
        late=True,
        near=True,
        early=o.smem - o.barriers_at,
    )


def plan_down(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Tiles of the result; slots and lists are those of `experts_up`."""
    o = options_of(program, stage, target)
    return StagePlan(items=o.down_tiles, threads=THREADS, options=o, late=True, near=True)
