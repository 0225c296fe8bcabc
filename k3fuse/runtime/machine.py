"""What this machine has: the facts that decide what can run here, as plain data."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees. smem_per_block, free and total in bytes; trouble: why it cannot be
    used, as the driver says."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block: int
    free: int
    total: int
    trouble: str = ""

    @property
    def arch(self) -> str:
        """Compiler target that runs on exactly this capability: "sm_90a"."""
        return "sm_{}{}a".format(*self.capability)


@dataclass(frozen=True)
class Machine:
    """Versions are empty where there is none; no_gpu says why `gpus` is empty, and the fix.

    cuda: what torch was built for; driver_cuda: the newest that the driver takes.
    peers[i][j]: whether GPU i can reach the memory of GPU j.
    """

    python: str
    system: str
    torch: str
    cuda: str
    driver: str
    driver_cuda: str
    cuda_python: str
    cutlass: str
    symmetric_memory: bool
    no_gpu: str
    gpus: tuple[Gpu, ...]
    peers: tuple[tuple[bool, ...], ...]


def probe() -> Machine:
    """Ask this machine. Makes a CUDA context on each GPU, which `free` then does not count."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        python=sys.version.split()[0],
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        driver=_driver(),
        driver_cuda=_driver_cuda(),
        cuda_python=_version("cuda-bindings") or _version("cuda-python"),
        cutlass=_version("nvidia-cutlass-dsl"),
        symmetric_memory=count > 0 and _imports("torch.distributed._symmetric_memory"),
        no_gpu="" if count else _why_no_gpu(),
        gpus=tuple(_gpu(index) for index in range(count)),
        peers=tuple(tuple(_reaches(i, j) for j in range(count)) for i in range(count)),
    )


def _gpu(index: int) -> Gpu:
    cuda: Any = torch.cuda  # the properties are not typed
    facts = cuda.get_device_properties(index)
    trouble, free, total = "", 0, int(facts.total_memory)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # in another's exclusive use, or fallen off the bus
        trouble = _first_line(error)
    return Gpu(
        index=index,
        name=facts.name,
        capability=(facts.major, facts.minor),
        sm_count=facts.multi_processor_count,
        smem_per_block=facts.shared_memory_per_block_optin,
        free=free,
        total=total,
        trouble=trouble,
    )


def _reaches(i: int, j: int) -> bool:
    return i == j or torch.cuda.can_device_access_peer(i, j)


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "torch is built without CUDA: install a CUDA build, see https://pytorch.org"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return f"{_first_line(error)}: mend what nvidia-smi complains about"
    return "torch sees no GPU: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def _driver() -> str:
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        return ""
    return found.group() if found is not None else ""


def _driver_cuda() -> str:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        status, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):  # not installed, or no libcuda
        return ""
    return f"{version // 1000}.{version % 1000 // 10}" if int(status) == 0 else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError):
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
