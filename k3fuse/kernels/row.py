"""RMSNorm of a token's row, alone or behind the sum of the ranks' partial rows.

`rms_norm`: y = x / sqrt(mean(x^2) + eps) * weight, x [M,H] bf16. `slots_rms_norm`: m = the sum over
slots [T,M,H] f32 in order, rounded to bf16; h = m + x, rounded; y = the norm of h; h and y are
results. Moves (4T + 8)H bytes a row and is bound by latency, not bandwidth: a cluster of CTAs
shares a row, so that each thread has all its loads in flight at once, and adds up the squares
through distributed shared memory in a fixed order. The norm's weight is loaded above the PDL wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from k3fuse.kernels.spec import CompiledKernel, KernelSpec, Shapes, kernel
from k3fuse.target import Target

VECTOR = 8  # elements a thread handles at once: 16 bytes of bf16
MAX_THREADS = 512
STAGE_BYTES = 64 * 1024  # of a CTA, for slots on their way
MAX_VECTORS = 4  # of a thread: registers hold the row between its two passes


@dataclass(frozen=True)
class RowConfig:
    """T: slots to add up (0: none, the norm alone). cluster: CTAs a row; threads of each CTA."""

    M: int
    H: int
    T: int
    eps: float
    cluster: int
    threads: int

    @property
    def label(self) -> str:
        stem = f"slots{self.T}_rms_norm" if self.T else "rms_norm"
        return f"{stem}_m{self.M}_h{self.H}"

    @property
    def share(self) -> int:
        """Vectors of a CTA; the last CTA may hold fewer."""
        return -(-self.H // VECTOR // self.cluster)

    @property
    def vectors(self) -> int:
        """Vectors of a thread."""
        return -(-self.share // self.threads)

    @property
    def together(self) -> int:
        """Slots whose copies are in flight at once; 0 without slots."""
        return min(self.T, max(1, STAGE_BYTES // (self.threads * VECTOR * 4)))

    @property
    def board_bytes(self) -> int:
        """One float a warp of the cluster and an mbarrier, up to a multiple of 16."""
        return -(-(self.cluster * self.threads // 32 * 4 + 8) // 16) * 16

    @property
    def smem(self) -> int:
        stage = (self.together * VECTOR * 4 + 16) * self.threads if self.T else 0
        return self.board_bytes + stage


def supports(shapes: Shapes, target: Target) -> str | None:
    """None, or why not."""
    M, H, T = shapes["M"], shapes["H"], shapes.get("T", 1)
    widest = VECTOR * MAX_THREADS * MAX_VECTORS * 8
    if not target.pdl:
        return f"needs programmatic dependent launch and clusters, which {target.name} has not"
    if not 1 <= M <= 65535:
        return f"M={M}: rows are counted by the grid, 1 to 65535"
    if H < VECTOR or H % VECTOR:
        return f"H={H}: must be a multiple of {VECTOR}"
    if widest < H:
        return f"H={H}: a row must fit the registers of a cluster, {widest} elements"
    if not 1 <= T <= 64:
        return f"T={T}: adds up 1 to 64 slots"
    if T * M * H >= 2**31:
        return f"T={T}, M={M}, H={H}: counts elements in 32 bits"
    return None


def config(shapes: Shapes, target: Target) -> RowConfig:
    """CTAs of at least 512 elements, eight at most. Takes `eps` besides the dimensions."""
    options = cast("dict[str, Any]", shapes)
    H = shapes["H"]
    cluster = next(c for c in (8, 4, 2, 1) if c == 1 or 512 * c <= H)
    share = -(-H // VECTOR // cluster)
    return RowConfig(
        M=shapes["M"],
        H=H,
        T=shapes.get("T", 0),
        eps=float(options.get("eps", 1e-5)),
        cluster=cluster,
        threads=min(MAX_THREADS, -(-share // 32) * 32),
    )


def compile_row(config: RowConfig, arch: str) -> CompiledKernel:
    """Needs the CuTe DSL; parameters are weight, x, y, and with slots also slots and h."""
    from k3fuse.kernels.device.row import build

    return build(config, arch)


def bytes_moved(shapes: Shapes) -> int:
    """Slots, x, weight, and one or two results."""
    M, H, T = shapes["M"], shapes["H"], shapes.get("T", 0)
    return H * (2 + M * (4 * T + (6 if T else 4)))


@kernel
def rms_norm() -> KernelSpec:
    """The `rms_norm` op."""
    return KernelSpec(
        "rms_norm", "rms_norm", ("M", "H"), supports, config, compile_row, bytes_moved
    )


@kernel
def slots_rms_norm() -> KernelSpec:
    """The ranks' partial rows, the residual and the norm behind it."""
    return KernelSpec(
        "slots_rms_norm",
        "sum_slots.add.rms_norm",
        ("M", "H", "T"),
        supports,
        config,
        compile_row,
        bytes_moved,
    )
