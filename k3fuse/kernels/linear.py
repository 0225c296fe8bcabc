"""Linear stages: y[M,N] = x[M,K] W[N,K]^T for all maps of one row, with what follows elementwise.

Moves 2NK bytes of weights, bound by reading them. A tile is 8 weight rows, the B operand of
m16n8k16 with tokens as A, so that a token's sums do not depend on the others. Two maps whose
results meet elementwise (gate and up) share a tile, four rows each, so that a lane holds both. Each
warp streams its tiles, or its slice of K of them, through a ring of its own in shared memory with
16-byte asynchronous copies, the first of them above the PDL wait.

Up to 8 tokens a warp takes one tile at a time and both halves of the A operand hold the same
tokens; above, a warp takes `nt` tiles and up to 64 tokens. `mla_value` is the same with the heads'
own slices of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program
from k3fuse.kernels.stages import PUSHES, Stage
from k3fuse.target import Target

TILE = 8  # weight rows, the n of the mma
STEP = 32  # columns that a lane's 16 bytes and its three neighbours cover: two mma
STEP_BYTES = 512  # of a warp and tile
FEW_TOKENS = 8
MAX_TOKENS = 64
SMALL_K = 1024
STAGED_BYTES = 40 * 1024
"""Of tokens that a CTA keeps in shared memory."""

SLOT_STEPS = 33
"""Of a ring slot at most: 16 KB and a bit."""

MAX_SPLIT = 11

SHORT_BYTES = 100 * 1024
"""Ring of a CTA with little work: two fit an SM, so that the next launch can ask early."""

RING_BYTES = 176 * 1024
SHARED_RING_BYTES = 64 * 1024
"""Of a CTA that also holds the experts' rings."""

ROUTING_SMS = 18
"""SMs left to the side streams and to the routing of a launch that also holds the experts."""


