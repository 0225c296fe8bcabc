"""Load compiled kernels and launch them with cuda.bindings alone: no compiler, no torch.

A folder holds cubins and a manifest.json with what a launch takes: symbol, parameters, grid,
block, cluster, shared memory, and whether the kernel is made for programmatic dependent launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k3fuse.errors import InputError, K3FuseError

MANIFEST_FORMAT = 2
_TYPES: Mapping[str, type[ctypes.c_uint64 | ctypes.c_int32 | ctypes.c_float]] = {
    "u64": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "f32": ctypes.c_float,
}
_STATIC_LIMIT = 48 * 1024  # dynamic shared memory above it has to be asked for


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Launch facts of each kernel by name; InputError when the folder is not one of kernels."""
    path = folder / "manifest.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is missing: build the kernels into this folder first") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if data.get("format") != MANIFEST_FORMAT:
        raise InputError(
            f"{path}: format {data.get('format')}, this version reads {MANIFEST_FORMAT}: build anew"
        )
    return {entry["name"]: entry for entry in data["kernels"]}


class Launch:
    """A kernel with its arguments, ready to be put on a stream any number of times."""

    def __init__(self, driver: Any, function: Any, facts: Mapping[str, Any], values: list[Any]):
        self._driver, self._function = driver, function
        self._values = values  # the driver reads them at each launch
        addresses = [ctypes.addressof(value) for value in values]
        self._pointers = (ctypes.c_void_p * len(values))(*addresses)
        self._config = driver.CUlaunchConfig()
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = facts["grid"]
        config.blockDimX, config.blockDimY, config.blockDimZ = facts["block"]
        config.sharedMemBytes = facts["smem"]
        attributes = _attributes(driver, facts)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)

    def __call__(self, stream: int) -> None:
        """Put one launch on the stream (its handle), also while the stream is captured."""
        self._config.hStream = self._driver.CUstream(stream)
        address = ctypes.addressof(self._pointers)
        check(self._driver.cuLaunchKernelEx(self._config, self._function, address, 0))


@dataclass(frozen=True)
class _Loaded:
    """image: the driver may read it for as long as the library is loaded."""

    function: Any
    kernel: Any
    library: Any
    image: bytes


class KernelFolder:
    """The kernels of a folder on the current CUDA context, each loaded when first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.facts = read_manifest(folder)
        self._driver = cuda_driver()
        self._loaded: dict[str, _Loaded] = {}

    def bind(
        self, name: str, arguments: Mapping[str, int | float], *, dependent: bool = True
    ) -> Launch:
        """The kernel with a value for each parameter: device addresses as integers.

        dependent: a kernel made for programmatic dependent launch is launched so, and may start
        before the launch ahead of it on its stream has ended. Raises InputError for an unknown
        kernel, a damaged cubin, or wrong arguments.
        """
        function = self._function(name)
        facts = self.facts[name]
        names = [parameter["name"] for parameter in facts["params"]]
        if sorted(names) != sorted(arguments):
            raise InputError(
                f"kernel {name} takes {', '.join(names)}, got {', '.join(sorted(arguments))}"
            )
        values = [_TYPES[p["kind"]](cast(Any, arguments[p["name"]])) for p in facts["params"]]
        return Launch(self._driver, function, {**facts, "pdl": facts["pdl"] and dependent}, values)

    def attribute(self, name: str, which: str) -> int:
        """A function attribute of the driver, such as "NUM_REGS" or "LOCAL_SIZE_BYTES"."""
        kind = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        self._function(name)
        kernel, device = self._loaded[name].kernel, check(self._driver.cuCtxGetDevice())
        return int(check(self._driver.cuKernelGetAttribute(kind, kernel, device)))

    def _function(self, name: str) -> Any:
        if name not in self.facts:
            raise InputError(f"{self.folder} has no kernel {name}: {', '.join(self.facts)}")
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name].function

    def _load(self, name: str) -> _Loaded:
        facts, driver = self.facts[name], self._driver
        path = self.folder / facts["cubin"]
        image = path.read_bytes()
        if hashlib.sha256(image).hexdigest() != facts["sha256"]:
            raise InputError(f"{path} is not the file that was built (SHA-256): build anew")
        try:
            library = check(driver.cuLibraryLoadData(image, None, None, 0, None, None, 0))
            kernel = check(driver.cuLibraryGetKernel(library, facts["symbol"].encode()))
            # A kernel may stand where a function does: it then runs in the context of its stream.
            function = driver.CUfunction(int(kernel))
            if facts["smem"] > _STATIC_LIMIT:
                kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                device = check(driver.cuCtxGetDevice())
                check(driver.cuKernelSetAttribute(kind, facts["smem"], kernel, device))
        except DriverError as error:
            raise InputError(
                f"{path}: this GPU does not take a kernel for {facts['arch']} ({error})"
            ) from error
        return _Loaded(function, kernel, library, image)


class DriverError(K3FuseError):
    """The CUDA driver answered with an error; the message holds its name."""


def cuda_driver() -> Any:
    """cuda.bindings.driver, initialised; InputError when it or a GPU is missing."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise InputError(
            "launching kernels needs cuda-python: install the extra, pip install 'k3fuse[gpu]'"
        ) from None
    try:
        check(driver.cuInit(0))
    except (RuntimeError, DriverError) as error:  # no libcuda, or no GPU behind it
        raise InputError(f"launching kernels needs an NVIDIA GPU and its driver: {error}") from None
    return driver


def check(result: tuple[Any, ...]) -> Any:
    """The result of a call of cuda.bindings; DriverError when it answered with an error."""
    if int(result[0]) != 0:
        raise DriverError(f"CUDA driver: {getattr(result[0], 'name', result[0])}")
    return result[1] if len(result) == 2 else None


def _attributes(driver: Any, facts: Mapping[str, Any]) -> list[Any]:
    kinds = driver.CUlaunchAttributeID
    found: list[Any] = []
    if facts["pdl"]:
        item = driver.CUlaunchAttribute()
        item.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        item.value.programmaticStreamSerializationAllowed = 1
        found.append(item)
    if facts["cluster"] is not None:
        item = driver.CUlaunchAttribute()
        item.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = item.value.clusterDim
        shape.x, shape.y, shape.z = facts["cluster"]
        found.append(item)
    return found
