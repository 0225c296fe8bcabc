"""What the author of a pass checks it with: the contract of a pass, its meaning, golden text."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from k3fuse.ir import Graph, Value, parse_graph, print_graph, run, verify
from k3fuse.passes.base import Pass, PassResult, Refusal
from k3fuse.passes.numeric_check import TOLERANCE, example_inputs, worst_error
from k3fuse.schedule.edges import launches_of, stream_of
from k3fuse.tensor_type import DType


def random_weight(value: Value) -> Tensor:
    """A float64 tensor for a weight, the same for the same name and shape.

    Matrices have variance 1 / last dimension, vectors lie around one, packed bytes are such that
    they also serve as scales (between 2^-9 and 1).
    """
    shape = [d if isinstance(d, int) else 1 for d in value.type.shape]
    seed = sum((i + 1) * byte for i, byte in enumerate(value.name.encode()))
    generator = torch.Generator().manual_seed(seed)
    if value.type.dtype == DType.U8:
        return torch.randint(118, 128, shape, generator=generator, dtype=torch.uint8)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return noise / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.3 * noise


def random_inputs(graph: Graph, *, seed: int = 0, requests: int = 3) -> dict[str, Tensor]:
    """Float64 inputs of a graph by value name; the last request is padding.

    Step inputs are recognised by their bindings (tokens, lengths, block_table, slots, accepted).
    """
    named = parse_graph(print_graph(graph))
    for value in named.inputs:
        value.binding = value.binding or value.name
    tensors = example_inputs(named, random_weight, seed=seed, requests=requests)
    return {value.name: tensors[value.binding] for value in named.inputs}


def interpret(graph: Graph, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Outputs of a graph for `random_inputs` of this graph or of one with more inputs."""
    return run(graph, {value.name: inputs[value.name] for value in graph.inputs})


def assert_round_trip(graph: Graph) -> None:
    """The text of a graph, read and printed again, is the same text."""
    text = print_graph(graph)
    again = parse_graph(text)
    verify(again)
    assert print_graph(again) == text, f"{graph.name}: text changes on a round trip"


def assert_same_meaning(before: Graph, after: Graph, *, seed: int = 0) -> None:
    """Both graphs give the same float64 outputs on random inputs, ranks agreeing bit for bit."""
    inputs = random_inputs(before, seed=seed)
    error = worst_error(interpret(after, inputs), interpret(before, inputs))
    assert error <= TOLERANCE, f"{before.name}: outputs differ by {error:.2e} relative"


def apply_pass(item: Pass, text: str, *, meaning: bool = True) -> tuple[Graph, PassResult]:
    """Run a pass on a graph in text form and check all that every pass promises.

    The graph is well formed before and after and survives a round trip; `changes` is zero exactly
    when the text is the same; a second run changes nothing; the float64 meaning is kept (unless
    `meaning` is false, for graphs that are no whole program).
    """
    before, graph = parse_graph(text), parse_graph(text)
    verify(before)
    old = print_graph(before)
    result = item.run(graph)
    verify(graph)
    assert_round_trip(graph)
    new = print_graph(graph)
    assert (result.changes == 0) == (new == old), f"{item.name} reports {result.changes} changes"
    again = parse_graph(new)
    second = item.run(again)
    assert second.changes == 0, f"{item.name} changes its own result"
    assert print_graph(again) == new, f"{item.name} changes its own result and hides it"
    if meaning:
        assert_same_meaning(before, graph)
    return graph, result


def assert_refuses(item: Pass, text: str, reason: str) -> Refusal:
    """The pass refuses a site of the graph with this reason and keeps every other promise."""
    _, result = apply_pass(item, text)
    found = [refusal for refusal in result.refusals if reason in refusal.reason]
    assert found, f"{item.name}: no refusal '{reason}' among {[r.reason for r in result.refusals]}"
    return found[0]


def launch_lines(graph: Graph) -> list[str]:
    """One line a launch, in order: stream, name, ops."""
    return [
        f"{stream_of(launch)} @{launch.name}: {' '.join(leaf.op for leaf in launch.body)}"
        for launch in launches_of(graph)
    ]


def assert_golden(path: Path, text: str, *, accept: bool) -> None:
    """The text equals that of the file; with `accept` it becomes the text of the file."""
    if accept:
        path.write_text(text)
    assert path.exists(), f"{path} is missing: run with --accept and review it"
    assert text == path.read_text(), f"{path.name} differs: review, then run with --accept"
