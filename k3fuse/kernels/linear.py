"""Linear stages: y[M,N] = x[M,K] W[N,K]^T for all maps of one row, with what follows elementwise.

Moves 2NK bytes of weights, bound by reading them. A tile is 8 weight rows, the B operand of
m16n8k16 with tokens as A, so that a token's sums do not depend on the others. Two maps whose
results meet elementwise (gate and up) share a tile, four rows each, so that a lane holds both.

Few tokens, up to 8: a warp of its own streams the tiles of the CTA through a ring of slots, 8 rows
by some columns, with a bulk copy a row; the first slots above the PDL wait, a bounded number at a
time. The other warps each take a slice of a slot's columns, or whole tiles where K is small; both
halves of the A operand hold the same tokens. Tiles left after whole rounds of the grid are shared
out by rows.

Above, up to 64 tokens, beside other stages or with heads (else see `linear_cluster`), a warp takes
`nt` tiles or its slice of K of them, and streams them through a ring of its own with 16-byte
asynchronous copies. `mla_value` is the same with the heads' own slices of x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import ANCHORS, PUSHES, ROW, Stage
from k3fuse.target import Target

TILE = 8  # weight rows, the n of the mma
STEP = 32  # columns that a lane's 16 bytes and its three neighbours cover: two mma
STEP_BYTES = 512  # of a warp and tile
FEW_TOKENS = 8
MAX_TOKENS = 64
SMALL_K = 1024
STAGED_BYTES = 40 * 1024
"""Of tokens that a CTA keeps in shared memory."""

SLOT_STEPS = 66
"""Of a ring slot at most, 33 KB: long pieces of the rows are read faster, and a bulk copy costs the
asking warp 40 cycles."""

SHORT_SLOT_STEPS = 33
"""The same for a CTA of one tile beside other structures, which is done sooner after the last slot
if that is small: 13 MB behind a private row at M=1 in 6.0 us, not 6.7."""

LEAST_CLUSTER = 4
"""CTAs that split K for 3 to 8 tokens, at least; each has the columns of a slot."""

MOST_STAGED_BYTES = 120 * 1024
MANY_STAGED_BYTES = 104 * 1024
MAX_SPLIT = 11
WARP_STEPS = 28
"""Of a slice at most, so that its tokens fit the registers of a warp."""

CROWDED_STEPS = 12
"""The same in a launch with other structures, whose threads leave fewer registers for each."""

AHEAD_BYTES = 70 * 1024
"""Asked for and not come: enough for the memory system, and no queue before what others ask. Of
88 KB the 46 MB behind a private row take 14.7 us instead of 14.1, of 40 KB 17."""

LONG_AHEAD_BYTES = 150 * 1024
"""The same for a CTA of many tiles, beside which there is little else."""

SHORT_BYTES = 100 * 1024
"""Of weights of a CTA with little work: a warp takes whole tiles, all of them in the ring."""

OTHER_BYTES = 9 * 1024
"""Shared memory that is no ring, no tokens and no private row."""

FAMILY = ("linear", "mla_value")
RING_BYTES = 176 * 1024
SHARED_RING_BYTES = 64 * 1024
"""Of a CTA that also holds the experts' rings."""

EXPERTS_SMS = 10
"""SMs that a launch that also holds the experts leaves to the side streams."""


