"""What a kernel is to the rest of k3fuse: supported shapes, a configuration, a compiled result.

A kernel says what it can do, never whether it is wanted: preference is `PREFERENCE`, one table in
order, each row with the measurement that set it. Nothing here needs the CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from k3fuse.errors import InputError
from k3fuse.target import Target

Access = Literal["weight", "activation", "state", "mailbox", "host"]
"""How a parameter is used; only weights may be read above the PDL wait."""

Shapes = Mapping[str, int]
"""Size of each dimension a kernel names, such as {"M": 1, "N": 3216, "K": 7168}."""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter, in launch order. kind: "u64" for a device pointer, "i32", "f32"."""

    name: str
    kind: str
    access: Access


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin with all that launching it takes; a launcher needs nothing of the compiler.

    grid, block and cluster count CTAs or threads in (x, y, z); cluster is None without one. smem:
    dynamic shared memory of a CTA in bytes. pdl: made for programmatic dependent launch.
    registers a thread, stack: bytes a thread of local memory (spills), code: bytes of machine code.
    """

    name: str
    arch: str
    symbol: str
    cubin: bytes
    ptx: str
    params: tuple[Parameter, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    smem: int
    pdl: bool
    registers: int
    stack: int
    code: int

    def launch_facts(self) -> dict[str, Any]:
        """All but the code, as JSON takes it."""
        facts = asdict(self)
        del facts["cubin"], facts["ptx"]
        return facts


class Config(Protocol):
    """A frozen dataclass of plain scalars: picklable, and part of the cache key."""

    @property
    def label(self) -> str:
        """A name for the compiled kernel, a valid C identifier."""
        ...


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one op.

    op: the op, or the chain of ops joined by dots, that it computes. dims: the dimensions that
    `supports` and `config` expect, in the order of the command line. supports gives None or the
    reason against; config raises InputError with that reason; compile needs the CuTe DSL, no GPU.
    bytes_moved: least bytes read and written by one launch.
    """

    name: str
    op: str
    dims: tuple[str, ...]
    supports: Callable[[Shapes, Target], str | None]
    config: Callable[[Shapes, Target], Any]
    compile: Callable[[Any, str], CompiledKernel]
    bytes_moved: Callable[[Shapes], int]

    def configure(self, shapes: Shapes, target: Target, **options: object) -> Any:
        """The configuration for a shape; `options` replace fields of it. InputError if refused."""
        reason = self.supports(shapes, target)
        if reason is not None:
            raise InputError(f"kernel {self.name}: {reason}")
        return self.config({**shapes, **options}, target)  # pyright: ignore[reportArgumentType]


_REGISTRY: dict[str, KernelSpec] = {}


def kernel(spec: Callable[[], KernelSpec]) -> KernelSpec:
    """Register the kernel that the decorated function describes."""
    made = spec()
    if made.name in _REGISTRY:
        raise ValueError(f"kernel {made.name} is registered twice")
    _REGISTRY[made.name] = made
    return made


def registry() -> Mapping[str, KernelSpec]:
    """Every kernel by name."""
    from k3fuse.kernels import projection, row  # noqa: F401  # pyright: ignore[reportUnusedImport]

    return _REGISTRY


def get_kernel(name: str) -> KernelSpec:
    """The kernel of that name; InputError lists the known ones."""
    kernels = registry()
    if name not in kernels:
        raise InputError(f"unknown kernel {name!r}; known: {', '.join(sorted(kernels))}")
    return kernels[name]


@dataclass(frozen=True)
class Preference:
    """One row: for `op`, try `kernel`; `measured` is what put it in its place."""

    op: str
    kernel: str
    measured: str


PREFERENCE = (
    Preference(
        "linear", "projection", "the only one; H200 M=1: 3216x7168 11.1 us, 7168x768 5.1 us"
    ),
    Preference("rms_norm", "rms_norm", "the only one; H200: 1.2 us at M=1, 1.4 us at M=8, H=7168"),
    Preference(
        "sum_slots.add.rms_norm", "slots_rms_norm", "the only one; H200: 3.6 us, 16 slots of 7168"
    ),
)
"""Kernels of each op, best first. Measurements: benchmarks/results/kernels_h200.json."""


@dataclass(frozen=True)
class Choice:
    """The kernel taken (None: no kernel does it) and why each one before it was not."""

    spec: KernelSpec | None
    refusals: tuple[tuple[str, str], ...]


def choose(op: str, shapes: Shapes, target: Target) -> Choice:
    """The first kernel of the table that supports the shapes."""
    refusals: list[tuple[str, str]] = []
    for row in PREFERENCE:
        if row.op == op:
            reason = get_kernel(row.kernel).supports(shapes, target)
            if reason is None:
                return Choice(get_kernel(row.kernel), tuple(refusals))
            refusals.append((row.kernel, reason))
    return Choice(None, tuple(refusals))
