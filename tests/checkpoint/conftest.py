"""A hand-made checkpoint of three small parameters, and the K3 tiny one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from k3fuse.checkpoint.synth import synthesize
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import to_hf_dict
from k3fuse.models.kimi_parameters import kimi_init, kimi_parameters
from k3fuse.parameter import ParameterSpec, TensorSpec


def small_rule(path: str) -> str:
    if path.endswith("_scale"):
        return "bytes 122 124"
    return "bytes 0 255" if path.endswith("_packed") else "fan_in"


def small_specs() -> list[ParameterSpec]:
    def experts(path: str, shape: tuple[int, int]) -> ParameterSpec:
        sources = tuple(TensorSpec(f"experts.{e}.{path}", shape, "U8") for e in range(3))
        return ParameterSpec(f"experts.{path}", (3, *shape), "U8", sources, stacked=True)

    embed = TensorSpec("model.embed_tokens.weight", (8, 6), "BF16")
    head = TensorSpec("lm_head.weight", (8, 6), "BF16")
    return [
        ParameterSpec(embed.name, embed.shape, "BF16", (embed,)),
        experts("w1_packed", (4, 16)),
        experts("w1_scale", (4, 1)),
        ParameterSpec(head.name, head.shape, "BF16", (head,)),
    ]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    directory = tmp_path / "small"
    synthesize(small_specs(), {"model_type": "small"}, directory, init=small_rule, shards=2)
    return directory


@pytest.fixture(scope="session")
def k3_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = BUILTIN_CONFIGS["kimi-k3-tiny"]
    directory = tmp_path_factory.mktemp("k3") / "tiny"
    synthesize(
        kimi_parameters(config),
        to_hf_dict(config),
        directory,
        init=partial(kimi_init, config),
        seed=5,
        shards=3,
    )
    return directory


EditIndex = Callable[[Callable[[dict[str, str]], None]], None]


@pytest.fixture
def edit_index(small: Path) -> EditIndex:
    """Change the weight map of `small`."""

    def edit(change: Callable[[dict[str, str]], None]) -> None:
        path = small / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit
