"""What the kernel tests share: programs of real plans, the CuTe DSL where it is installed, and one
cache a session."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from k3fuse.compiler import CompiledBucket, compile_bucket
from k3fuse.kernels.build import Built, Request, build
from k3fuse.kernels.launch import configure
from k3fuse.kernels.program import Program
from k3fuse.lowering.launch_program import launch_programs
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.runtime.bundle import Bucket
from k3fuse.target import get_target

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
TINY = "kimi-k3-tiny"
STEP, VERIFY, COMMIT = Bucket(3, 1, "step"), Bucket(3, 4, "step"), Bucket(3, 4, "commit")


@pytest.fixture(scope="session")
def dsl() -> None:
    """Skip where the CuTe DSL is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl: pip install 'k3fuse[compile]'")


@functools.cache
def compiled_bucket(bucket: Bucket = STEP, tp: int = 2, name: str = TINY) -> CompiledBucket:
    options = CompileOptions(
        target="sm_90a",
        tp=tp,
        batches=(bucket.batch,),
        verify_rows=bucket.rows_per_request if bucket.rows_per_request > 1 else 0,
        max_context=128,
        page_size=16,
        prefetch=True,
    )
    model = family_of(name).build(builtin_config(name), "meta")
    return compile_bucket(model, name, bucket, options)


def programs(bucket: Bucket = STEP, tp: int = 2, name: str = TINY) -> dict[str, Program]:
    """The distinct programs of a plan by the name of the first launch."""
    made = compiled_bucket(bucket, tp, name)
    first: dict[Program, str] = {}
    for launch, program in launch_programs(made.graph, made.plan).items():
        first.setdefault(program, launch)
    return {launch: program for program, launch in first.items()}


@functools.cache
def samples() -> tuple[Program, ...]:
    """One program of each chain of ops in a step, a verify step and a commit on two ranks."""
    found: dict[str, Program] = {}
    for bucket in (STEP, VERIFY, COMMIT):
        for program in programs(bucket).values():
            found.setdefault(program.label, program)
    return tuple(found.values())


def requests() -> list[Request]:
    """All samples for the first architecture, every fourth for the others."""
    return [
        Request(configure(program, get_target(arch)), arch)
        for number, arch in enumerate(ARCHES)
        for program in (samples() if number == 0 else samples()[number::4])
    ]


@pytest.fixture(scope="session")
def cache_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def built(dsl: None, cache_path: Path) -> Built:
    """Every request, compiled once a session."""
    return build(requests(), folder=cache_path)
