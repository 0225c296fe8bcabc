"""Weights as the launches want them: the recipe of a bundle, run on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from k3fuse.errors import InputError
from k3fuse.ir import Environment, Graph, Value, run_node, shard_tensor
from k3fuse.ir.interpreter import Ranks
from k3fuse.tensor_type import DType, TensorType

Load = Callable[[str], Tensor]
"""Parameter path -> the whole parameter."""

LoadShard = Callable[[str, TensorType, int], Tensor]
"""Parameter path, its type in the recipe, and a rank -> what the rank holds of the parameter."""


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

    def ranks(value: Value) -> Ranks:
        tensor = load(value.binding)
        _check_shape(value, tensor, value.type.shape)
        return shard_tensor(tensor, value.type, recipe.tp)

    return _stream(recipe, ranks, range(recipe.tp))


def stream_shards(
    recipe: Graph, load: LoadShard, ranks: Sequence[int]
) -> Iterator[tuple[str, list[Tensor]]]:
    """As `stream_recipe` for these ranks only, which never sees more of a parameter than they hold.

    A replicated parameter is loaded once, for the first of them.
    """

    def held(value: Value) -> Ranks:
        own = ranks if value.type.placement.is_shard else ranks[:1]
        found = [load(value.binding, value.type, rank) for rank in own]
        for tensor in found:
            _check_shape(value, tensor, value.type.local_shape(recipe.tp))
        return found * (len(ranks) // len(found))

    return _stream(recipe, held, ranks)


def shard_slice(type_: TensorType, tp: int, rank: int) -> tuple[int, int, int] | None:
    """(dim, start, stop) of what a rank holds of a parameter; None for all of it."""
    if not type_.placement.is_shard:
        return None
    dim = type_.placement.dim
    size = type_.local_shape(tp)[dim]
    assert isinstance(size, int)
    return dim, rank * size, (rank + 1) * size


def _stream(
    recipe: Graph, held: Callable[[Value], Ranks], ranks: Sequence[int]
) -> Iterator[tuple[str, list[Tensor]]]:
    env = Environment()
    wanted = {id(v) for v in recipe.outputs}
    last_use = {id(v): node for node in recipe.nodes for v in node.operands}

    def load(value: Value) -> Iterator[tuple[str, list[Tensor]]]:
        tensors = held(value)
        env.exact |= tensors[0].dtype == torch.float64 and value.type.dtype != DType.F64
        env.write(value, tensors)
        if id(value) in wanted:
            yield value.name, tensors

    for node in recipe.nodes:
        for value in dict.fromkeys(node.operands):
            if value.producer is None and value.uses[0][0] is node:
                yield from load(value)
        run_node(node, env, recipe.tp, {}, ranks=ranks)
        for result in node.results:
            if id(result) in wanted:
                yield result.name, env.read(result)
        for value in (*node.operands, *node.results):
            if last_use.get(id(value), node) is node:
                env.forget(value)
    for value in recipe.inputs:
        if not value.uses:
            yield from load(value)
            env.forget(value)


def _check_shape(value: Value, tensor: Tensor, shape: Sequence[int | str]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise InputError(
            f"parameter {value.binding} has shape {list(tensor.shape)}, the bundle was compiled "
            f"for {value.type}: load the checkpoint that the bundle names, or compile again"
        )
