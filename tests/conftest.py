"""Settings every test shares: one torch thread, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the golden files")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Functions by name, without their address, which differs between the workers of xdist."""
    name = getattr(val, "__name__", None) if callable(val) else None
    return None if name is None else argname if name == "<lambda>" else str(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA, and say why."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and a CUDA build of torch")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
