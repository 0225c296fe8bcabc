"""Projection of few tokens: y[M,N] = x[M,K] W[N,K]^T, the `linear` op for M <= 8.

Moves 2NK bytes of weights, 2MK a CTA of tokens (from L2) and the result; bound by reading the
weights. A tile is 8 weight rows. A CTA is `groups` groups of `split` warps: a group owns a tile,
its warps a slice of K each, summed in warp order. Every warp streams its slice through a ring of
its own in shared memory with 16-byte asynchronous copies, the first of them above the PDL wait;
each lane reads back only what it copied. The rows of W are the B operand of m16n8k16, the tokens
the A operand, so M = 1 to 8 is one kernel and the sum of a token does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from k3fuse.kernels.spec import CompiledKernel, KernelSpec, Shapes, kernel
from k3fuse.target import Target

MAX_TOKENS = 8
TILE = 8  # weight rows, the n of the mma
STEP = 32  # columns that a lane's 16 bytes and its three neighbours cover: two mma
STEP_BYTES = 512  # of a warp
MAX_WARPS = 16
RESIDENT_STEPS = 16
"""Slices up to this many steps keep their tokens in registers (4 a step and lane)."""
RING_BYTES = 192 * 1024
"""Of a CTA. Rings of one warp each read 46 MB on an H200 in 11.0 us with 14 KB a ring, in 11.5
with half; measured with bulk copies of packed weights, not yet with this kernel."""

Trigger = Literal["entry", "last_tile"]


@dataclass(frozen=True)
class ProjectionConfig:
    """ctas in the grid; split: warps that share a tile; groups: tiles a CTA holds at once.

    chunk: steps (of 32 columns) a ring slot; depth: slots of a warp's ring. trigger: where the
    next launch may start: at entry, or when the last tile is being asked for.
    """

    M: int
    N: int
    K: int
    out: Literal["bf16", "f32"]
    ctas: int
    split: int
    groups: int
    chunk: int
    depth: int
    trigger: Trigger

    @property
    def label(self) -> str:
        return f"projection_m{self.M}_n{self.N}_k{self.K}_{self.out}_{self.trigger}"

    @property
    def warps(self) -> int:
        return self.split * self.groups

    @property
    def steps(self) -> int:
        """Steps of a warp's slice; the last slices may hold fewer, or none."""
        steps = -(-self.K // STEP // self.split)
        return -(-steps // self.chunk) * self.chunk

    @property
    def sums_bytes(self) -> int:
        """One of the two buffers of partial sums."""
        return self.warps * self.M * TILE * 4 if self.split > 1 else 0

    @property
    def ring_bytes(self) -> int:
        return self.warps * self.depth * self.chunk * STEP_BYTES

    @property
    def smem(self) -> int:
        return self.ring_bytes + 2 * self.sums_bytes


def supports(shapes: Shapes, target: Target) -> str | None:
    """None, or why not."""
    M, N, K = shapes["M"], shapes["N"], shapes["K"]
    if not target.pdl:
        return f"needs programmatic dependent launch, which {target.name} has not"
    if not 1 <= M <= MAX_TOKENS:
        return f"M={M}: holds 1 to {MAX_TOKENS} tokens"
    if N < TILE or N % TILE:
        return f"N={N}: must be a multiple of {TILE}"
    if K < 2 * STEP or K % (2 * STEP):
        return f"K={K}: must be a multiple of {2 * STEP}"
    if max(M, N) * K >= 2**31:
        return f"N={N}, K={K}: counts elements of a matrix in 32 bits"
    return None


def config(shapes: Shapes, target: Target) -> ProjectionConfig:
    """Enough warps a tile to hold the tokens in registers, and the grid that balances best.

    Takes `out` ("bf16" or "f32") and `trigger` besides the dimensions.
    """
    options = cast("dict[str, Any]", shapes)
    M, N, K = shapes["M"], shapes["N"], shapes["K"]
    steps = K // STEP
    split = next((s for s in (1, 2, 4, 8) if -(-steps // s) <= RESIDENT_STEPS), MAX_WARPS)
    tiles = N // TILE

    def tiles_of_a_cta(groups: int) -> int:
        units = -(-tiles // groups)
        return -(-units // min(units, target.sm_count)) * groups

    groups = min(range(1, MAX_WARPS // split + 1), key=lambda g: (tiles_of_a_cta(g), -g))
    slice_steps = -(-steps // split)
    chunk = next(c for c in (4, 3, 2, 1) if slice_steps % c == 0)
    warps = split * groups
    sums = 2 * warps * M * TILE * 4
    room = min(RING_BYTES, target.smem_per_block - 1024 - sums) // (warps * chunk * STEP_BYTES)
    passes = tiles_of_a_cta(groups) // groups
    return ProjectionConfig(
        M=M,
        N=N,
        K=K,
        out=options.get("out", "bf16"),
        ctas=min(-(-tiles // groups), target.sm_count),
        split=split,
        groups=groups,
        chunk=chunk,
        depth=max(2, min(room, passes * slice_steps // chunk + 1)),
        trigger=options.get("trigger", "entry"),
    )


def compile_projection(config: ProjectionConfig, arch: str) -> CompiledKernel:
    """Needs the CuTe DSL; parameters are w, x and y."""
    from k3fuse.kernels.device.projection import build

    return build(config, arch)


def bytes_moved(shapes: Shapes) -> int:
    """Weights, tokens and a bfloat16 result, each once."""
    M, N, K = shapes["M"], shapes["N"], shapes["K"]
    return 2 * (N * K + M * K + M * N)


@kernel
def projection() -> KernelSpec:
    """The `linear` op for up to eight tokens."""
    return KernelSpec(
        name="projection",
        op="linear",
        dims=("M", "N", "K"),
        supports=supports,
        config=config,
        compile=compile_projection,
        bytes_moved=bytes_moved,
    )
