"""The launcher against a driver that records what it is given; the real one needs a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from k3fuse.errors import InputError
from k3fuse.kernels import build as building
from k3fuse.kernels.build import write_folder
from k3fuse.runtime import launcher
from k3fuse.runtime.launcher import KernelFolder, read_manifest
from tests.kernels.test_build import KERNEL


class FakeDriver:
    """As much of cuda.bindings.driver as the launcher uses."""

    CUstream = int
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="smem", CU_FUNC_ATTRIBUTE_NUM_REGS="regs"
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl",
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
    )

    def __init__(self) -> None:
        self.launches: list[tuple[Any, list[int]]] = []
        self.attributes: list[tuple[Any, ...]] = []
        self.load_error = 0

    CUlaunchConfig = SimpleNamespace

    def CUlaunchAttribute(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(id=None, value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuLibraryLoadData(self, image: bytes, *rest: object) -> tuple[int, str]:  # noqa: N802
        return (self.load_error, "library")

    def cuLibraryGetKernel(self, library: str, symbol: bytes) -> tuple[int, int]:  # noqa: N802
        assert symbol == b"k_0"
        return (0, 77)

    CUfunction = int

    def cuCtxGetDevice(self) -> tuple[int, int]:  # noqa: N802
        return (0, 3)

    def cuKernelSetAttribute(self, *arguments: object) -> tuple[int]:  # noqa: N802
        self.attributes.append(arguments)
        return (0,)

    def cuLaunchKernelEx(  # noqa: N802
        self, config: SimpleNamespace, function: str, address: int, extra: int
    ) -> tuple[int]:
        pointers = (ctypes.c_void_p * 1).from_address(address)
        values = [ctypes.c_uint64.from_address(p or 0).value for p in pointers]
        self.launches.append((SimpleNamespace(**vars(config)), values))
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launcher, "cuda_driver", lambda: fake)
    monkeypatch.setattr(building, "dsl_version", lambda: "1")
    return fake


def test_a_launch_passes_everything_on(driver: FakeDriver, tmp_path: Path) -> None:
    write_folder(tmp_path, [dataclasses.replace(KERNEL, cluster=(2, 1, 1), smem=50000)])
    KernelFolder(tmp_path).bind("k", {"w": 0xABCDEF0123})(7)
    ((config, values),) = driver.launches
    assert values == [0xABCDEF0123]
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (2, 32, 50000)
    assert config.hStream == 7
    assert [a.id for a in config.attrs] == ["pdl", "cluster"]
    assert config.attrs[1].value.clusterDim.x == 2
    assert driver.attributes == [("smem", 50000, 77, 3)]


def test_wrong_use_is_named(driver: FakeDriver, tmp_path: Path) -> None:
    write_folder(tmp_path, [KERNEL])
    folder = KernelFolder(tmp_path)
    with pytest.raises(InputError, match="has no kernel nope"):
        folder.bind("nope", {})
    with pytest.raises(InputError, match="kernel k takes w, got x"):
        folder.bind("k", {"x": 1})
    driver.load_error = 209
    with pytest.raises(InputError, match="does not take a kernel for sm_90a"):
        KernelFolder(tmp_path).bind("k", {"w": 1})
    driver.load_error = 0
    next(tmp_path.glob("*.cubin")).write_bytes(b"other")
    with pytest.raises(InputError, match="SHA-256"):
        KernelFolder(tmp_path).bind("k", {"w": 1})


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(InputError, match="format 1"):
        read_manifest(tmp_path)


def test_missing_bindings_name_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "dsl_version", lambda: "1")
    write_folder(tmp_path, [KERNEL])
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(InputError, match=r"k3fuse\[gpu\]"):
        KernelFolder(tmp_path)


def test_a_machine_without_a_driver_is_named(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_folder(tmp_path, [KERNEL])
    monkeypatch.undo()

    def failing(flags: int) -> tuple[int]:
        return (100,)

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cast(ModuleType, driver))
    monkeypatch.setattr(driver, "cuInit", failing)
    with pytest.raises(InputError, match="needs an NVIDIA GPU and its driver"):
        KernelFolder(tmp_path)
