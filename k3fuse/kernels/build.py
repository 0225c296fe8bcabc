"""Compile kernels in worker processes, and keep the results in a cache on disk.

The compiler can take its process down, and its sessions are bound to one thread: so every kernel
is compiled in a worker. An entry of the cache is named by what it depends on: the source of this
package, the versions of the CuTe DSL, the architecture and the configuration.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from k3fuse.errors import InputError, K3FuseError
from k3fuse.kernels.launch import LaunchConfig
from k3fuse.kernels.spec import CompiledKernel, Parameter

DSL = "nvidia-cutlass-dsl"
_FLAVOURS = (f"{DSL}-libs-cu12", f"{DSL}-libs-cu13")
MANIFEST_FORMAT = 2


@dataclass(frozen=True)
class Request:
    """One kernel to compile: what `kernels.launch.configure` gave, the architecture ("sm_90a")."""

    config: LaunchConfig
    arch: str


@dataclass(frozen=True)
class Built:
    """What `build` gives: kernels in the order of the requests, and how many were compiled."""

    kernels: tuple[CompiledKernel, ...]
    compiled: int


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where compiled kernels are kept: $K3FUSE_CACHE, or ~/.cache/k3fuse."""
    given = environment.get("K3FUSE_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "k3fuse"


def dsl_version() -> str:
    """Versions of the CuTe DSL and its compiler libraries; InputError when it is not installed."""
    try:
        versions = [f"{DSL} {metadata.version(DSL)}"]
    except metadata.PackageNotFoundError:
        raise InputError(
            f"compiling kernels needs {DSL}: install the extra, pip install 'k3fuse[compile]'"
        ) from None
    for name in _FLAVOURS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


@cache
def source_hash() -> str:
    """SHA-256 over the files of the kernels package."""
    folder = Path(__file__).parent
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def key_of(request: Request, compiler: str) -> str:
    """The name of a request in the cache, 64 hexadecimal digits. compiler: `compiler_key()`."""
    content = f"{compiler}\0{request.arch}\0{request.config!r}"
    return hashlib.sha256(content.encode()).hexdigest()


def compiler_key() -> str:
    """What all kernels depend on: the source of the package and the versions of the DSL."""
    return f"{source_hash()}\0{dsl_version()}"


def build(
    requests: Sequence[Request],
    *,
    folder: Path | None = None,
    workers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    failed: Callable[[str], None] | None = None,
) -> Built:
    """Compile what the cache does not hold.

    folder: the cache (None: `cache_folder()`). workers: processes (None: one a core).
    progress(label, done, total) is called after each kernel. Raises InputError when the CuTe DSL is
    missing, K3FuseError naming the kernel when it does not compile; with `failed`, that is called
    with the error instead, and the kernel is left out of the result.
    """
    folder = cache_folder() if folder is None else folder
    compiler = compiler_key()
    keys = [key_of(request, compiler) for request in requests]
    done = _load_all(folder, list(dict.fromkeys(keys)))
    missing = {key: r for key, r in zip(keys, requests, strict=True) if key not in done}
    count = 0

    def report(label: str) -> None:
        if progress is not None:
            progress(label, count, len(missing))

    if missing:
        processes = min(len(missing), workers or os.cpu_count() or 1)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            jobs = {pool.submit(_compile, request): key for key, request in missing.items()}
            try:
                for job in as_completed(jobs):
                    key = jobs[job]
                    count += 1
                    try:
                        done[key] = _result(job.result, missing[key])
                    except K3FuseError as error:
                        if failed is None:
                            raise
                        failed(str(error))
                        continue
                    save(folder, key, done[key])
                    report(done[key].name)
            finally:
                pool.shutdown(cancel_futures=True)
    return Built(tuple(done[key] for key in keys if key in done), len(missing))


def _load_all(folder: Path, keys: Sequence[str]) -> dict[str, CompiledKernel]:
    """What the cache holds; reading and hashing files runs in threads."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(partial(load, folder), keys))
    return {key: kernel for key, kernel in zip(keys, found, strict=True) if kernel is not None}


def _compile(request: Request) -> CompiledKernel:
    device = importlib.import_module("k3fuse.kernels.device.launch")
    made: CompiledKernel = device.build(request.config, request.arch)
    return replace(made, scratch=request.config.scratch_bytes)


def _result(get: Callable[[], CompiledKernel], request: Request) -> CompiledKernel:
    what = f"kernel {request.config.label} for {request.arch}"
    try:
        return get()
    except BrokenProcessPool as error:
        raise K3FuseError(
            f"{what}, or one compiled beside it, ended its compiler: {error}"
        ) from error
    except Exception as error:
        raise K3FuseError(f"{what} does not compile: {type(error).__name__}: {error}") from error


def save(folder: Path, key: str, kernel: CompiledKernel) -> None:
    """Write an entry; its JSON comes last, so that a reader sees a whole entry or none."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = kernel.launch_facts()
    facts["sha256"] = hashlib.sha256(kernel.cubin).hexdigest()
    _replace(folder / f"{key}.cubin", kernel.cubin)
    _replace(folder / f"{key}.ptx", kernel.ptx.encode())
    _replace(folder / f"{key}.json", json.dumps(facts, indent=1).encode())


def load(folder: Path, key: str) -> CompiledKernel | None:
    """An entry of the cache; None if it is not there or its cubin is not what was written."""
    try:
        facts: dict[str, Any] = json.loads((folder / f"{key}.json").read_text())
        cubin = (folder / f"{key}.cubin").read_bytes()
        ptx = (folder / f"{key}.ptx").read_text()
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if hashlib.sha256(cubin).hexdigest() != facts.pop("sha256", None):
        return None
    facts["params"] = tuple(Parameter(**item) for item in facts["params"])
    for name in ("grid", "block", "cluster"):
        facts[name] = None if facts[name] is None else tuple(facts[name])
    return CompiledKernel(cubin=cubin, ptx=ptx, **facts)


def write_folder(out: Path, kernels: Sequence[CompiledKernel], *, ptx: bool = False) -> None:
    """A folder that `k3fuse.runtime.launcher` loads: manifest.json, and cubins named by content.

    ptx: write the PTX too, beside each cubin. An error names two kernels of one name.
    """
    out.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        digest = hashlib.sha256(kernel.cubin).hexdigest()
        facts = {**kernel.launch_facts(), "cubin": f"{digest}.cubin", "sha256": digest}
        if entries.setdefault(kernel.name, facts) != facts:
            raise K3FuseError(f"two kernels are called {kernel.name}")
        (out / f"{digest}.cubin").write_bytes(kernel.cubin)
        if ptx:
            (out / f"{digest}.ptx").write_text(kernel.ptx)
    listed = list(entries.values())
    manifest = {"format": MANIFEST_FORMAT, "compiler": dsl_version(), "kernels": listed}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
