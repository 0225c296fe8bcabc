from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from k3fuse.compiler import buckets_of, bundle_contents, compile_bucket
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.report.contents import BucketReport, report_of
from k3fuse.runtime.bundle import read_bundle, write_bundle

MODEL = "kimi-k3-tiny"


def write_tiny(directory: Path, options: CompileOptions) -> Path:
    torch.set_num_threads(1)
    config = builtin_config(MODEL)
    module = family_of(MODEL).build(config, "meta")
    compiled = [compile_bucket(module, MODEL, b, options) for b in buckets_of(options)]
    write_bundle(directory, bundle_contents(MODEL, config, options, compiled, None))
    return directory


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CompileOptions("gb300", tp=2, batches=(1, 2), verify_rows=2, prefetch=True)
    return write_tiny(tmp_path_factory.mktemp("report") / "tp2", options)


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CompileOptions("gb300", tp=2, batches=(1,), prefetch=False)
    return write_tiny(tmp_path_factory.mktemp("report") / "plain", options)


@pytest.fixture(scope="session")
def report(bundle: Path) -> BucketReport:
    opened = read_bundle(bundle)
    smallest = min(opened.buckets, key=lambda b: (b.batch, b.rows_per_request, b.kind))
    return dataclasses.replace(report_of(opened, smallest), floor_us=1.0)