def banked(size: int) -> int:
    """Bytes from row to row in shared memory: an odd number of half lines of the 32 banks, so that
    the two rows that eight lanes load from meet no bank twice."""
    return -(-size // 128) * 128 + 64 if size % 128 != 64 else size


@dataclass(frozen=True)
class LinearOptions:
    """bundles: the linear steps that share tiles; starts: first tile of each, and the end.

    heads: rows of W of one head, which reads its own K columns of x (0: all read the same).
    split: warps that share a tile by slices of K; groups: of such warps in a CTA. nt: tiles of a
    warp, mt: blocks of 16 tokens (0: up to 8 tokens). chunk: steps of a warp in a ring slot;
    depth: slots; ahead: slots that are asked for and have not come, at most (up to 8 tokens).
    tokens_in: where a warp finds its tokens: "registers" (of its slice), "shared" (staged by the
    CTA), or "memory".
    """

    m: int
    k: int
    x: int
    bundles: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    heads: int
    split: int
    groups: int
    nt: int
    mt: int
    chunk: int
    depth: int
    ahead: int
    tokens_in: Literal["registers", "shared", "memory"]
    x_width: int

    @property
    def tiles(self) -> int:
        return self.starts[-1]

    @property
    def warps(self) -> int:
        return self.split * self.groups

    @property
    def all_steps(self) -> int:
        return -(-self.k // STEP)

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
        return self.warps * self.tokens * self.nt * TILE * 4


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


def plan(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Warps, tiles and ring of a stage."""
    bundles = bundles_of(program, stage)
    first = program.steps[bundles[0][0]]
    x, w = (program.values[v] for v in first.operands[:2])
    heads = w.shape[1] if first.op == "mla_value" else 0
    m, k = x.rows, w.shape[-1]
    require(m <= MAX_TOKENS, f"{m} rows: a linear stage holds up to {MAX_TOKENS}")
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
    many = any(step.op == "moe_experts" for step in program.steps)
    ring = SHARED_RING_BYTES if many else RING_BYTES
    ctas = target.sm_count - (ROUTING_SMS if many else 0)
    make = _few if m <= FEW_TOKENS else _many
    options = make(m, k, first.operands[0], x.width, bundles, tuple(starts), heads, ring, ctas)
    units = -(-options.tiles // (options.nt * options.groups)) if options.mt else options.tiles
    return StagePlan(
        items=units,
        threads=(options.warps + (options.mt == 0)) * 32,
        smem=options.smem,
        options=options,
    )


def _few(
    m: int,
    k: int,
    x: int,
    x_width: int,
    bundles: tuple[tuple[int, ...], ...],
    starts: tuple[int, ...],
    heads: int,
    ring: int,
    ctas: int,
) -> LinearOptions:
    """Up to 8 tokens: a tile is cut into slots of at most 16 KB, a slot into slices of K."""
    steps = -(-k // STEP)
    chunks = -(-steps // SLOT_STEPS)
    width = -(-steps // chunks)
    split, chunk = min(
        ((s, -(-width // s)) for s in range(1, MAX_SPLIT + 1)),
        key=lambda sc: (sc[1] > 4, sc[0] * sc[1] - width, sc[0]),
    )
    tiles = starts[-1]
    rounds = -(-tiles // min(tiles, ctas))
    groups = min(rounds, max(1, MAX_SPLIT // split), 7)
    depth = ahead = 0
    import os  # EXPERIMENT

    tokens = ""
    for rule in os.environ.get("K3F_LIN", "").split(","):
        part = rule.split(":")
        if part[0] in (str(k), f"{k}m{m}"):
            split, chunk, groups, depth, ahead = (int(v) or d for v, d in zip([*part[1:6], "0", "0", "0"], (split, chunk, groups, 0, 0)))
            tokens = part[6] if len(part) > 6 else ""
    chunks = -(-steps // (split * chunk))
    slot = TILE * banked(split * chunk * STEP * 2)
    total = rounds * chunks
    if total * slot <= SHORT_BYTES:
        ring = min(ring, SHORT_BYTES)
    elif rounds == 1:
        ring = min(ring, SHORT_BYTES)
    depth = depth or max(2, min(total, ring // slot))
    ahead = min(depth, ahead or 4)
    staged = m * banked(chunks * split * chunk * STEP * 2)
    if not tokens:
        if heads:
            tokens = "registers" if chunks * chunk <= 28 else "memory"
        elif m <= 2 or (groups > 1 and staged <= STAGED_BYTES):
            tokens = "shared"
        else:
            tokens = "registers" if chunks * chunk <= 28 else "memory"
    return LinearOptions(
        m=m,
        k=k,
        x=x,
        bundles=bundles,
        starts=starts,
        heads=heads,
        split=split,
        groups=groups,
        nt=1,
        mt=0,
        chunk=chunk,
        depth=depth,
        ahead=ahead,
        tokens_in=tokens,
        x_width=x_width,
    )


def _many(
    m: int,
    k: int,
    x: int,
    x_width: int,
    bundles: tuple[tuple[int, ...], ...],
    starts: tuple[int, ...],
    heads: int,
    ring: int,
    ctas: int,
) -> LinearOptions:
    """9 to 64 tokens. Every CTA reads all tokens from the L2 for each of its units, so a unit has
    as many tiles as still fill the GPU."""
    steps = -(-k // STEP)
    mt = -(-m // 16)
    tiles = starts[-1]
    if k > SMALL_K and heads == 0:
        split, groups = 8, 1
        sizes = (1, 2, 3, 4)
    else:
        split, groups = 1, 8
        sizes = (1, 2)

    def cost(nt: int) -> tuple[int, int]:
        units = -(-tiles // (nt * groups))
        return -(-units // ctas) * nt, -nt

    nt = 1 if heads else min(sizes, key=cost)
    slice_steps = -(-steps // split)
    chunk = next(c for c in (2, 1) if slice_steps % c == 0)
    room = (ring - 64 * 1024) // (split * groups * chunk * nt * STEP_BYTES)
    return LinearOptions(
        m=m,
        k=k,
        x=x,
        bundles=bundles,
        starts=starts,
        heads=heads,
        split=split,
        groups=groups,
        nt=nt,
        mt=mt,
        chunk=chunk,
        depth=max(2, min(room, 8)),
        ahead=0,
        tokens_in="memory",
        x_width=x_width,
    )


def _rows(program: Program, step: int) -> int:
    """Rows of W: the result's columns."""
    return program.values[program.steps[step].results[0]].width
