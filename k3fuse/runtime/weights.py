"""Weights as the launches want them: the recipe of a bundle, run on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.ir import Environment, Graph, Value, run_node, shard_tensor
from k3fuse.tensor_type import DType

Load = Callable[[str], Tensor]
"""Parameter path -> the whole parameter."""


def evaluate_recipe(recipe: Graph, load: Load) -> dict[str, list[Tensor]]:
    """Value name -> what each rank holds, in rank order, for every output of the recipe.

    `recipe` is what `lowering.recipe.weight_recipe` makes. Ranks may share storage. Raises
    `InputError` when a parameter has not the shape that the recipe was made for.
    """
    return dict(stream_recipe(recipe, load))


def stream_recipe(recipe: Graph, load: Load) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the pairs of `evaluate_recipe` one by one, each as soon as it is known.

    A parameter is loaded just before its first use and dropped after its last, so a caller that
    keeps one rank's part of each value never holds the whole model.
    """
    env = Environment()
    wanted = {id(v) for v in recipe.outputs}
    last_use = {id(v): node for node in recipe.nodes for v in node.operands}
    for node in recipe.nodes:
        for value in dict.fromkeys(node.operands):
            if value.producer is None and value.uses[0][0] is node:
                yield from _load(recipe, value, load, env, wanted)
        run_node(node, env, recipe.tp, {})
        for result in node.results:
            if id(result) in wanted:
                yield result.name, env.read(result)
        for value in (*node.operands, *node.results):
            if last_use.get(id(value), node) is node:
                env.forget(value)
    for value in recipe.inputs:
        if not value.uses:
            yield from _load(recipe, value, load, env, wanted)
            env.forget(value)


def _load(
    recipe: Graph, value: Value, load: Load, env: Environment, wanted: set[int]
) -> Iterator[tuple[str, list[Tensor]]]:
    tensor = load(value.binding)
    if tuple(tensor.shape) != value.type.shape:
        raise InputError(
            f"parameter {value.binding} has shape {list(tensor.shape)}, the bundle was compiled "
            f"for {value.type}: load the checkpoint that the bundle names, or compile again"
        )
    env.exact |= tensor.dtype == torch.float64 and value.type.dtype != DType.F64
    env.write(value, shard_tensor(tensor, value.type, recipe.tp))
    if id(value) in wanted:
        yield value.name, env.read(value)
