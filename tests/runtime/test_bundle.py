from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3fuse.errors import InputError
from k3fuse.ir import print_graph
from k3fuse.lowering.recipe import merge_recipes, weight_recipe
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.options import CompileOptions
from k3fuse.runtime.bundle import (
    Bucket,
    BucketContents,
    CheckpointRef,
    Contents,
    KernelFiles,
    PassRecord,
    RefusalRecord,
    cache_key,
    read_bundle,
    write_bundle,
)
from k3fuse.runtime.launcher import read_manifest
from k3fuse.runtime.selection import (
    Argument,
    KernelManifest,
    KernelMemory,
    KernelParameter,
    KernelRecord,
    KernelStage,
    LaunchKernel,
    Resources,
    Selection,
)
from k3fuse.target import get_target
from tests.lowering.compiled import compiled

STEP = Bucket(1, 1, "step")
COMMIT = Bucket(2, 3, "commit")


def contents() -> Contents:
    step = compiled("kimi-linear-tiny", 2)
    commit = compiled("kimi-linear-tiny", 2, 2, rows=3, kind="commit")
    dumps = [("shard-stock", print_graph(step.stock)), ("insert-pdl", print_graph(step.graph))]
    return Contents(
        model="kimi-linear-tiny",
        target="gb300",
        tp=2,
        dtype="bf16",
        checkpoint=CheckpointRef("/models/kimi", "abc"),
        options=CompileOptions("gb300", tp=2).as_dict(),
        cache_key="0" * 64,
        recipe=merge_recipes([weight_recipe(step.graph), weight_recipe(commit.graph)]),
        buckets=[
            BucketContents(STEP, step.plan, step.graph, dumps),
            BucketContents(COMMIT, commit.plan, commit.graph),
        ],
        refusals=[RefusalRecord("step_b1_q1", "fuse-comm", "model.x/linear", "why", "%x")],
        passes=[PassRecord("step_b1_q1", "fuse-comm", 3)],
    )


CUBIN = b"\x7fELF\x00\xff not text"


def with_kernels() -> Contents:
    """The first launch of the step has a kernel, the others have none."""
    given = contents()
    step = given.buckets[0]
    record = KernelRecord(
        name="first_0123",
        arch="sm_103a",
        symbol="first_0123_0",
        cubin="first_0123.cubin",
        sha256=hashlib.sha256(CUBIN).hexdigest(),
        params=(KernelParameter("v0", "u64", "weight"),),
        grid=(8, 1, 1),
        block=(128, 1, 1),
        cluster=(2, 1, 1),
        smem=1024,
        pdl=True,
        registers=32,
        stack=0,
        code=2048,
        scratch=0,
        barriers=1,
        spins=True,
        stages=(KernelStage("linear", "few tokens", (), ("linear", "add"), 0, False),),
        audited=True,
    )
    argument = Argument("v0", "memory", step.plan.weights[0].value, step.plan.weights[0].value)
    first = step.plan.launches[0]
    buckets = [
        replace(
            item,
            selection=Selection(
                target="gb300",
                plan_hash=item.plan.hash(),
                launches=tuple(
                    LaunchKernel(first.name, record.name, "", 0, (argument,))
                    if item is step and launch is first
                    else LaunchKernel(launch.name, reason="no family")
                    for launch in item.plan.launches
                ),
                memory=KernelMemory((("main", 256),), 1, step=False, peer_tables=()),
            ),
        )
        for item in given.buckets
    ]
    manifest = KernelManifest("a compiler", (record,))
    files = KernelFiles(manifest, {"first_0123.cubin": CUBIN})
    return replace(given, buckets=buckets, kernels=files)


@pytest.fixture
def kernel_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    write_bundle(directory, with_kernels())
    return directory


@pytest.fixture
def bundle_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    write_bundle(directory, contents())
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file()
    }


def test_what_was_written_is_read_back(bundle_dir: Path) -> None:
    given, bundle = contents(), read_bundle(bundle_dir)
    assert bundle.buckets == (STEP, COMMIT)
    for item in given.buckets:
        assert bundle.plan(item.bucket) == item.plan
        assert print_graph(bundle.graph(item.bucket)) == print_graph(item.graph)
        assert bundle.dumps(item.bucket) == [
            (f"{i:03d}_{name}", text) for i, (name, text) in enumerate(item.dumps)
        ]
    assert print_graph(bundle.recipe()) == print_graph(given.recipe)
    manifest = bundle.manifest
    assert manifest.checkpoint == given.checkpoint
    assert manifest.options["tp"] == 2
    assert list(manifest.refusals) == given.refusals
    assert list(manifest.passes) == given.passes
    with pytest.raises(InputError, match="no bucket step_b9_q1; it has step_b1_q1"):
        bundle.plan(Bucket(9, 1, "step"))


