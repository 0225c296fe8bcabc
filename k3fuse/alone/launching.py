"""A compiled program as a function: tensors by name in, all that one launch wrote out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3fuse.alone.check import Kernels, go
from k3fuse.alone.inputs import draw
from k3fuse.alone.memory import Memory, place_of, pushes_of
from k3fuse.errors import K3FuseError
from k3fuse.kernels.program import Attribute, Held, Place, Program, Ring, Step
from k3fuse.kernels.stages import normalize
from k3fuse.tensor_type import DType

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A normalized program and names of its values; a state goes by the name of its root."""

    program: Program
    names: Mapping[str, int]

    @classmethod
    def of(cls, program: Program) -> Case:
        """Values called v0, v1 ..., as the kernel's parameters are."""
        return cls(normalize(program), {f"v{i}": i for i in range(len(program.values))})


class Sketch:
    """A program made by hand, its values by name."""

    def __init__(self, tp: int = 1) -> None:
        self.tp = tp
        self.names: dict[str, int] = {}
        self.values: list[Held] = []
        self.steps: list[Step] = []

    def value(self, name: str, dtype: str, *shape: int, place: Place = "activation") -> str:
        """A value of the rank's memory, or one of place "internal"."""
        self.names[name] = len(self.values)
        self.values.append(Held(dtype, shape, place, len(self.values)))
        return name

    def ring(self, name: str, dtype: str, *shape: int, place: Place) -> str:
        """A value in the own mailbox, or of place "pushed" in those of the peers."""
        self.value(name, dtype, *shape, place=place)
        held = self.values[-1]
        size = -(-held.bytes // 256) * 256
        ring = Ring(held.root, size, 3, 1, 2, first_reader=place == "mailbox")
        self.values[-1] = replace(held, ring=ring)
        return name

    def version(self, name: str) -> str:
        """The next version of a state."""
        root = self.names[name]
        self.names[f"{name}'"] = len(self.values)
        self.values.append(replace(self.values[root], root=root))
        return f"{name}'"

    def step(
        self, op: str, operands: list[str], results: list[str], **attributes: Attribute
    ) -> None:
        """Add an op on named values."""
        indices = [tuple(self.names[n] for n in names) for names in (operands, results)]
        self.steps.append(Step(op, tuple(sorted(attributes.items())), *indices))

    def case(self) -> Case:
        """The program; every result of place "activation" is written."""
        made = {r for step in self.steps for r in step.results}
        written = tuple(i for i in sorted(made) if self.values[i].place == "activation")
        program = Program(self.tp, tuple(self.values), tuple(self.steps), written, "entry")
        return Case(normalize(program), self.names)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a folder, and the case that it was compiled from."""

    kernels: Kernels
    name: str
    facts: Mapping[str, Any]
    case: Case
    device: str = "cuda"

    @property
    def program(self) -> Program:
        return self.case.program

    def tensor(self, name: str, data: object) -> Tensor:
        """Numbers as the value of that name takes them."""
        dtype = DType(self.program.values[self.case.names[name]].dtype).to_torch()
        return torch.as_tensor(data).to(self.device, dtype)

    def draw(self, seed: int, given: Tensors | None = None) -> dict[str, Tensor]:
        """Random values for all that is read, but for those given."""
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        keep = {self.case.names[n]: t for n, t in (given or {}).items()}
        found = draw(self.program, self.device, keep=keep)
        return {name: found[i] for name, i in self.case.names.items() if i in found}

    def __call__(self, given: Tensors, rank: int = 0) -> dict[str, Tensor]:
        """Launch once. Of a pushed value, what each peer was sent, [tp, ...]; of a state, all."""
        program, names = self.program, self.case.names
        inputs = {names[n]: self.tensor(n, tensor) for n, tensor in given.items()}
        place = replace(place_of(program, random.Random(0)), rank=rank)
        memory = Memory(program, self.facts, inputs, place, self.device)
        go(self.kernels.bind(self.name, memory.arguments), self.device)
        broken = [n for n, region in memory.everything().items() if not region.intact()]
        if broken:
            raise K3FuseError(f"{self.name} wrote outside of {', '.join(broken)}")
        sent = {step.results[0]: step for step in pushes_of(program)}
        found: dict[str, Tensor] = {}
        for name, value in names.items():
            held = program.values[value]
            if value in sent:
                landed = [memory.landed(sent[value], peer) for peer in range(program.tp)]
                found[name] = torch.stack(landed)
            elif value in program.written:
                found[name] = memory.outputs[f"v{value}"].view(held.dtype, held.shape).clone()
            elif held.place == "state" and held.root == value:
                found[name] = memory.states[f"v{value}"].view(held.dtype, held.shape).clone()
        return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype are equal byte for byte."""
    return torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """The words of a tensor as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
