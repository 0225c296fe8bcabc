"""A bundle: the directory that a compilation leaves and a runtime loads.

    manifest.json              what was compiled, from what, with the SHA-256 of every other file
    plans/<bucket>.json        the plan of a bucket
    ir/<bucket>.ir             the graph that the plan was lowered from
    dumps/<bucket>/NNN_<pass>.ir   the graph after each pass (optional)
    recipe.ir                  weights -> the static values that launches read, for all buckets
    selections/<bucket>.json   the kernel of every launch and its arguments (with kernels)
    kernels/manifest.json      what launching each kernel takes (with kernels)
    kernels/<name>.cubin       machine code for the bundle's target

Equal inputs give equal bytes. Loading compiles nothing, runs no code on the host from the
directory, and believes no file whose hash is not in the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3fuse import __version__
from k3fuse.errors import InputError
from k3fuse.ir import Graph, parse_graph, print_graph
from k3fuse.options import CompileOptions
from k3fuse.runtime.plan import Plan, read_plan
from k3fuse.runtime.selection import (
    KernelManifest,
    Resources,
    Selection,
    check_selection,
    launch_resources,
    read_kernels,
    read_selection,
)

BUNDLE_FORMAT = "k3fuse-bundle"
BUNDLE_VERSION = 2
"""Raised whenever the meaning of a file or field changes; another version is refused."""

MANIFEST = "manifest.json"
RECIPE = "recipe.ir"
KERNELS = "kernels/manifest.json"
CACHE_KEY_PARTS = frozenset({"version", "options", "config", "target", "pipeline"})

Kind = Literal["step", "commit"]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Bucket:
    """A batch size that a bundle has a plan for; a step of several rows a request is a verify."""

    batch: int
    rows_per_request: int
    kind: Kind

    @property
    def name(self) -> str:
        """Stem of the bucket's files."""
        return f"{self.kind}_b{self.batch}_q{self.rows_per_request}"

    def dims(self, options: CompileOptions) -> dict[str, int]:
        """Sizes of the symbolic dimensions in the bucket's graph and plan."""
        return {
            "R": self.batch,
            "M": self.batch * self.rows_per_request,
            "slots": options.slots,
            "pages": options.pages,
            "table": options.max_pages,
        }

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CheckpointRef:
    """The checkpoint that a bundle was compiled for."""

    path: str
    fingerprint: str

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class PassRecord:
    """What one pass did for one bucket."""

    bucket: str
    name: str
    changes: int

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class RefusalRecord:
    """A site where a pass did not act, and why."""

    bucket: str
    pass_name: str
    site: str
    reason: str
    value: str = ""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class BucketContents:
    """What a bundle holds of one bucket; `dumps` is (pass name, IR text) in order of the passes.

    selection: None in a bundle without kernels.
    """

    bucket: Bucket
    plan: Plan
    graph: Graph
    dumps: Sequence[tuple[str, str]] = ()
    selection: Selection | None = None


@dataclass(frozen=True)
class KernelFiles:
    """The kernels of all buckets: their manifest, and each cubin by the file name in it."""

    manifest: KernelManifest
    cubins: Mapping[str, bytes]


@dataclass(frozen=True)
class Contents:
    """All that `write_bundle` writes."""

    model: str
    target: str
    tp: int
    dtype: str
    checkpoint: CheckpointRef | None
    options: Mapping[str, object]
    cache_key: str
    recipe: Graph
    buckets: Sequence[BucketContents]
    refusals: Sequence[RefusalRecord] = ()
    passes: Sequence[PassRecord] = ()
    kernels: KernelFiles | None = None


@dataclass(frozen=True)
class BucketEntry:
    """A bucket in the manifest, with the names of its files; selection is empty without kernels."""

    batch: int
    rows_per_request: int
    kind: Kind
    plan: str
    ir: str
    selection: str
    plan_hash: str

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.batch, self.rows_per_request, self.kind)


