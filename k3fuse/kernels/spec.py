"""What a compiled kernel is to the rest of k3fuse. Nothing here needs the CuTe DSL."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Access = Literal["weight", "activation", "state", "mailbox", "host"]
"""How a parameter is used; only weights may be read above the PDL wait."""


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
    dynamic shared memory of a CTA in bytes. pdl: made for programmatic dependent launch. scratch:
    bytes of global memory that parameter "scratch" must point to; "control" takes 256, zeroed once.
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
    scratch: int = 0

    def launch_facts(self) -> dict[str, Any]:
        """All but the code, as JSON takes it."""
        facts = asdict(self)
        del facts["cubin"], facts["ptx"]
        return facts
