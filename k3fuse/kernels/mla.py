"""Stages of latent attention: the cache append, the absorbed query, and split-KV decoding.

The cache is paged, [pages, page_size, kv_lora + rope] in bfloat16: one key row of a position for
all heads, its first kv_lora columns also the value. Decoding is bound by reading it.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import ITEMSIZE, Program, Step
from k3fuse.kernels.rowwise import width_of
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

WARPS = 8
"""Warps that work on an item of every stage here; more only help to load, or idle."""

TILE = 32
"""Positions that a CTA handles at once; splits are whole tiles."""

QUERIES = 16
"""Rows of a tensor-core product: the (row, head) pairs of one request that share a tile."""

MOST_STAGES = 4
"""Tiles in flight: 4 x 37 KB of shared memory for rows of 576 columns."""

MOST_REQUESTS = 256
COLUMNS = 64
"""Columns of an item of the absorbed query: two a lane, 128 bytes of a weight row."""

TOKENS = 8
MERGE_COLUMNS = 128
ENOUGH_ITEMS = 264
"""Items of the merge above which one goes over all columns of a head, to look up its splits once:
two for each SM."""

LEAST_BYTES, MOST_BYTES = 4096, 2 << 20
"""Weights that are worth a prefetch into the L2, and that do not disturb others."""


@dataclass(frozen=True)
class AppendOptions:
    """width: neighbouring columns of a thread."""

    width: int


@dataclass(frozen=True)
class AbsorbOptions:
    """tokens: rows of an item. unroll: weight rows that a warp loads at once. ahead: whether
    weights are asked for above the PDL wait."""

    tokens: int
    unroll: int
    ahead: bool


@dataclass(frozen=True)
class AttendOptions:
    """splits: at most so many parts of a context, by the largest context alone, so that the bits
    of a row do not depend on the batch. groups: of QUERIES queries, for a request. pitch: bytes
    from position to position in shared memory. stages: tiles in flight. tiles: 8-column tiles of
    a warp in the second product. stats: bytes of scratch before the (max, sum) pairs."""

    splits: int
    groups: int
    pitch: int
    stages: int
    tiles: int
    stats: int

    @property
    def board(self) -> int:
        """Bytes of shared memory for scores, weights and factors, behind queries and tiles."""
        return 2 * QUERIES * SCORE_PITCH + 2 * QUERIES * WEIGHT_PITCH + QUERIES * 4


SCORE_PITCH = (TILE + 8) * 4
WEIGHT_PITCH = (TILE + 8) * 2


@dataclass(frozen=True)
class MergeOptions:
    """splits, stats: as of the attend stage. blocks: MERGE_COLUMNS-column blocks of an item."""

    splits: int
    stats: int
    blocks: int


def plan_append(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Vectors of the new rows, spread over all threads: bound by latency."""
    step = anchor(program, stage, "mla_append")
    require(
        len(stage.steps) == 1,
        "a row of the cache that is also written elsewhere",
    )
    cache = program.values[step.operands[0]]
    require(cache.dtype == "bf16", f"a latent cache of {cache.dtype}")
    width = width_of(program, stage)
    rows = program.values[step.operands[1]].rows
    return StagePlan(
        items=-(-rows * cache.shape[2] // width // 128),
        threads=128,
        options=AppendOptions(width),
    )


def plan_absorb(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Per head q W_UK: 64 columns and up to 8 tokens an item, the sum over nope cut by warps.

    Bytes: the weight, 128 KiB a head at 128 x 512; then bound by latency below a few heads.
    """
    step = anchor(program, stage, "mla_absorb_query")
    q, weight = (program.values[v] for v in step.operands)
    heads, nope, rank = weight.shape
    rope = int(step.attribute("rope_dim") or 0)
    require(q.dtype == weight.dtype == "bf16", f"absorbs {q.dtype} with {weight.dtype}")
    require(
        nope % WARPS == 0 and rank % 8 == 0 and rope % 8 == 0,
        f"heads of {nope} + {rope} into {rank}: not multiples of 8",
    )
    tokens = min(TOKENS, q.rows)
    own = nope // WARPS
    staged = -(-nope * staged_tokens(tokens) * 4 // 128) * 128
    return StagePlan(
        items=heads * -(-rank // COLUMNS) * -(-q.rows // tokens),
        threads=WARPS * 32,
        smem=staged + WARPS * tokens * COLUMNS * 4,
        options=AbsorbOptions(
            tokens,
            max(n for n in range(1, 17) if own % n == 0),
            LEAST_BYTES <= weight.bytes <= MOST_BYTES,
        ),
    )


def staged_tokens(tokens: int) -> int:
    """Tokens side by side in shared memory: a power of two, read as one vector."""
    return next(n for n in (1, 2, 4, 8) if n >= tokens)


def anchor(program: Program, stage: Stage, op: str) -> Step:
    """The stage's step of that op."""
    return next(program.steps[i] for i in stage.steps if program.steps[i].op == op)


@dataclass(frozen=True)
class Attention:
    """Sizes of an attend step. context: the most positions that a block table holds."""

    rows: int
    requests: int
    heads: int
    rank: int
    rope: int
    context: int
    pages: int
    page_size: int
    per_request: int

    @property
    def width(self) -> int:
        """Columns of a cache row and of a query."""
        return self.rank + self.rope


def attention_of(program: Program, step: Step) -> Attention:
    """Read the sizes."""
    q, cache, table = (program.values[v] for v in step.operands[:3])
    rank, rope = int(step.attribute("kv_lora") or 0), int(step.attribute("rope_dim") or 0)
    return Attention(
        rows=q.rows,
        requests=table.rows,
        heads=q.width // (rank + rope),
        rank=rank,
        rope=rope,
        context=table.width * cache.shape[1],
        pages=cache.shape[0],
        page_size=cache.shape[1],
        per_request=int(step.attribute("rows_per_request") or 1),
    )


def splits_of(context: int) -> int:
    """Parts of the longest context. 64 fill half of the SMs for one request and keep the merge
    short; from 16k positions on, reading counts most and all SMs shall read."""
    return min(64 if context < 16384 else 120, -(-context // TILE))


def _stats_offset(sizes: Attention) -> int:
    return sizes.rows * sizes.heads * splits_of(sizes.context) * sizes.rank * 4


def plan_attend(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Softmax-weighted sums over one part of a context for 16 queries of a request.

    Both products run on tensor cores, so that up to 16 heads cost the same; bytes: the cache rows
    once for every 16 queries, 1,152 a position at 512 + 64 columns.
    """
    step = anchor(program, stage, "mla_attend_latent")
    sizes = attention_of(program, step)
    for value in (*step.operands[:2], *step.results):
        require(program.values[value].dtype == "bf16", "attention of other than bfloat16")
    require(
        sizes.rank % 8 == 0 and sizes.rope % 8 == 0,
        f"cache rows of {sizes.rank} + {sizes.rope} columns: not multiples of 8",
    )
    require(sizes.requests <= MOST_REQUESTS, f"attention of over {MOST_REQUESTS} requests")
    columns = sizes.rank // 8
    tiles = next(n for n in range(-(-columns // WARPS), columns + 1) if columns % n == 0)
    require(tiles <= 16, f"mixes latents of {sizes.rank} columns")
    splits = splits_of(sizes.context)
    longest = -(-sizes.context // (splits * TILE))
    groups = -(-sizes.per_request * sizes.heads // QUERIES)
    pitch = padded(sizes.width) * ITEMSIZE["bf16"] + 16
    options = AttendOptions(
        splits=splits,
        groups=groups,
        pitch=pitch,
        stages=min(MOST_STAGES, longest),
        tiles=tiles,
        stats=_stats_offset(sizes),
    )
    return StagePlan(
        items=sizes.requests * groups * splits,
        threads=WARPS * 32,
        smem=(QUERIES + options.stages * TILE) * pitch + options.board,
        scratch=options.stats + sizes.rows * sizes.heads * splits * 8,
        options=options,
    )


def padded(width: int) -> int:
    """Columns of a row in shared memory: each half of the warps takes every second block of 32.
    With 16 bytes after it, neighbouring rows lie in different banks."""
    return -(-width // 64) * 64


def plan_merge(program: Program, stage: Stage, target: Target) -> StagePlan:
    """The parts of each row and head put together: a warp takes every eighth part."""
    step = anchor(program, stage, "mla_attend_latent")
    sizes = attention_of(program, step)
    blocks = -(-sizes.rank // MERGE_COLUMNS)
    pairs = sizes.rows * sizes.heads
    taken = blocks if pairs * blocks > ENOUGH_ITEMS else 1
    return StagePlan(
        items=pairs * blocks // taken,
        threads=WARPS * 32,
        smem=WARPS * MERGE_COLUMNS * 4,
        options=MergeOptions(splits_of(sizes.context), _stats_offset(sizes), taken),
    )