@dataclass(frozen=True)
class Manifest:
    """manifest.json."""

    format: str
    version: int
    k3fuse: str
    model: str
    target: str
    tp: int
    dtype: str
    checkpoint: CheckpointRef | None
    options: dict[str, object]
    cache_key: str
    buckets: tuple[BucketEntry, ...]
    files: dict[str, str]  # name -> SHA-256
    refusals: tuple[RefusalRecord, ...]
    passes: tuple[PassRecord, ...]

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class Bundle:
    """A checked bundle; files are read, and their hashes checked again, when asked for."""

    directory: Path
    manifest: Manifest

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(entry.bucket for entry in self.manifest.buckets)

    @property
    def options(self) -> CompileOptions:
        """The options that the bundle was compiled with."""
        try:
            return _OPTIONS.validate_python(self.manifest.options)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("options", *first["loc"])))
            raise InputError(
                f"{self.directory / MANIFEST}: {place}: {first['msg']}; compile again"
            ) from None

    def plan(self, bucket: Bucket) -> Plan:
        """The plan of a bucket; InputError lists the buckets when there is none."""
        name = self._entry(bucket).plan
        return read_plan(self._text(name), str(self.directory / name))

    def graph(self, bucket: Bucket) -> Graph:
        """The graph that the bucket's plan was lowered from."""
        name = self._entry(bucket).ir
        return parse_graph(self._text(name), str(self.directory / name))

    def recipe(self) -> Graph:
        """The weight recipe of all buckets; `runtime.weights.evaluate_recipe` runs it."""
        return parse_graph(self._text(RECIPE), str(self.directory / RECIPE))

    @property
    def has_kernels(self) -> bool:
        return KERNELS in self.manifest.files

    @property
    def kernel_folder(self) -> Path:
        """The folder that `runtime.launcher.KernelFolder` loads."""
        return (self.directory / KERNELS).parent

    def kernels(self) -> KernelManifest | None:
        """The kernels of all buckets; None in a bundle without."""
        if not self.has_kernels:
            return None
        return read_kernels(self._text(KERNELS), str(self.directory / KERNELS))

    def selection(self, bucket: Bucket) -> Selection | None:
        """The kernels of a bucket's launches; None in a bundle without. InputError when they do
        not fit the plan or the kernels."""
        name = self._entry(bucket).selection
        kernels = self.kernels()
        if not name or kernels is None:
            return None
        found = read_selection(self._text(name), str(self.directory / name))
        try:
            check_selection(found, self.plan(bucket), kernels.by_name())
        except InputError as error:
            raise InputError(f"{self.directory / name}: {error}") from None
        return found

    def resources(self, bucket: Bucket) -> dict[str, Resources]:
        """What the kernel of each launch takes, by launch name; empty without kernels."""
        selection, kernels = self.selection(bucket), self.kernels()
        if selection is None or kernels is None:
            return {}
        return launch_resources(selection, kernels.by_name())

    def dumps(self, bucket: Bucket) -> list[tuple[str, str]]:
        """(file stem, IR text) of the bucket's dumps in order of the passes; may be empty."""
        folder = f"dumps/{bucket.name}/"
        names = sorted(name for name in self.manifest.files if name.startswith(folder))
        return [(PurePosixPath(name).stem, self._text(name)) for name in names]

    def _entry(self, bucket: Bucket) -> BucketEntry:
        for entry in self.manifest.buckets:
            if entry.bucket == bucket:
                return entry
        known = ", ".join(map(str, self.buckets))
        raise InputError(f"{self.directory} has no bucket {bucket}; it has {known}")

    def _text(self, name: str) -> str:
        return _read_checked(self.directory, name, self.manifest.files[name]).decode()


def cache_key(parts: Mapping[str, object]) -> str:
    """SHA-256 over everything that a bundle depends on but its checkpoint, in canonical JSON.

    `parts` has exactly the keys of CACHE_KEY_PARTS: version (of k3fuse), options, config (of the
    model), target (the Target row) and pipeline (names of the passes in order); values are JSON
    data, dataclasses or sets. ValueError for other keys.
    """
    if set(parts) != set(CACHE_KEY_PARTS):
        raise ValueError(f"a cache key is made of {sorted(CACHE_KEY_PARTS)}, not {sorted(parts)}")
    text = json.dumps(
        dict(parts), sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain
    )
    return hashlib.sha256(text.encode()).hexdigest()


def write_bundle(directory: Path, contents: Contents) -> Manifest:
    """Write a bundle, whole or not at all; replaces a bundle that is already there.

    Raises InputError when `directory` is something else than a bundle or an empty folder.
    """
    directory = directory.resolve()
    require_replaceable(directory)
    files = dict(_files(contents))
    manifest = _manifest(contents, files)
    directory.parent.mkdir(parents=True, exist_ok=True)
    new = directory.with_name(f".{directory.name}.{os.getpid()}.new")
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    try:
        for name, data in {**files, MANIFEST: _to_json(manifest).encode()}.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if directory.exists():
            directory.rename(old)
        try:
            new.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return manifest


