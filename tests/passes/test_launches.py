"""The launches of whole models as golden text, and how many a layer has."""

from __future__ import annotations

from typing import Protocol

import pytest

from k3fuse.ir import Graph
from k3fuse.lowering.lower import layer_of
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.schedule.edges import launches_of
from k3fuse.testing import launch_lines
from tests.passes.whole_models import Case, compiled


class Golden(Protocol):
    def check(self, name: str, text: str) -> None: ...


LAYERS = (0, 1, 3, 12, 92)
"""Of the full K3: dense, KDA and MoE, MLA and MoE, the first of an AttnRes block, the last."""


def by_layer(graph: Graph) -> dict[str, list[str]]:
    """Launch lines by the layer that they work for; others under ''."""
    found: dict[str, list[str]] = {}
    for launch, line in zip(launches_of(graph), launch_lines(graph), strict=True):
        layer = layer_of(launch)
        found.setdefault("" if layer < 0 else str(layer), []).append(line)
    return found


def kind_of(model: str, layer: int) -> str:
    config = BUILTIN_CONFIGS[model]
    attention = "MLA" if config.is_mla(layer) else "KDA"
    return f"{attention}+{'dense' if config.is_dense(layer) else 'MoE'}"


def counts(model: str, graph: Graph) -> dict[str, dict[str, set[int]]]:
    """kind of layer -> stream -> numbers of launches that layers of that kind have."""
    found: dict[str, dict[str, set[int]]] = {}
    for layer, lines in by_layer(graph).items():
        if layer:
            kind = found.setdefault(kind_of(model, int(layer)), {})
            for stream in ("main", "aux", "prefetch"):
                number = sum(line.startswith(f"{stream} ") for line in lines)
                kind.setdefault(stream, set()).add(number)
    return found


def count_lines(model: str, graph: Graph) -> list[str]:
    return [
        f"{kind}: " + ", ".join(f"{stream} {sorted(numbers)}" for stream, numbers in row.items())
        for kind, row in sorted(counts(model, graph).items())
    ]


@pytest.mark.parametrize("name", ["kimi-k3-tiny", "kimi-linear-tiny"])
def test_tiny_models(name: str, golden: Golden) -> None:
    graph = compiled(Case(name, 4))
    lines = [*launch_lines(graph), "", *count_lines(name, graph)]
    golden.check(f"{name}.tp4.m1.launches", "\n".join(lines) + "\n")


@pytest.fixture(scope="module", params=[1, 8], ids=["m1", "m8"])
def full(request: pytest.FixtureRequest) -> tuple[int, Graph]:
    return request.param, compiled(Case("kimi-k3", 16, request.param))


def test_full_model(full: tuple[int, Graph], golden: Golden) -> None:
    rows, graph = full
    layers = by_layer(graph)
    lines = [*layers[""], ""]
    for layer in LAYERS:
        kind = kind_of("kimi-k3", layer)
        lines += [f"layer {layer} ({kind})", *layers[str(layer)], ""]
    golden.check(
        f"kimi-k3.tp16.m{rows}.launches",
        "\n".join([*lines, *count_lines("kimi-k3", graph)]) + "\n",
    )


def test_full_model_stays_within_its_launches(full: tuple[int, Graph]) -> None:
    rows, graph = full
    main = {
        layer: sum(line.startswith("main ") for line in lines)
        for layer, lines in by_layer(graph).items()
        if layer
    }
    most = {"KDA+MoE": 7 if rows == 1 else 9, "MLA+MoE": 10, "KDA+dense": 7}
    for layer, number in main.items():
        assert number <= most[kind_of("kimi-k3", int(layer))], f"layer {layer}"
