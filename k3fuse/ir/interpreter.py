"""The meaning of a graph: every op's torch reference, on N simulated ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from k3fuse.errors import VerifyError
from k3fuse.ir.graph import Graph, Node, Value
from k3fuse.ir.op import Context, op_named
from k3fuse.tensor_type import DType, TensorType

Ranks = list[Tensor]
"""What each rank holds of one value, in rank order."""

Gather = Callable[[Ranks], Ranks]
"""From what the ranks of this process hold of a value to what all ranks of the group hold."""


def shard_tensor(tensor: Tensor, type_: TensorType, tp: int) -> Ranks:
    """Cut a global tensor as its type says; replicated values are shared, not copied."""
    if type_.placement.is_shard:
        return list(tensor.chunk(tp, type_.placement.dim))
    if type_.placement.is_partial:
        raise VerifyError(f"a global tensor of partial type {type_} has no meaning")
    return [tensor] * tp


def assemble(ranks: Ranks, type_: TensorType, name: str = "value") -> Tensor:
    """The global tensor; VerifyError when a replicated value differs in any bit between ranks."""
    if type_.placement.is_shard:
        return torch.cat(ranks, type_.placement.dim)
    if type_.placement.is_partial:
        raise VerifyError(f"%{name} is a partial sum: reduce it first")
    check_bit_equal(ranks, name)
    return ranks[0]


def check_bit_equal(ranks: Ranks, name: str) -> None:
    """VerifyError names the value and the rank whose bits differ from rank 0's."""
    for rank, tensor in enumerate(ranks[1:], start=1):
        if tensor is not ranks[0] and not torch.equal(_bits(tensor), _bits(ranks[0])):
            raise VerifyError(f"%{name}: rank {rank} holds other bits than rank 0")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


class Environment:
    """Values of a running graph. Executors subclass it to keep values in planned buffers."""

    exact = False
    """Whether values are float64 whatever their types say, so that nothing may round them."""

    def __init__(self) -> None:
        self._values: dict[int, Ranks] = {}

    def read(self, value: Value) -> Ranks:
        return self._values[id(value)]

    def write(self, value: Value, ranks: Ranks) -> None:
        self._values[id(value)] = ranks

    def forget(self, value: Value) -> None:
        self._values.pop(id(value), None)


def bind_dims(types: Sequence[TensorType], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Sizes of the symbolic dimensions, from global shapes of the inputs."""
    dims: dict[str, int] = {}
    for type_, shape in zip(types, shapes, strict=True):
        for dim, extent in zip(type_.shape, shape, strict=True):
            if isinstance(dim, str):
                if dims.setdefault(dim, extent) != extent:
                    raise VerifyError(f"dimension {dim} is both {dims[dim]} and {extent}")
            elif dim != extent:
                raise VerifyError(f"a tensor of shape {tuple(shape)} was given for {type_}")
    return dims


def run_node(
    node: Node,
    env: Environment,
    tp: int,
    dims: Mapping[str, int],
    *,
    ranks: Sequence[int] | None = None,
    gather: Gather | None = None,
) -> None:
    """Run one leaf on every rank.

    `ranks`: those that `env` holds, in order, when it does not hold all `tp` of them; then `gather`
    says what all ranks hold of an operand of a collective.
    """
    op = op_named(node.op)
    ranks = range(tp) if ranks is None else ranks
    operands = [env.read(v) for v in node.operands]
    types = tuple(v.type for v in node.operands)
    if op.group_reference is not None:
        ctx = Context(tp, types=types, exact=env.exact)
        whole = operands if gather is None else [gather(held) for held in operands]
        by_rank = [[o[r] for o in whole] for r in range(tp)]
        everywhere = op.group_reference(by_rank, node.attrs, ctx)
        per_rank = [everywhere[r] for r in ranks]
    else:
        assert op.reference is not None
        shape: tuple[int, ...] = ()
        if node.results:
            local = node.results[0].type.local_shape(tp)
            shape = tuple(dims[d] if isinstance(d, str) else d for d in local)
        per_rank = [
            op.reference(
                [o[i] for o in operands], node.attrs, Context(tp, r, shape, types, env.exact)
            )
            for i, r in enumerate(ranks)
        ]
    for index, result in enumerate(node.results):
        env.write(result, [results[index] for results in per_rank])


def run(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    *,
    tp: int | None = None,
    check_ranks: bool = True,
    observe: Callable[[Node, Environment], None] | None = None,
) -> list[Tensor]:
    """Run a graph on global tensors by input name; returns the global outputs.

    Every replicated result is checked to be bit-equal on all ranks, and freed after its last use.
    `tp` overrides the number of ranks, for a graph that is not sharded yet. `observe` is called
    after each leaf (to compare intermediate values).
    """
    tp = graph.tp if tp is None else tp
    env = Environment()
    tensors = [inputs[v.name] for v in graph.inputs]
    dims = bind_dims([v.type for v in graph.inputs], [t.shape for t in tensors])
    env.exact = any(
        tensor.dtype == torch.float64 and value.type.dtype != DType.F64
        for value, tensor in zip(graph.inputs, tensors, strict=True)
    )
    for value, tensor in zip(graph.inputs, tensors, strict=True):
        env.write(value, shard_tensor(tensor, value.type, tp))
    keep = {id(v) for v in graph.outputs}
    last_use: dict[int, Node] = {}
    for node in graph.leaves():
        for value in node.operands:
            last_use[id(value)] = node
    for node in graph.leaves():
        run_node(node, env, tp, dims)
        if check_ranks:
            for result in node.results:
                if result.type.placement.is_replicate:
                    check_bit_equal(env.read(result), result.name)
        if observe is not None:
            observe(node, env)
        for value in node.operands:
            if last_use[id(value)] is node and id(value) not in keep:
                env.forget(value)
    return [assemble(env.read(v), v.type, v.name) for v in graph.outputs]
