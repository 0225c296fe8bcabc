"""Compiling and the cache: nothing twice, nothing damaged, the same bytes every time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import pytest

from k3fuse.errors import InputError, K3FuseError
from k3fuse.kernels import build as building
from k3fuse.kernels.build import (
    Built,
    Request,
    build,
    cache_folder,
    compiler_key,
    key_of,
    load,
    save,
)
from k3fuse.kernels.examples import example
from k3fuse.kernels.launch import configure
from k3fuse.kernels.spec import CompiledKernel, Parameter
from k3fuse.target import get_target
from tests.kernels.conftest import requests

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
    scratch=512,
)
SMALL = [
    Request(configure(example("rms_norm", shape), get_target("h200")), "sm_90a")
    for shape in ("1,64", "2,64")
]


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
    target = get_target("h200")
    programs = [example("linear", shape) for shape in ("1,40,192", "2,40,192")]
    programs.append(dataclasses.replace(programs[0], trigger="last_tile"))
    configs = [configure(program, target) for program in programs]
    configs.append(configure(programs[0], target, debug=True))
    keys = [key_of(Request(c, a), compiler_key()) for c in configs for a in ("sm_90a", "sm_100a")]
    monkeypatch.setattr(building, "dsl_version", lambda: "2")
    keys.append(key_of(Request(configs[0], "sm_90a"), compiler_key()))
    monkeypatch.setattr(building, "source_hash", lambda: "other")
    keys.append(key_of(Request(configs[0], "sm_90a"), compiler_key()))
    # A debug build of a kernel that does not spin is the same kernel, but another configuration.
    assert len(set(keys)) == len(keys)


def test_equal_programs_have_equal_keys_and_names() -> None:
    one, two = (configure(example("linear", "1,40,192"), get_target("h200")) for _ in range(2))
    assert one is not two
    assert key_of(Request(one, "sm_90a"), "") == key_of(Request(two, "sm_90a"), "")
    assert one.label == two.label


def test_without_the_compiler_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building, "DSL", "no-such-distribution")
    with pytest.raises(InputError, match=r"k3fuse\[compile\]"):
        build(SMALL, folder=tmp_path)


@pytest.mark.slow
def test_a_second_build_compiles_nothing(
    built: Built, cache_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = build(requests(), folder=cache_path)
    assert built.compiled == len({key_of(request, "") for request in requests()})
    assert again.compiled == 0
    assert again.kernels == built.kernels
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("dsl")
def test_a_damaged_cubin_is_compiled_again_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, cache = tmp_path / "here", tmp_path / "cache"
    here.mkdir()
    monkeypatch.chdir(here)
    first = build(SMALL, folder=cache)
    for path in cache.glob("*.cubin"):
        path.write_bytes(b"")
    seen: list[tuple[int, int]] = []
    again = build(SMALL, folder=cache, workers=1, progress=lambda _, n, of: seen.append((n, of)))
    assert seen == [(1, 2), (2, 2)]
    assert again.kernels == first.kernels  # cubin, PTX and launch facts
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("dsl")
def test_a_kernel_that_does_not_compile_is_named_or_left_out(tmp_path: Path) -> None:
    wrong = Request(SMALL[0].config, "sm_12")
    what = f"{wrong.config.label} for sm_12 does not compile"
    with pytest.raises(K3FuseError, match=what):
        build([wrong], folder=tmp_path)
    errors: list[str] = []
    built = build([wrong, SMALL[1]], folder=tmp_path, failed=errors.append)
    assert [kernel.name for kernel in built.kernels] == [SMALL[1].config.label]
    assert what in errors[0]


def test_many_kernels_come_from_the_cache_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "dsl_version", lambda: "1")
    target = get_target("h200")
    many = [
        Request(configure(example("linear", f"{m},{8 * n},256"), target), "sm_90a")
        for m in (1, 2, 3)
        for n in range(1, 101)
    ]
    for request in many:
        kernel = dataclasses.replace(
            KERNEL, name=request.config.label, cubin=bytes(60_000), ptx="x" * 200_000
        )
        save(tmp_path, key_of(request, compiler_key()), kernel)
    begin = time.process_time()
    built = build(many, folder=tmp_path)
    assert time.process_time() - begin < 5
    assert [k.name for k in built.kernels] == [r.config.label for r in many]
    assert built.compiled == 0


def test_the_manifest_holds_what_a_launch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "dsl_version", lambda: "1")
    other = dataclasses.replace(KERNEL, name="l", cubin=b"\x7fELF2")
    building.write_folder(tmp_path, [KERNEL, other, KERNEL], ptx=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [k["name"] for k in manifest["kernels"]] == ["k", "l"]
    entry = manifest["kernels"][0]
    assert entry["params"] == [{"name": "w", "kind": "u64", "access": "weight"}]
    assert entry["scratch"] == 512
    assert entry["cubin"] == f"{hashlib.sha256(KERNEL.cubin).hexdigest()}.cubin"
    assert (tmp_path / entry["cubin"]).read_bytes() == KERNEL.cubin
    assert len(list(tmp_path.glob("*.ptx"))) == 2
    with pytest.raises(K3FuseError, match="two kernels are called k"):
        building.write_folder(tmp_path, [KERNEL, dataclasses.replace(KERNEL, smem=16)])
