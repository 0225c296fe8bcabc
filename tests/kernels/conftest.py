"""What the kernel tests share: the CuTe DSL where it is installed, and one cache a session."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from k3fuse.kernels.build import Built, Request, build
from k3fuse.kernels.spec import get_kernel
from k3fuse.target import get_target

ARCHES = ("sm_90a", "sm_100a", "sm_103a")

CASES: tuple[tuple[str, dict[str, int], dict[str, object]], ...] = (
    ("projection", {"M": 1, "N": 3216, "K": 7168}, {}),
    ("projection", {"M": 8, "N": 448, "K": 3584}, {"out": "f32", "trigger": "last_tile"}),
    ("projection", {"M": 3, "N": 7168, "K": 768}, {}),
    ("projection", {"M": 5, "N": 40, "K": 192}, {}),
    ("projection", {"M": 2, "N": 40, "K": 7232}, {}),  # 226 steps on 16 warps: ragged
    ("projection", {"M": 2, "N": 40, "K": 12288}, {}),  # tokens do not fit the registers
    ("rms_norm", {"M": 1, "H": 7168}, {}),
    ("slots_rms_norm", {"M": 3, "H": 7168, "T": 16}, {}),
    ("slots_rms_norm", {"M": 3, "H": 264, "T": 3}, {}),
)


@pytest.fixture(scope="session")
def dsl() -> None:
    """Skip where the CuTe DSL is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl: pip install 'k3fuse[compile]'")


def requests() -> list[Request]:
    return [
        Request(name, get_kernel(name).configure(shape, get_target(arch), **options), arch)
        for arch in ARCHES
        for name, shape, options in CASES
    ]


@pytest.fixture(scope="session")
def cache_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def built(dsl: None, cache_path: Path) -> Built:
    """Every case for every architecture."""
    return build(requests(), folder=cache_path)
