"""Compiling and the cache: nothing twice, nothing damaged, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3fuse.errors import InputError, K3FuseError
from k3fuse.kernels import build as building
from k3fuse.kernels.build import Built, Request, build, cache_folder, key_of, load, save
from k3fuse.kernels.spec import CompiledKernel, Parameter, get_kernel
from k3fuse.target import get_target
from tests.kernels.conftest import CASES, requests

KERNEL = CompiledKernel(
    name="k",
    arch="sm_90a",
    symbol="k_0",
    cubin=b"\x7fELF",
    ptx=".entry k_0",
    params=(Parameter("w", "u64", "weight"),),
    grid=(2, 1, 1),
    block=(32, 1, 1),
    cluster=None,
    smem=0,
    pdl=True,
    registers=1,
    stack=0,
    code=16,
)


def test_an_entry_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "new", "a", KERNEL)
    assert load(tmp_path / "new", "a") == KERNEL
    assert load(tmp_path / "new", "b") is None
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_a_damaged_entry_counts_as_missing(tmp_path: Path) -> None:
    save(tmp_path, "a", KERNEL)
    (tmp_path / "a.cubin").write_bytes(b"\x7fELG")
    assert load(tmp_path, "a") is None
    save(tmp_path, "a", KERNEL)
    (tmp_path / "a.json").write_text("{")
    assert load(tmp_path, "a") is None


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_folder({"K3FUSE_CACHE": "/somewhere"}) == Path("/somewhere")
    assert cache_folder({}) == Path.home() / ".cache" / "k3fuse"


def test_the_key_depends_on_all_that_the_cubin_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "dsl_version", lambda: "1")
    spec, shape = get_kernel("projection"), {"M": 1, "N": 40, "K": 192}
    configs = [
        spec.configure(s, get_target("h200"), **o)
        for s, o in (
            (shape, {}),
            ({**shape, "M": 2}, {}),
            (shape, {"out": "f32"}),
            (shape, {"trigger": "last_tile"}),
        )
    ]
    keys = [key_of(Request("projection", c, a)) for c in configs for a in ("sm_90a", "sm_100a")]
    monkeypatch.setattr(building, "dsl_version", lambda: "2")
    keys.append(key_of(Request("projection", configs[0], "sm_90a")))
    monkeypatch.setattr(building, "source_hash", lambda: "other")
    keys.append(key_of(Request("projection", configs[0], "sm_90a")))
    assert len(set(keys)) == len(keys)


def test_without_the_compiler_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building, "DSL", "no-such-distribution")
    with pytest.raises(InputError, match=r"k3fuse\[compile\]"):
        build(requests()[:1], folder=tmp_path)


def test_a_second_build_compiles_nothing(
    built: Built, cache_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = build(requests(), folder=cache_path)
    assert built.compiled == len(requests())
    assert again.compiled == 0
    assert again.kernels == built.kernels
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cubin_is_compiled_again_to_the_same_bytes(
    built: Built, cache_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = requests()[: len(CASES)]
    for request in chosen:
        (cache_path / f"{key_of(request)}.cubin").write_bytes(b"")
    seen: list[tuple[int, int]] = []
    again = build(
        chosen, folder=cache_path, workers=1, progress=lambda _, n, of: seen.append((n, of))
    )
    assert seen == [(i + 1, len(CASES)) for i in range(len(CASES))]
    assert again.kernels == built.kernels[: len(CASES)]  # cubin, PTX and launch facts
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_does_not_compile_is_named(dsl: None, tmp_path: Path) -> None:
    request = requests()[3]
    wrong = Request(request.kernel, request.config, "sm_12")
    with pytest.raises(K3FuseError, match=f"{request.config.label} for sm_12 does not compile"):
        build([wrong], folder=tmp_path)


def test_the_manifest_holds_what_a_launch_takes(built: Built, tmp_path: Path) -> None:
    building.write_folder(tmp_path, built.kernels[:2])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [k["symbol"] for k in manifest["kernels"]] == [k.symbol for k in built.kernels[:2]]
    assert [p["name"] for p in manifest["kernels"][0]["params"]] == ["w", "x", "y"]
