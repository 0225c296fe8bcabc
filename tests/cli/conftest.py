"""One synthetic checkpoint of each family, and one bundle with all kinds of buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.command import call_ok


class Compiled(NamedTuple):
    """A bundle, the dumps that --dump-dir wrote beside it, and what compile --json said."""

    bundle: Path
    dumps: Path
    summary: dict[str, Any]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="session")
def k3(home: Path) -> Path:
    """A kimi-k3-tiny checkpoint; not to be changed."""
    call_ok("synth", "kimi-k3-tiny", home / "k3")
    return home / "k3"


@pytest.fixture(scope="session")
def linear(home: Path) -> Path:
    """A kimi-linear-tiny checkpoint; not to be changed."""
    call_ok("synth", "kimi-linear-tiny", home / "linear")
    return home / "linear"


@pytest.fixture(scope="session")
def compiled(home: Path, k3: Path) -> Compiled:
    """kimi-k3-tiny for 4 ranks: steps of 2 requests, verifies of 8 rows each, and their commit."""
    bundle, dumps = home / "bundle", home / "dumps"
    outcome = call_ok(
        *("compile", "kimi-k3", k3, "--tp", 4, "--batch", 2, "--verify-rows", 8),
        *("-o", bundle, "--dump-dir", dumps, "--no-check", "--no-kernels", "--json"),
    )
    return Compiled(bundle, dumps, outcome.data)


@pytest.fixture(scope="session")
def small(home: Path, k3: Path) -> Path:
    """A bundle of one bucket that is quick to copy and to verify."""
    words = ("compile", "kimi-k3", k3, "--tp", 2, "--no-check", "--no-kernels")
    call_ok(*words, "-o", home / "small")
    return home / "small"
