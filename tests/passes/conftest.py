"""Golden text, which `pytest --accept` rewrites instead of comparing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3fuse.testing import assert_golden

GOLDEN = Path(__file__).parents[1] / "golden"


class Golden:
    """Files under tests/golden, by their path there."""

    def __init__(self, accept: bool) -> None:
        self._accept = accept

    def read(self, name: str) -> str:
        return (GOLDEN / name).read_text()

    def check(self, name: str, text: str) -> None:
        assert_golden(GOLDEN / name, text, accept=self._accept)


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Golden:
    return Golden(bool(pytestconfig.getoption("--accept", default=False)))
