"""Routed experts: two stages of one op, MXFP4 or bfloat16 weights as the checkpoint holds them.

`experts_up`: every CTA builds the list of chosen experts in shared memory, an entry for up to 8
tokens of one expert, in order of expert ids. A unit is 8 columns of the intermediate size of one
entry: 8 gate rows and 8 up rows are the A operand of m16n8k16 (rows g and g+8, so that a lane holds
both and the activation needs no exchange), the entry's tokens the B operand. `split` warps share a
unit by slices of Z and are summed in warp order. h goes to scratch as bfloat16, a row for each
(token, choice).

`experts_down`, behind a barrier of the grid: a unit is 16 columns of the result. The warps of a CTA
take the entries in turn; the float32 result of each (token, choice) goes to shared memory, and at
the end a row's choices are added up in order, times their routing weights. So neither the sums nor
their order depend on other rows.

Every warp streams weights through a ring of its own in shared memory with 16-byte asynchronous
copies. Nothing can be asked for above the PDL wait, because the routing gives the addresses; but
the first weights of `experts_down` are asked for before the barrier.

Moves 3 * I * Z * (1/2 + 1/32) bytes an expert (bfloat16: 6 * I * Z); bound by reading them.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.experts_few import columns_at_once
from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

MAX_TOKENS = 64  # bits of an expert's mask of tokens
MAX_PAIRS = 1024  # (token, choice)
MAX_EXPERTS = 4096
ENTRY_TOKENS = 8  # the n of the mma
UP_COLUMNS = 8  # intermediate columns of a unit: 8 gate rows and 8 up rows
DOWN_COLUMNS = 16
GROUP = 32  # K of two mma, and of one MXFP4 scale
WARPS = 16
MAX_SPLIT = 8
RING_BYTES = 96 * 1024
MAX_DEPTH = 6


@dataclass(frozen=True)
class Stream:
    """How weights of one stage pass through shared memory, 16 rows at a time.

    groups: of 32 columns, of a whole row. chunk: groups of a ring slot. depth: slots of a warp.
    """

    packed: bool
    groups: int
    chunk: int
    depth: int

    @property
    def chunks(self) -> int:
        return self.groups // self.chunk

    @property
    def weight_bytes(self) -> int:
        """Of a slot, 16 rows."""
        return self.chunk * (256 if self.packed else 1024)

    @property
    def slot_bytes(self) -> int:
        return self.weight_bytes + (16 * self.chunk if self.packed else 0)

    @property
    def ring_bytes(self) -> int:
        """Of one warp."""
        return self.depth * self.slot_bytes

    @property
    def row_bytes(self) -> int:
        """Of a whole row of weights in memory."""
        return self.groups * (16 if self.packed else 64)


@dataclass(frozen=True)
class ExpertsOptions:
    """Sizes, the streams of both stages, and offsets in the shared memory of `experts_up`, which
    both use. split: warps that share a unit of `experts_up`; teams: of such warps in a CTA.

    entries_at: (expert, first pair and count) of each entry; pairs_at: pairs in order of entries;
    weights_at: routing weights; count_at: number of entries; sums_at: partial sums of
    `experts_up`, then results of `experts_down`; ring_at: rings; masks_at, firsts_at, totals_at:
    while the list is made, in the place of the rings.
    """

    m: int
    k: int
    experts: int
    z: int
    i: int
    activation: str
    beta: float
    linear_beta: float
    up: Stream
    down: Stream
    split: int
    vector: int
    entries_at: int
    pairs_at: int
    weights_at: int
    count_at: int
    sums_at: int
    ring_at: int
    smem: int

    @property
    def teams(self) -> int:
        return WARPS // self.split

    @property
    def pairs(self) -> int:
        return self.m * self.k

    @property
    def up_tiles(self) -> int:
        return self.i // UP_COLUMNS

    @property
    def down_tiles(self) -> int:
        return self.z // DOWN_COLUMNS

    @property
    def masks_at(self) -> int:
        return self.ring_at

    @property
    def firsts_at(self) -> int:
        return self.masks_at + self.experts * 8

    @property
    def totals_at(self) -> int:
        return self.firsts_at + self.experts * 4


def max_entries(m: int, k: int, experts: int) -> int:
    """Entries of the longest list."""
    return min(m * k, experts + m * k // ENTRY_TOKENS)


def options_of(program: Program, stage: Stage) -> ExpertsOptions:
    """Sizes and memory of both stages."""
    step = program.steps[stage.steps[0]]
    held = [program.values[v] for v in step.operands]
    z, ids, weights, w1, w3, w2 = held[:6]
    packed = len(held) == 9
    m, k = ids.shape
    experts, i = w1.shape[0], w1.shape[1]
    require(z.dtype == "bf16" and weights.dtype == "f32", "experts of bfloat16 rows only")
    require(
        all(w.dtype == ("u8" if packed else "bf16") for w in (w1, w3, w2)),
        "expert weights are MXFP4 or bfloat16",
    )
    require(m <= MAX_TOKENS, f"{m} rows: the experts' list holds {MAX_TOKENS}")
    require(m * k <= MAX_PAIRS, f"{m} rows of {k} experts: the list holds {MAX_PAIRS} together")
    require(experts <= MAX_EXPERTS, f"{experts} experts: the list counts {MAX_EXPERTS}")
    require(i % GROUP == 0, f"I={i}: must be a multiple of {GROUP}")
    require(z.width % (2 * GROUP) == 0, f"Z={z.width}: must be a multiple of {2 * GROUP}")
    activation = str(step.attribute("activation"))
    require(activation in ("situ", "silu"), f"experts with {activation}")
    groups = z.width // GROUP
    chunk = next(c for c in ((8, 4, 2) if packed else (2, 1)) if groups % c == 0)
    split = next(s for s in range(MAX_SPLIT, 0, -1) if (groups // chunk) % s == 0)
    up = _stream(packed, groups, chunk, WARPS // split * split)
    groups = i // GROUP
    down = _stream(packed, groups, _down_chunk(packed, groups), WARPS)
    at = 0
    places: list[int] = []
    partial = 2 * WARPS // split * split * 512 if split > 1 else 0
    rings = max(WARPS // split * split * up.ring_bytes, WARPS * down.ring_bytes)
    lists = 0 if m == 1 else experts * 12 + WARPS * 4
    for size in (
        max_entries(m, k, experts) * 8,
        m * k * 4,
        m * k * 4,
        4,
        max(partial, m * k * DOWN_COLUMNS * 4),
        max(rings, lists),
    ):
        places.append(at)
        at = -(-(at + size) // 16) * 16
    return ExpertsOptions(
        m=m,
        k=k,
        experts=experts,
        z=z.width,
        i=i,
        activation=activation,
        beta=float(step.attribute("beta") or 0.0),
        linear_beta=float(step.attribute("linear_beta") or 0.0),
        up=up,
        down=down,
        split=split,
        vector=columns_at_once(program, step.results[0]),
        entries_at=places[0],
        pairs_at=places[1],
        weights_at=places[2],
        count_at=places[3],
        sums_at=places[4],
        ring_at=places[5],
        smem=at,
    )


def _stream(packed: bool, groups: int, chunk: int, warps: int) -> Stream:
    """As many slots as the rings may hold; two at least."""
    slot = Stream(packed, groups, chunk, 1).slot_bytes
    return Stream(packed, groups, chunk, max(2, min(MAX_DEPTH, RING_BYTES // (warps * slot))))


def _down_chunk(packed: bool, groups: int) -> int:
    """Groups of a slot of `experts_down`: all of a row, or as many as let the scales of a row's
    part be copied in pieces of at least four bytes."""
    sizes = [c for c in range(1, 9) if groups % c == 0]
    if not packed:
        return max(c for c in sizes if c <= 2)
    if groups <= 8:
        return groups
    fours = [c for c in sizes if c % 4 == 0]
    return max(fours or sizes)


def plan_up(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Units of the longest list, over the teams of a CTA; h in scratch."""
    o = options_of(program, stage)
    units = max_entries(o.m, o.k, o.experts) * o.up_tiles
    return StagePlan(
        items=-(-units // o.teams),
        threads=WARPS * 32,
        smem=o.smem,
        scratch=o.pairs * o.i * 2,
        options=o,
        late=True,
    )


def plan_down(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Tiles of the result; the lists and rings are those of `experts_up`."""
    o = options_of(program, stage)
    return StagePlan(items=o.down_tiles, threads=WARPS * 32, options=o, late=True)