def banked(size: int) -> int:
    """Bytes from row to row in shared memory: an odd number of half lines of the 32 banks, so that
    the two rows that eight lanes load from meet no bank twice."""
    return -(-size // 128) * 128 + 64 if size % 128 != 64 else size


def parts_of(tiles: int, ctas: int) -> int:
    """Parts of a tile, by rows, in which the CTAs share the tiles left after whole rounds, so that
    none has much more to read than the others. A part costs a row or so by itself."""
    left = tiles % ctas
    return min((1, 2, 4), key=lambda p: (-(-left * p // ctas) * (TILE // p + 1), p))


@dataclass(frozen=True)
class Maps:
    """What a stage computes. x: the tokens, m rows of x_width; k: columns of W.

    bundles: the linear steps that share tiles; starts: first tile of each, and the end. heads:
    rows of W of one head, which reads its own K columns of x (0: all read the same).
    """

    m: int
    k: int
    x: int
    x_width: int
    bundles: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    heads: int

    @property
    def tiles(self) -> int:
        return self.starts[-1]

    @property
    def all_steps(self) -> int:
        return -(-self.k // STEP)


@dataclass(frozen=True)
class Place:
    """What a stage finds. crowded: whether other structures leave fewer registers; beside: bytes of
    a private row that it reads; ring: bytes of it at most; room: of it, tokens and private row.
    """

    ctas: int
    crowded: bool
    beside: int
    ring: int
    room: int


@dataclass(frozen=True)
class LinearOptions(Maps):
    """How it is computed.

    split: warps that share a tile by slices of K; groups: of such warps in a CTA. nt: tiles of a
    warp, mt: blocks of 16 tokens (0: up to 8 tokens). chunk: steps of a warp in a ring slot;
    terms: sums of a warp and tile: one, or one a slot. depth: slots; ahead: slots that are asked
    for and have not come, at most (up to 8 tokens).
    tokens_in: where a warp finds its tokens: "registers" (of its slice), "shared" (staged by the
    CTA), "row" (a private row, in shared memory too), or "memory".
    """

    split: int
    groups: int
    nt: int
    mt: int
    chunk: int
    terms: int
    depth: int
    ahead: int
    tokens_in: Literal["registers", "shared", "row", "memory"]

    @property
    def warps(self) -> int:
        return self.split * self.groups

    @property
    def chunks(self) -> int:
        """Ring slots of a tile; the last may reach beyond K."""
        return -(-self.all_steps // (self.split * self.chunk))

    @property
    def steps(self) -> int:
        """Steps of a warp's slice, whole chunks; the last slices may hold fewer, or none."""
        return self.chunks * self.chunk

    @property
    def ragged(self) -> bool:
        """Whether some lane of some step lies beyond K."""
        return self.k % STEP != 0 or self.steps * self.split != self.all_steps

    @property
    def row_bytes(self) -> int:
        """Up to 8 tokens: from one weight row of a slot to the next."""
        return banked(self.split * self.chunk * STEP * 2)

    @property
    def slot_bytes(self) -> int:
        return self.chunk * self.nt * STEP_BYTES if self.mt else TILE * self.row_bytes

    @property
    def ring_bytes(self) -> int:
        slots = self.warps * self.depth if self.mt else self.depth
        return slots * self.slot_bytes

    @property
    def token_bytes(self) -> int:
        """From one staged token to the next."""
        return banked(self.chunks * self.split * self.chunk * STEP * 2)

    @property
    def staged_bytes(self) -> int:
        """Shared memory of the tokens."""
        return self.m * self.token_bytes if self.tokens_in == "shared" else 0

    @property
    def smem(self) -> int:
        """Ring, sums, tokens, and two 8-byte barriers a slot."""
        barriers = 0 if self.mt else 16 * self.depth
        return self.ring_bytes + self.boards * self.sums_bytes + self.staged_bytes + barriers

    @property
    def tokens(self) -> int:
        """Rows of the partial sums."""
        return 16 * self.mt if self.mt else self.m

    @property
    def boards(self) -> int:
        """Buffers of partial sums."""
        return 2 if self.mt == 0 else 1

    @property
    def sums_bytes(self) -> int:
        """Partial sums of one tile, or nt tiles, of all warps."""
        return self.warps * self.terms * self.tokens * self.nt * TILE * 4


def bundles_of(program: Program, stage: Stage) -> tuple[tuple[int, ...], ...]:
    """The linear steps of a stage, those together whose results meet in its elementwise steps."""
    steps = [i for i in stage.steps if program.steps[i].op in ("linear", "mla_value")]
    home = {program.steps[i].results[0]: {i} for i in steps}
    for i in stage.steps:
        step = program.steps[i]
        if i in steps or step.op in PUSHES:
            continue
        met: set[int] = set()
        for operand in step.operands:
            met |= home.get(operand, set())
        for value in [*(v for v, s in home.items() if s & met), *step.results]:
            home[value] = met
    found: list[tuple[int, ...]] = []
    for i in steps:
        together = tuple(sorted(home[program.steps[i].results[0]]))
        if together not in found:
            found.append(together)
    return tuple(found)


def plan_few(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Up to 8 tokens."""
    return _plan(program, stage, target, _few, FEW_TOKENS)


def plan_many(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Up to 64 tokens."""
    return _plan(program, stage, target, _many, MAX_TOKENS)


def maps_of(program: Program, stage: Stage, most: int) -> Maps:
    """What a stage of up to `most` tokens computes."""
    bundles = bundles_of(program, stage)
    first = program.steps[bundles[0][0]]
    x, w = (program.values[v] for v in first.operands[:2])
    heads = w.shape[1] if first.op == "mla_value" else 0
    m, k = x.rows, w.shape[-1]
    require(m <= most, f"{m} rows: holds up to {most}")
    require(k % 8 == 0, f"K={k}: must be a multiple of 8, for 16-byte loads")
    require(heads % TILE == 0, f"{heads} rows a head: must be a multiple of {TILE}")
    starts = [0]
    for bundle in bundles:
        require(len(bundle) <= 2, f"{len(bundle)} maps meet elementwise: a tile holds two")
        rows = [_rows(program, i) for i in bundle]
        require(len(set(rows)) == 1, "maps of different widths meet elementwise")
        require(rows[0] * k < 2**31, f"N={rows[0]}, K={k}: counts elements in 32 bits")
        for i in bundle:
            held = [program.values[v] for v in program.steps[i].operands]
            require(all(h.dtype == "bf16" for h in held), "linear maps of other dtypes than bf16")
        starts.append(starts[-1] + -(-rows[0] * len(bundle) // TILE))
    for i in stage.steps:
        step = program.steps[i]
        if step.op == "push_chunks":
            chunk = program.values[step.operands[0]].width // program.tp
            pairs = all(len(b) == 1 for b in bundles)
            require(not pairs or chunk % 2 == 0, f"{chunk} columns a rank: must be even")
    return Maps(m, k, first.operands[0], x.width, bundles, tuple(starts), heads)


def _plan(
    program: Program,
    stage: Stage,
    target: Target,
    make: Callable[[Maps, Place], LinearOptions],
    most: int,
) -> StagePlan:
    """Warps, tiles and ring of a stage."""
    maps = maps_of(program, stage, most)
    many = any(step.op == "moe_experts" for step in program.steps)
    crowded = any(
        step.op in ROW or (step.op in ANCHORS and step.op not in FAMILY) for step in program.steps
    )
    place = Place(
        ctas=target.sm_count - (EXPERTS_SMS if many else 0),
        crowded=crowded,
        beside=stage.beside,
        ring=SHARED_RING_BYTES if many else RING_BYTES,
        room=target.smem_per_block - OTHER_BYTES,
    )
    options, ctas = make(maps, place), place.ctas
    units = -(-options.tiles // (options.nt * options.groups)) if options.mt else options.tiles
    if units < ctas and options.mt == 0:
        units *= parts_of(units, ctas)
    return StagePlan(
        items=units,
        threads=(options.warps + (options.mt == 0)) * 32,
        askers=32 * (options.mt == 0),
        smem=options.smem,
        options=options,
    )


def _few(maps: Maps, place: Place) -> LinearOptions:
    """Up to 8 tokens: a tile is cut into slots by columns, a slot into slices of the warps."""
    ctas, crowded, beside = place.ctas, place.crowded, place.beside
    m, heads, steps, tiles = maps.m, maps.heads, maps.all_steps, maps.tiles
    rounds = -(-tiles // min(tiles, ctas))
    chunks = -(-steps // (SHORT_SLOT_STEPS if rounds == 1 and crowded else SLOT_STEPS))
    width = -(-steps // chunks)
    split, chunk = min(
        ((s, -(-width // s)) for s in range(1, MAX_SPLIT + 1)),
        key=lambda sc: (
            sc[1] * chunks > WARP_STEPS,
            sc[0] * sc[1] - width,
            abs(sc[1] - (9 if rounds > 1 else 4)),
        ),
    )
    groups = 1
    most = CROWDED_STEPS if crowded else WARP_STEPS
    if rounds > 1 and steps <= most and rounds * steps * STEP_BYTES <= SHORT_BYTES:
        split, chunk, groups = 1, steps, min(rounds, 8)  # a warp takes tiles by itself
    elif m <= 4 and chunks == 1 and rounds >= 4 and split % 2 == 0 and 2 * chunk <= WARP_STEPS:
        split, chunk, groups = split // 2, 2 * chunk, 2
    chunks = -(-steps // (split * chunk))
    # A cluster that splits K for more tokens adds up CTA by CTA: a token has the same bits there.
    terms = chunks if chunks >= LEAST_CLUSTER and not crowded and heads == 0 else 1
    slot = TILE * banked(split * chunk * STEP * 2)
    total = rounds * chunks
    staged = m * banked(chunks * split * chunk * STEP * 2)
    registers = chunks * chunk <= (WARP_STEPS // 2 if crowded else WARP_STEPS)
    fits = staged <= (STAGED_BYTES if groups > 1 or registers else MOST_STAGED_BYTES)
    if beside:
        tokens_in = "row"
    elif heads == 0 and (m <= 2 or (fits and (groups > 1 or not registers))):
        tokens_in, beside = "shared", staged
    else:
        tokens_in = "registers" if registers else "memory"
    ring = min(place.ring, place.room - beside)
    depth = max(2, min(total, ring // slot))
    ahead = max(1, min(depth, (AHEAD_BYTES if rounds <= 4 else LONG_AHEAD_BYTES) // slot))
    # A group waits for a slot by its parity, so what was in the slot before must have come: it was
    # the group's own last tile, or was asked for so long before that it came before that one.
    groups = min(groups, max(1, depth // chunks))
    if groups > 1 and depth > groups * chunks:
        ahead = min(ahead, depth - groups * chunks)
    return LinearOptions(
        **vars(maps),
        split=split,
        groups=groups,
        nt=1,
        mt=0,
        chunk=chunk,
        depth=depth,
        ahead=ahead,
        terms=terms,
        tokens_in=tokens_in,
    )


def _many(maps: Maps, place: Place) -> LinearOptions:
    """9 to 64 tokens. Every CTA reads all tokens from the L2 for each of its units, so a unit has
    as many tiles as still fill the GPU."""
    ring, ctas, crowded = place.ring, place.ctas, place.crowded
    m, k, heads, steps, tiles = maps.m, maps.k, maps.heads, maps.all_steps, maps.tiles
    mt = -(-m // 16)
    small = k <= SMALL_K or heads > 0
    groups = min(8, -(-tiles // ctas)) if small else 1
    split = min(8 // groups, steps)

    def cost(nt: int) -> tuple[int, int]:
        """Rows that the busiest CTA reads, of tokens and of weights."""
        units = -(-tiles // (nt * groups))
        return -(-units // ctas) * (m * (not small) + nt * groups * TILE), nt

    staged = m * banked(-(-steps // split) * split * STEP * 2)
    shared = small and heads == 0 and staged <= MANY_STAGED_BYTES
    most = 1 if heads else 16 // mt if not small else 2
    nt = min(range(1, most + 1), key=cost)
    if crowded:
        nt = min(nt, 12 // mt)
    slice_steps = -(-steps // split)
    # Registers: a step of tokens and the sums of a warp. Rows before it leave fewer.
    large = nt * mt > (3 if crowded and shared else 8)
    chunk = 2 if slice_steps % 2 == 0 and not large else 1
    if shared:
        staged = m * banked(-(-slice_steps // chunk) * chunk * split * STEP * 2)
        ring = min(ring, 208 * 1024 - staged)
    room = (ring - 64 * 1024) // (split * groups * chunk * nt * STEP_BYTES)
    return LinearOptions(
        **vars(maps),
        split=split,
        groups=groups,
        nt=nt,
        mt=mt,
        chunk=chunk,
        depth=max(2, min(room, 8)),
        ahead=0,
        terms=1,
        tokens_in="shared" if shared else "memory",
    )


def _rows(program: Program, step: int) -> int:
    """Rows of W: the result's columns."""
    return program.values[program.steps[step].results[0]].width
