"""Time of a launch in a dependent chain, and the bytes that it must move."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from k3fuse.alone.check import Kernels
from k3fuse.alone.inputs import draw, outside
from k3fuse.alone.memory import Memory, captured, place_of, pushes_of
from k3fuse.alone.reference import evaluate
from k3fuse.kernels.program import Program, Step

CHAIN, SHORT = 96, 16  # launches of the two chains whose difference is timed
REPEATS = 25
COLD_BYTES = 300 * 1000**2  # of distinct data in a chain: five times the L2 of an H200
WARM_BYTES = 2 * 60 * 2**20  # a chain over less may find its data in the L2
MOST_BYTES = 40 * 1000**3  # of copies on the device
MOST_FRESH = 8 * 1000**3  # of all else that each launch has of its own
BIG_BYTES = 1 << 20
"""Weights and states that are larger are copied a few times; all else is fresh in each launch."""


def time_launch(
    kernels: Kernels,
    name: str,
    facts: Mapping[str, Any],
    program: Program,
    read_bandwidth: float,
    *,
    device: str = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Microseconds a launch: the slope between a short and a long chain over distinct data.

    Bytes are the least that one launch moves; "cold" says whether they come from memory.
    """
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    place = place_of(program, random.Random(seed))
    first = draw(program, device)
    moved = [bytes_moved(program, first, place.rank)]
    big = {
        v: first[v]
        for v in outside(program)
        if program.values[v].place in ("weight", "state") and first[v].nbytes > BIG_BYTES
    }
    first_memory = Memory(program, facts, first, place, device)
    peers = first_memory.peer_rings
    common = {n: r for n, r in first_memory.others.items() if not n.startswith("v")}
    own = [*first_memory.inputs.values(), *first_memory.outputs.values()]
    own += first_memory.own_rings.values()
    fresh = sum(region.size for region in own) - sum(
        tensor.nbytes for v, tensor in big.items() if program.values[v].place == "weight"
    )
    sets = max(2, min(CHAIN, MOST_FRESH // max(fresh, 1)))
    copies = 1
    if big:
        room = MOST_BYTES // sum(tensor.nbytes for tensor in big.values())
        copies = max(1, min(sets, max(2, -(-COLD_BYTES // max(moved[0], 1))), room))
    hosts = [{v: t for v, t in first.items() if program.values[v].place == "host"}]
    memories = [first_memory]
    for index in range(1, sets):
        shared, copy = dict(common), index % copies
        if index < copies:
            inputs = draw(program, device)
            if index < 4:
                moved.append(bytes_moved(program, inputs, place.rank))
            hosts.append({v: t for v, t in inputs.items() if program.values[v].place == "host"})
        else:  # ids and pages belong to a cache, so they are taken with it
            inputs = draw(program, device, keep={**hosts[copy], **big})
            held = memories[copy].everything()
            shared |= {f"v{value}": held[f"v{value}"] for value in big}
        memories.append(Memory(program, facts, inputs, place, device, shared, peers))
    bound = [kernels.bind(name, memory.arguments) for memory in memories]
    launches = [bound[index % sets] for index in range(CHAIN)]
    short, long = _chain(launches[:SHORT]), _chain(launches)
    us = (_median_us(long) - _median_us(short)) / (CHAIN - SHORT)
    size = sum(moved) / len(moved)
    return {
        "us": us,
        "bytes": round(size),
        "cold": size * copies > WARM_BYTES,
        "copies": copies,
        "tb_per_s": size / us * 1e-6,
        "share": size / (us * 1e-6) / read_bandwidth,
    }


def bytes_moved(program: Program, inputs: Mapping[int, Tensor], rank: int) -> int:
    """Least bytes read and written by a launch: of experts those that are chosen, of states those
    of live requests, of a cache the rows that are seen."""
    special: dict[int, float] = {}
    for step in program.steps:
        for position, value in enumerate(step.operands):
            root = program.values[value].root
            share = _share(program, step, position, inputs, rank)
            if share is not None:
                special[root] = special.get(root, 0.0) + share * program.values[root].bytes
    total = sum(special.values())
    for value in outside(program):
        held = program.values[value]
        if value not in special:
            total += held.bytes
        if held.ring is not None and held.ring.first_reader:
            total += held.ring.stage_bytes
    total += sum(program.values[value].bytes for value in program.written)
    for step in pushes_of(program):
        copies = 1 if step.op == "push_chunks" else program.tp
        total += program.values[step.operands[0]].bytes * copies
    return round(total)


def _share(
    program: Program, step: Step, position: int, inputs: Mapping[int, Tensor], rank: int
) -> float | None:
    """The part of an operand that a step touches, twice if it writes it too; None: all."""
    if step.op == "moe_experts" and position >= 3:
        (ids,) = step.operands[1:2]
        chosen = evaluate(program, inputs, rank=rank, wanted={ids}).values[ids]
        distinct = int(torch.bincount(chosen.flatten().long()).count_nonzero())
        return distinct / program.values[step.operands[3]].shape[0]
    if step.op == "embedding" and position == 1:
        table = program.values[step.operands[1]]
        return program.values[step.operands[0]].rows / table.rows
    if step.op == "l2_prefetch":
        size = sum(program.values[v].bytes for v in step.operands)
        wanted = step.attribute("bytes")
        assert isinstance(wanted, int)
        return min(1.0, wanted / size)
    if (step.op, position) in (("mla_append", 0), ("mla_attend_latent", 1)):
        _, lengths, slots = (inputs[v] for v in step.operands[-3:])
        rows = step.attribute("rows_per_request")
        assert isinstance(rows, int)
        seen = lengths[slots >= 0] + rows
        if step.op == "mla_append":
            seen = torch.full_like(seen, rows)
        cache = program.values[step.operands[position]]
        return int(seen.sum()) / (cache.shape[0] * cache.shape[1])
    states = _STATES.get(step.op, {})
    if position in states:
        slots = inputs[step.operands[10 if step.op == "kda_commit" else 12]]
        live = int((slots >= 0).sum()) / program.values[step.operands[position]].shape[0]
        if states[position] != "journal":
            return live * (2 if states[position] == "update" else 1)
        journal = program.values[step.operands[position]]
        rows = step.attribute("rows_per_request")
        if step.op == "kda_commit":
            rows = float(inputs[step.operands[11]].double().mean())
        assert isinstance(rows, int | float)
        return live * rows / journal.shape[1]
    return None


_STATES: Mapping[str, Mapping[int, str]] = {
    "kda_step": {10: "update", 11: "update"},
    "kda_verify": {10: "read", 11: "read", 13: "journal", 14: "journal", 15: "journal"},
    "kda_commit": {0: "journal", 1: "journal", 2: "journal", 8: "update", 9: "update"},
}


def _chain(launches: list[Callable[[int], None]]) -> torch.cuda.CUDAGraph:
    def put(stream: int) -> None:
        for launch in launches:
            launch(stream)

    return captured(put)


def _median_us(graph: torch.cuda.CUDAGraph) -> float:
    """Median of replays, each after reading other memory: no chain starts with a warm L2."""
    other = torch.zeros(64 * 1000**2, device="cuda")
    times: list[float] = []
    for _ in range(REPEATS):
        other.amax()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]
