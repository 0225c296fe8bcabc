"""The state of all requests as the ranks hold it: one storage a tensor and rank, for good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from k3fuse.errors import VerifyError
from k3fuse.ir.interpreter import Ranks, assemble, shard_tensor
from k3fuse.models.kimi import DecodeState, LayerState
from k3fuse.tensor_type import TensorType


def state_bindings(state: DecodeState) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a state with the name that graphs bind it by: state.<layer>.<field>."""
    for layer, layer_state in enumerate(state):
        for field, tensor in zip(layer_state._fields, layer_state, strict=True):
            yield f"state.{layer}.{field}", tensor


class ShardedState:
    """A DecodeState cut over `tp` ranks by the types that graphs give its tensors.

    A tensor that no graph knows is held whole by every rank. The storages keep their addresses:
    `load` and every step write into them.
    """

    def __init__(self, state: DecodeState, types: Mapping[str, TensorType], tp: int) -> None:
        self._shapes = [type(layer_state) for layer_state in state]
        self._fields = [layer_state._fields for layer_state in state]
        self._types = dict(types)
        self._tp = tp
        self._storage: dict[str, Ranks] = {
            name: [shard.clone() for shard in self._shards(name, tensor)]
            for name, tensor in state_bindings(state)
        }
        unknown = sorted(types.keys() - self._storage.keys())
        if unknown:
            raise VerifyError(f"the model has no state {unknown[0]} ({len(unknown)} unknown)")

    def ranks(self, binding: str) -> Ranks:
        """The storages of one state tensor, in rank order; written in place."""
        return self._storage[binding]

    def load(self, state: DecodeState) -> None:
        """Copy a global state into the storages."""
        for name, tensor in state_bindings(state):
            for storage, shard in zip(self._storage[name], self._shards(name, tensor), strict=True):
                storage.copy_(shard)

    def read(self) -> DecodeState:
        """A copy as one global state. VerifyError when ranks differ in what they all hold."""
        state: list[LayerState] = []
        for layer, (kind, fields) in enumerate(zip(self._shapes, self._fields, strict=True)):
            state.append(kind(*(self._whole(f"state.{layer}.{field}") for field in fields)))
        return state

    def _shards(self, name: str, tensor: Tensor) -> Ranks:
        if name not in self._types:
            return [tensor] * self._tp
        return shard_tensor(tensor, self._types[name], self._tp)

    def _whole(self, name: str) -> Tensor:
        ranks = self._storage[name]
        if name not in self._types:
            return ranks[0].clone()
        return assemble(ranks, self._types[name], name).clone()