def test_the_layout_is_the_documented_one_and_nothing_else_is_left(bundle_dir: Path) -> None:
    assert set(files_of(bundle_dir)) == {
        "manifest.json",
        "recipe.ir",
        "plans/step_b1_q1.json",
        "plans/commit_b2_q3.json",
        "ir/step_b1_q1.ir",
        "ir/commit_b2_q3.ir",
        "dumps/step_b1_q1/000_shard-stock.ir",
        "dumps/step_b1_q1/001_insert-pdl.ir",
    }
    assert [p.name for p in bundle_dir.parent.iterdir()] == ["bundle"]


def test_equal_contents_give_equal_bytes_and_replace_a_bundle(bundle_dir: Path) -> None:
    before = files_of(bundle_dir)
    write_bundle(bundle_dir, contents())
    assert files_of(bundle_dir) == before
    write_bundle(bundle_dir, replace(contents(), buckets=contents().buckets[:1], checkpoint=None))
    assert read_bundle(bundle_dir).buckets == (STEP,)
    assert [p.name for p in bundle_dir.parent.iterdir()] == ["bundle"]


def test_only_an_empty_folder_or_a_bundle_is_written_over(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_bundle(empty, contents())
    read_bundle(empty)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty and no bundle"):
        write_bundle(other, contents())
    (other / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="not empty and no bundle"):
        write_bundle(other, contents())
    assert (other / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is a file"):
        write_bundle(other / "notes.txt", contents())


def test_a_failed_write_leaves_the_old_bundle(
    bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(bundle_dir)
    rename: Callable[[Path, Path], Path] = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        write_bundle(bundle_dir, contents())
    assert files_of(bundle_dir) == before
    assert [p.name for p in bundle_dir.parent.iterdir()] == ["bundle"]


def test_two_buckets_of_one_name_are_refused(tmp_path: Path) -> None:
    given = contents()
    with pytest.raises(InputError, match="each bucket once"):
        write_bundle(tmp_path / "b", replace(given, buckets=[*given.buckets, *given.buckets]))
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_read_back(kernel_dir: Path) -> None:
    given, bundle = with_kernels(), read_bundle(kernel_dir)
    assert given.kernels is not None
    assert bundle.kernels() == given.kernels.manifest
    for item in given.buckets:
        assert bundle.selection(item.bucket) == item.selection
    first = given.buckets[0].plan.launches[0].name
    assert bundle.resources(STEP) == {first: Resources(8, 2, 128, 1024, spins=True)}
    assert bundle.resources(COMMIT) == {}
    assert (bundle.kernel_folder / "first_0123.cubin").read_bytes() == CUBIN
    assert read_manifest(bundle.kernel_folder)["first_0123"]["symbol"] == "first_0123_0"
    assert set(files_of(kernel_dir)) - {p for p in files_of(kernel_dir) if "kernels/" not in p} == {
        "kernels/manifest.json",
        "kernels/first_0123.cubin",
    }
    before = files_of(kernel_dir)
    write_bundle(kernel_dir, with_kernels())
    assert files_of(kernel_dir) == before


def test_a_bundle_without_kernels(bundle_dir: Path) -> None:
    bundle = read_bundle(bundle_dir)
    assert (bundle.has_kernels, bundle.kernels(), bundle.selection(STEP)) == (False, None, None)
    assert bundle.resources(STEP) == {}


@pytest.mark.parametrize("name", ["kernels/first_0123.cubin", "selections/step_b1_q1.json"])
def test_a_changed_kernel_is_named(kernel_dir: Path, name: str) -> None:
    (kernel_dir / name).write_bytes(b"other")
    with pytest.raises(InputError, match=rf"{name}: its SHA-256"):
        read_bundle(kernel_dir)


def test_a_selection_of_another_plan_is_refused(tmp_path: Path) -> None:
    given = with_kernels()
    step, commit = given.buckets
    assert step.selection is not None
    other = replace(step.selection, plan_hash="0" * 64)
    write_bundle(tmp_path / "b", replace(given, buckets=[replace(step, selection=other), commit]))
    bundle = read_bundle(tmp_path / "b")
    with pytest.raises(InputError, match=r"step_b1_q1\.json: .*another plan: compile again"):
        bundle.selection(STEP)


NAMES = [
    "recipe.ir",
    "plans/step_b1_q1.json",
    "ir/commit_b2_q3.ir",
    "dumps/step_b1_q1/000_shard-stock.ir",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_changed_file_is_named(bundle_dir: Path, name: str) -> None:
    path = bundle_dir / name
    text = path.read_text()
    path.write_text(text.replace("2", "3", 1))
    with pytest.raises(InputError, match=rf"{name}: its SHA-256 .*compile again"):
        read_bundle(bundle_dir)
    path.unlink()
    with pytest.raises(InputError, match=rf"{name}: No such file"):
        read_bundle(bundle_dir)


def test_a_file_changed_after_the_check_is_not_believed(bundle_dir: Path) -> None:
    bundle = read_bundle(bundle_dir)
    (bundle_dir / "plans/step_b1_q1.json").write_text("{}")
    with pytest.raises(InputError, match="SHA-256"):
        bundle.plan(STEP)


def test_an_unknown_file_is_named(bundle_dir: Path) -> None:
    (bundle_dir / "plans" / "weights.pkl").write_bytes(b"\x80")
    with pytest.raises(InputError, match=r"plans/weights\.pkl is not listed"):
        read_bundle(bundle_dir)


Change = Callable[[dict[str, Any]], object]


CHANGES: list[tuple[Change, str]] = [
    (lambda m: m.update(version=0), "bundle version 0, this k3fuse reads 2: compile again"),
    (lambda m: m.update(format="zip"), "not the manifest of a k3fuse bundle"),
    (lambda m: m.pop("tp"), "tp: Field required"),
    (lambda m: m.update(tp="2"), "tp: Input should be a valid integer"),
    (lambda m: m.update(more=1), "more: Unexpected"),
    (lambda m: m["files"].pop("recipe.ir"), "recipe.ir is not listed"),
    (lambda m: m["buckets"][0].update(ir="ir/x.ir"), "ir/x.ir has no hash"),
    (lambda m: m["buckets"][0].update(plan_hash="0"), "not the plan of bucket step_b1_q1"),
    (lambda m: m["files"].update({"../out": "0"}), "'../out' lies outside the bundle"),
    (lambda m: m["files"].update({"/etc/passwd": "0"}), "'/etc/passwd' lies outside"),
    (lambda m: m["files"].update({"ir/../../x": "0"}), "lies outside"),
]


@pytest.mark.parametrize(("change", "complaint"), CHANGES)
def test_a_bad_manifest_is_named(bundle_dir: Path, change: Change, complaint: str) -> None:
    path = bundle_dir / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError) as caught:
        read_bundle(bundle_dir)
    assert complaint in str(caught.value)
    assert str(bundle_dir) in str(caught.value)


def test_a_link_out_of_the_bundle_is_refused(bundle_dir: Path, tmp_path: Path) -> None:
    path = bundle_dir / "recipe.ir"
    outside = tmp_path / "recipe.ir"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(InputError, match="outside"):
        read_bundle(bundle_dir)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no bundle: it has no manifest\.json"):
        read_bundle(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_bundle(tmp_path)


def test_a_new_process_finds_the_memory_that_a_plan_needs(bundle_dir: Path) -> None:
    """Nothing that a pass or a compilation made in its own process is needed to run."""
    code = (
        "import sys, pathlib; from k3fuse.runtime.bundle import read_bundle\n"
        "b = read_bundle(pathlib.Path(sys.argv[1])); p = b.plan(b.buckets[0])\n"
        "print(p.hash(), p.memory.arena, p.memory.mailboxes)\n"
        "assert not [m for m in sys.modules if m.startswith(('k3fuse.passes', 'k3fuse.lowering'))]"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(bundle_dir)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout.split()
    plan = contents().buckets[0].plan
    assert out == [plan.hash(), str(plan.memory.arena), str(plan.memory.mailboxes)]
    assert plan.memory.arena > 0 < plan.memory.mailboxes


def test_the_cache_key_follows_every_part() -> None:
    parts: dict[str, object] = {
        "version": "0.1.0",
        "options": CompileOptions("gb300").as_dict(),
        "config": BUILTIN_CONFIGS["kimi-k3-tiny"],
        "target": get_target("gb300"),
        "pipeline": ("a", "b"),
    }
    key = cache_key(parts)
    assert len(key) == 64
    assert cache_key(dict(reversed(parts.items()))) == key
    others: dict[str, object] = {
        "version": "0.1.1",
        "options": CompileOptions("gb300", prefetch=True).as_dict(),
        "config": replace(BUILTIN_CONFIGS["kimi-k3-tiny"], top_k=2),
        "target": replace(get_target("gb300"), hop_us=3.0),
        "pipeline": ("b", "a"),
    }
    for name, value in others.items():
        assert cache_key({**parts, name: value}) != key, name
    with pytest.raises(ValueError, match="version"):
        cache_key({"options": {}})
