"""Which kernel does each launch of a plan, and on which memory: pure data, like the plan.

With the plan and the manifest of the kernels this is all that a runtime needs to bind a step: it
allocates what the plan and `Memory` name, gives every parameter its argument, and launches.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3fuse.errors import InputError
from k3fuse.runtime.plan import Access, Launch, Plan

SELECTION_VERSION = 1
KERNELS_FORMAT = 2
"""Of the manifest of a folder of kernels, which `runtime.launcher` reads too."""

CONTROL_BYTES = 256
STEP_BYTES = 8
NO_WORD = -1

_STRICT = ConfigDict(extra="forbid", strict=True)
_Data = TypeVar("_Data")

Role = Literal[
    "memory",  # u64: address of the value in `storage`, at `offset`
    "mailbox",  # u64: first byte of the rank's own ring `storage`
    "peers",  # u64: table of tp u64, the first byte of ring `storage` on each rank
    "scratch",  # u64: the scratch memory of the launch's stream
    "control",  # u64: the launch's word of the control memory, zero before the first step
    "step",  # u64: an i64, how many steps came before this one; equal on all ranks
    "errors",  # u64: the error record of a debug build
    "rank",  # i32: of this process
    "use",  # i32: which use of ring `storage` in the step: the number `use`
    "launch",  # i32: position of the launch in the plan
]
"""What a kernel's parameter stands for."""


@dataclass(frozen=True)
class Argument:
    """What one parameter of a kernel gets. value, storage, offset and use are the plan's names and
    numbers (see `Operand`)."""

    parameter: str
    role: Role
    value: str = ""
    storage: str = ""
    offset: int = 0
    use: int = 0

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class LaunchKernel:
    """The kernel of one launch, or why there is none. control: its word of the control memory, or
    NO_WORD. Arguments stand in the order of the kernel's parameters."""

    launch: str
    kernel: str = ""
    reason: str = ""
    control: int = NO_WORD
    arguments: tuple[Argument, ...] = ()

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class KernelMemory:
    """What a runtime allocates beside the plan's memory.

    scratch: bytes by stream; launches of a stream share them, since each waits for the one before
    it touches them. control_words: of CONTROL_BYTES each, zeroed once. step: whether any kernel
    reads the step counter. peer_tables: rings that some launch of this bucket pushes to.
    """

    scratch: tuple[tuple[str, int], ...]
    control_words: int
    step: bool
    peer_tables: tuple[str, ...]

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class Selection:
    """The launches of one plan, in its order, with their kernels."""

    target: str
    plan_hash: str
    launches: tuple[LaunchKernel, ...]
    memory: KernelMemory
    version: int = SELECTION_VERSION

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    @property
    def without(self) -> tuple[LaunchKernel, ...]:
        """Launches that no kernel does."""
        return tuple(item for item in self.launches if not item.kernel)

    def to_json(self) -> str:
        """Deterministic text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Resources:
    """What the proofs need to know of a launch's kernel. grid and cluster in CTAs, smem in bytes a
    CTA; spins: its CTAs wait for one another, so that all must be resident together."""

    grid: int
    cluster: int
    threads: int
    smem: int
    spins: bool


@dataclass(frozen=True)
class KernelParameter:
    """A parameter as the cubin has it. kind: "u64" for an address, or "i32"."""

    name: str
    kind: str
    access: Access

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class KernelStage:
    """What all CTAs do before they go on. family: what does it; refused: those that were preferred,
    with their reasons. after_barriers: grid barriers before it; private: every CTA does all of it
    for itself."""

    kind: str
    family: str
    refused: tuple[str, ...]
    ops: tuple[str, ...]
    after_barriers: int
    private: bool

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a bundle: what the launcher needs, what the proofs need, what people ask.

    registers a thread, stack: bytes a thread of local memory (spills), code: bytes of machine code.
    scratch: bytes of global memory that pass between stages. audited: the PTX that the cubin was
    made from passed the audit.
    """

    name: str
    arch: str
    symbol: str
    cubin: str
    sha256: str
    params: tuple[KernelParameter, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    smem: int
    pdl: bool
    registers: int
    stack: int
    code: int
    scratch: int
    barriers: int
    spins: bool
    stages: tuple[KernelStage, ...]
    audited: bool

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    @property
    def resources(self) -> Resources:
        cluster = 1 if self.cluster is None else self.cluster[0]
        return Resources(self.grid[0], cluster, self.block[0], self.smem, self.spins)


@dataclass(frozen=True)
class KernelManifest:
    """kernels/manifest.json of a bundle. compiler: versions that made the cubins."""

    compiler: str
    kernels: tuple[KernelRecord, ...]
    format: int = KERNELS_FORMAT

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    def to_json(self) -> str:
        """Deterministic text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    def by_name(self) -> dict[str, KernelRecord]:
        return {record.name: record for record in self.kernels}


def launch_resources(
    selection: Selection, kernels: Mapping[str, KernelRecord]
) -> dict[str, Resources]:
    """Resources by launch name, for launches that have a kernel."""
    return {
        item.launch: kernels[item.kernel].resources for item in selection.launches if item.kernel
    }


def check_selection(selection: Selection, plan: Plan, kernels: Mapping[str, KernelRecord]) -> None:
    """InputError unless the selection is one of this plan's launches, from these kernels."""
    if selection.plan_hash != plan.hash():
        raise InputError("the selection of kernels was made for another plan: compile again")
    names = [launch.name for launch in plan.launches]
    if [item.launch for item in selection.launches] != names:
        raise InputError("the selection of kernels does not list the plan's launches")
    for launch, item in zip(plan.launches, selection.launches, strict=True):
        if item.kernel:
            _check_launch(launch, item, kernels)


def _check_launch(launch: Launch, item: LaunchKernel, kernels: Mapping[str, KernelRecord]) -> None:
    if item.kernel not in kernels:
        raise InputError(f"@{launch.name}: there is no kernel {item.kernel}")
    expected = [parameter.name for parameter in kernels[item.kernel].params]
    if [argument.parameter for argument in item.arguments] != expected:
        raise InputError(
            f"@{launch.name}: kernel {item.kernel} takes {', '.join(expected)}, which are not the "
            "arguments that it is given"
        )


def read_selection(text: str, where: str) -> Selection:
    """Read what `Selection.to_json` writes; InputError names `where` and what is wrong."""
    return _read(_SELECTION, text, where, "version", SELECTION_VERSION)


def read_kernels(text: str, where: str) -> KernelManifest:
    """Read what `KernelManifest.to_json` writes; InputError names `where` and what is wrong."""
    return _read(_KERNELS, text, where, "format", KERNELS_FORMAT)


def _read(adapter: TypeAdapter[_Data], text: str, where: str, field: str, known: int) -> _Data:
    try:
        raw: object = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); compile again") from None
    found = cast("dict[str, object]", raw).get(field) if isinstance(raw, dict) else None
    if found != known:
        raise InputError(f"{where}: {field} {found!r}, this k3fuse reads {known}: compile again")
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {place}: {first['msg']}; compile again") from None


_SELECTION = TypeAdapter(Selection)
_KERNELS = TypeAdapter(KernelManifest)
