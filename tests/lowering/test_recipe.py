from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from k3fuse.errors import InputError, K3FuseError
from k3fuse.ir import Environment, Graph, parse_graph, print_graph, run_node, shard_tensor, verify
from k3fuse.lowering.recipe import merge_recipes, weight_recipe, weights_read
from k3fuse.runtime.weights import evaluate_recipe, stream_recipe
from tests.lowering.compiled import compiled


def parameters(graph: Graph) -> dict[str, Tensor]:
    """Random whole parameters by binding."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for value in graph.inputs:
        if value.kind == "weight":
            shape = [d for d in value.type.shape if isinstance(d, int)]
            drawn = torch.randint(-8, 8, shape, generator=generator).float() / 4
            found[value.binding] = drawn.abs().to(value.type.dtype.to_torch())
    return found


@pytest.mark.parametrize("model", ["kimi-k3-tiny", "kimi-linear-tiny"])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_recipe_computes_what_the_graph_would(model: str, tp: int) -> None:
    graph = compiled(model, tp).graph
    recipe = weight_recipe(graph)
    verify(recipe)
    text = print_graph(recipe)
    again = parse_graph(text)
    assert print_graph(again) == text
    given = parameters(graph)
    got = evaluate_recipe(again, given.__getitem__)

    env = Environment()
    for value in graph.inputs:
        if value.kind == "weight":
            env.write(value, shard_tensor(given[value.binding], value.type, tp))
    for node in graph.nodes:
        if not node.is_fused:
            run_node(node, env, tp, {})
    wanted = weights_read(graph)
    assert list(got) != []
    assert (
        set(got) == {v.name for v in wanted} == {w.value for w in compiled(model, tp).plan.weights}
    )
    for value in wanted:
        ranks = got[value.name]
        assert len(ranks) == tp
        for mine, theirs in zip(ranks, env.read(value), strict=True):
            assert tuple(mine.shape) == value.type.local_shape(tp)
            assert torch.equal(mine, theirs)


def test_parameters_are_loaded_once_and_dropped_after_their_last_use() -> None:
    graph = compiled("kimi-k3-tiny", 2).graph
    given = parameters(graph)
    recipe = weight_recipe(graph)
    folded = {v.binding for v in recipe.inputs if v.binding.endswith("_res_norm.weight")}
    alive: dict[str, weakref.ref[Tensor]] = {}
    most = 0

    def load(binding: str) -> Tensor:
        nonlocal most
        assert binding not in alive
        tensor = given[binding].clone()
        alive[binding] = weakref.ref(tensor)
        most = max(most, sum(r() is not None for b, r in alive.items() if b in folded))
        return tensor

    for _ in stream_recipe(recipe, load):
        pass
    assert set(alive) == {v.binding for v in recipe.inputs}
    assert most <= 2 < len(folded)


def test_a_parameter_of_another_shape_is_named() -> None:
    graph = compiled("kimi-k3-tiny", 2).graph
    given = parameters(graph)
    given["lm_head.weight"] = torch.zeros(3, 3)
    with pytest.raises(InputError, match=r"lm_head\.weight has shape \[3, 3\]"):
        evaluate_recipe(weight_recipe(graph), given.__getitem__)


@pytest.mark.parametrize("tp", [1, 2])
def test_buckets_share_one_recipe(tp: int) -> None:
    graphs = [
        compiled("kimi-k3-tiny", tp, 1).graph,
        compiled("kimi-k3-tiny", tp, 8).graph,
        compiled("kimi-k3-tiny", tp, 2, rows=3, kind="verify").graph,
        compiled("kimi-k3-tiny", tp, 2, rows=3, kind="commit").graph,
    ]
    recipes = [weight_recipe(graph) for graph in graphs]
    merged = merge_recipes(recipes)
    verify(merged)
    got = evaluate_recipe(merged, parameters(graphs[0]).__getitem__)
    for recipe in recipes:
        assert {v.name for v in recipe.outputs} <= set(got)
    assert print_graph(merge_recipes([recipes[0]])) == print_graph(recipes[0])


def test_buckets_that_disagree_are_refused() -> None:
    first = weight_recipe(compiled("kimi-k3-tiny", 2, 1).graph)
    second = parse_graph(
        print_graph(first).replace(
            "%lm_head.weight: bf16[512,128]@S(0)", "%lm_head.weight: bf16[512,128]"
        )
    )
    with pytest.raises(K3FuseError, match=r"lm_head\.weight differently"):
        merge_recipes([first, second])