def read_bundle(directory: Path) -> Bundle:
    """Read and check a bundle: version, paths, and the hash of every file.

    Raises InputError naming the file and what to do when one is missing, unknown, changed or
    outside the directory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{directory} is no bundle: it has no {MANIFEST}; give a directory that "
            "k3fuse compile wrote"
        )
    manifest = _read_manifest(path)
    for name, digest in manifest.files.items():
        _read_checked(directory, name, digest)
    found = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir()}
    for name in sorted(found - {MANIFEST} - set(manifest.files)):
        raise InputError(f"{directory / name} is not listed in {MANIFEST}: remove it")
    for entry in manifest.buckets:
        for name in (entry.plan, entry.ir, *filter(None, [entry.selection])):
            _require_listed(path, manifest, name)
        if manifest.files[entry.plan] != entry.plan_hash:
            raise InputError(
                f"{directory / entry.plan} is not the plan of bucket {entry.bucket}: "
                "its hash differs; compile again"
            )
    _require_listed(path, manifest, RECIPE)
    return Bundle(directory, manifest)


def _files(contents: Contents) -> Iterator[tuple[str, bytes]]:
    for item in contents.buckets:
        name = item.bucket.name
        yield f"plans/{name}.json", item.plan.to_json().encode()
        yield f"ir/{name}.ir", print_graph(item.graph).encode()
        if item.selection is not None:
            yield _selection_file(item), item.selection.to_json().encode()
        for index, (pass_name, text) in enumerate(item.dumps):
            yield f"dumps/{name}/{index:03d}_{pass_name}.ir", text.encode()
    yield RECIPE, print_graph(contents.recipe).encode()
    if contents.kernels is not None:
        yield KERNELS, contents.kernels.manifest.to_json().encode()
        folder = PurePosixPath(KERNELS).parent
        for name, cubin in contents.kernels.cubins.items():
            yield str(folder / name), cubin


def _selection_file(item: BucketContents) -> str:
    return "" if item.selection is None else f"selections/{item.bucket.name}.json"


def _manifest(contents: Contents, files: Mapping[str, bytes]) -> Manifest:
    names = [item.bucket.name for item in contents.buckets]
    if len(set(names)) != len(names):
        raise InputError(f"a bundle holds each bucket once, not {', '.join(names)}")
    return Manifest(
        format=BUNDLE_FORMAT,
        version=BUNDLE_VERSION,
        k3fuse=__version__,
        model=contents.model,
        target=contents.target,
        tp=contents.tp,
        dtype=contents.dtype,
        checkpoint=contents.checkpoint,
        options=dict(contents.options),
        cache_key=contents.cache_key,
        buckets=tuple(
            BucketEntry(
                item.bucket.batch,
                item.bucket.rows_per_request,
                item.bucket.kind,
                f"plans/{item.bucket.name}.json",
                f"ir/{item.bucket.name}.ir",
                _selection_file(item),
                item.plan.hash(),
            )
            for item in contents.buckets
        ),
        files={name: _sha256(data) for name, data in files.items()},
        refusals=tuple(contents.refusals),
        passes=tuple(contents.passes),
    )


def _to_json(manifest: Manifest) -> str:
    return json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True, default=_plain) + "\n"


def _plain(value: object) -> object:
    """JSON data for what json.dumps does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(cast("set[str]", value))
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, object]", value))
    raise TypeError(f"{value!r} is no JSON data")


def require_replaceable(directory: Path) -> None:
    """InputError unless `directory` is absent, empty, or a bundle that may be replaced."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise InputError(f"{directory} is a file: name a directory for the bundle")
    if not any(directory.iterdir()):
        return
    try:
        raw: object = json.loads((directory / MANIFEST).read_bytes())
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict) or cast("dict[str, object]", raw).get("format") != BUNDLE_FORMAT:
        raise InputError(f"{directory} is not empty and no bundle: name another directory")


def _read_manifest(path: Path) -> Manifest:
    text = path.read_bytes()
    try:
        raw: object = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); compile again") from None
    head = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
    if head.get("format") != BUNDLE_FORMAT:
        raise InputError(f"{path}: not the manifest of a k3fuse bundle")
    if head.get("version") != BUNDLE_VERSION:
        raise InputError(
            f"{path}: bundle version {head.get('version')!r}, this k3fuse reads {BUNDLE_VERSION}: "
            "compile again"
        )
    try:
        return _MANIFEST.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {place}: {first['msg']}; compile again") from None


def _require_listed(path: Path, manifest: Manifest, name: str) -> None:
    if name not in manifest.files:
        raise InputError(f"{path}: {name} has no hash in 'files'; compile again")


def _read_checked(directory: Path, name: str, digest: str) -> bytes:
    pure = PurePosixPath(name)
    path = directory / pure
    root = directory.resolve()
    inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    if not inside or path.resolve() != root / pure:
        raise InputError(
            f"{directory / MANIFEST}: file '{name}' lies outside the bundle: do not use this bundle"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path}: {reason}; copy the bundle again or compile again") from None
    if _sha256(data) != digest:
        raise InputError(
            f"{path}: its SHA-256 is not the one in {MANIFEST}: copy the bundle again "
            "or compile again"
        )
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_MANIFEST = TypeAdapter(Manifest)
_OPTIONS = TypeAdapter(CompileOptions)
