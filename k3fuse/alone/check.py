"""One launch against the reference: numbers, bits of replays, guards, and rows of padding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from k3fuse.alone.inputs import draw, outside, rows_per_request
from k3fuse.alone.memory import (
    GUARD,
    Memory,
    Region,
    captured,
    looks_empty,
    place_of,
    pushes_of,
    rings_of,
    sent_to,
    sentinel_fill,
)
from k3fuse.alone.reference import IDS, Evaluated, evaluate
from k3fuse.kernels.program import Program, Step

TOLERANCE = {"bf16": 4e-3, "f32": 2e-3}
"""Largest norm of the error over the norm of the result, by dtype of the value."""
NEAR_SCORES = 2e-3
"""How far below the best a choice may be when its logits were computed in the launch."""
SIGMOID_ERROR = 2e-6
"""The same when the logits are given: only the sigmoid is approximate."""


class Kernels(Protocol):
    """What launches: `k3fuse.runtime.launcher.KernelFolder`, or a stand-in."""

    def bind(self, name: str, arguments: Mapping[str, int | float]) -> Callable[[int], None]: ...


@dataclass
class Finding:
    """Errors by value (norm of the difference over the norm), and what is wrong, in words."""

    errors: dict[str, float] = field(default_factory=dict[str, float])
    faults: list[str] = field(default_factory=list[str])
    different_replays: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.faults,
            "why": "; ".join(self.faults[:4]),
            "errors": self.errors,
            "different_replays": self.different_replays,
        }


def check(
    kernels: Kernels,
    name: str,
    facts: Mapping[str, Any],
    program: Program,
    *,
    device: str = "cuda",
    seed: int = 0,
    replays: int = 50,
) -> Finding:
    """Launch once on random inputs and compare all that was written, then replay.

    replays: of a captured graph, each on the same inputs; 0 on a device without graphs.
    """
    source = random.Random(seed)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    inputs = draw(program, device)
    memory = Memory(program, facts, inputs, place_of(program, source), device)
    launch = kernels.bind(name, memory.arguments)
    finding = Finding()
    before = {n: r.checksum() for n, r in {**memory.inputs, **_steady(memory)}.items()}
    initial = {n: r.raw.clone() for n, r in memory.changing().items()}
    go(launch, device)
    _Comparison(memory, inputs, initial, finding).all()
    if "errors" in memory.others:
        words = memory.others["errors"].view("i32", (12,))
        record = [int(word) for word in words]
        if any(record):
            finding.faults.append(f"a spin was given up: {record}")
    for region_name, region in memory.everything().items():
        if not region.intact():
            finding.faults.append(f"wrote outside of {region_name}")
    for region_name, sums in before.items():
        region = memory.everything()[region_name]
        if region.checksum() != sums:
            finding.faults.append(f"changed {region_name}, an input")
    if replays:
        finding.different_replays = _replay(memory, launch, initial, replays)
        if finding.different_replays:
            count = finding.different_replays
            finding.faults.append(f"{count} of {replays} replays gave other bits")
    _check_padding(memory, launch, inputs, initial, finding)
    return finding


def go(launch: Callable[[int], None], device: str) -> None:
    """One launch, waited for."""
    if device == "cpu":
        launch(0)
        return
    launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def _steady(memory: Memory) -> dict[str, Region]:
    return {n: r for n, r in memory.others.items() if n == "step"}


class _Comparison:
    """Everything that a launch has written against what it should have."""

    def __init__(
        self,
        memory: Memory,
        inputs: Mapping[int, Tensor],
        initial: Mapping[str, Tensor],
        finding: Finding,
    ) -> None:
        self.memory, self.program, self.rank = memory, memory.program, memory.place.rank
        self.initial, self.finding = initial, finding
        self.seen_ids = self._chosen()
        self.wanted = evaluate(self.program, inputs, rank=self.rank, forced=self.seen_ids)

    def all(self) -> None:
        for value in self.program.written:
            held = self.program.values[value]
            got = self.memory.outputs[f"v{value}"].view(held.dtype, held.shape)
            self._numbers(f"v{value}", held.dtype, got, self.wanted.values[value])
        self._choices()
        for step in pushes_of(self.program):
            self._pushed(step)
        self._states()
        self._rings()

    def _chosen(self) -> dict[int, Tensor]:
        """Ids that the kernel made known."""
        found: dict[int, Tensor] = {}
        sent = {step.operands[0]: step for step in pushes_of(self.program)}
        for step in self.program.steps:
            if step.op not in IDS:
                continue
            ids = step.results[IDS[step.op]]
            held = self.program.values[ids]
            if ids in self.program.written:
                found[ids] = self.memory.outputs[f"v{ids}"].view(held.dtype, held.shape).clone()
            elif ids in sent:
                found[ids] = self.memory.landed(sent[ids], 0).clone()
        return found

    def _fault(self, text: str) -> None:
        self.finding.faults.append(text)

    def _numbers(self, name: str, dtype: str, got: Tensor, wanted: Tensor) -> None:
        if dtype not in TOLERANCE:
            if int(name[1:]) in self.seen_ids:
                return  # judged as a choice
            if not torch.equal(got, wanted.to(got.dtype)):
                self._fault(f"{name}: other integers")
            return
        error = error_of(got, wanted)
        self.finding.errors[name] = max(error, self.finding.errors.get(name, 0.0))
        if not error <= TOLERANCE[dtype]:
            self._fault(f"{name}: error {error:.2e} above {TOLERANCE[dtype]:.0e}")

    def _choices(self) -> None:
        for step in self.program.steps:
            if step.op not in IDS or step.results[IDS[step.op]] not in self.seen_ids:
                continue
            ids = step.results[IDS[step.op]]
            reason = judge_choice(self.program, step, self.wanted, self.seen_ids[ids], self.rank)
            if reason:
                self._fault(f"v{ids}: {reason}")

    def _pushed(self, step: Step) -> None:
        name, dtype = f"v{step.results[0]}", self.program.values[step.results[0]].dtype
        payload = self.wanted.values[step.operands[0]]
        for peer in range(self.program.tp):
            landed = self.memory.landed(step, peer)
            if looks_empty(landed, dtype):
                self._fault(f"{name}: peer {peer} was not sent every word, or was sent -0.0")
                break
            if peer and step.op != "push_chunks":
                first = self.memory.landed(step, 0)
                if not torch.equal(_bits(landed), _bits(first)):
                    self._fault(f"{name}: peers 0 and {peer} got different bits")
            elif step.operands[0] not in self.seen_ids:
                wanted = sent_to(step, payload, peer, self.program.tp)
                self._numbers(name, dtype, landed, wanted)

    def _states(self) -> None:
        for step in self.program.steps:
            for result in step.results:
                held = self.program.values[result]
                if held.place != "state" or held.root == result:
                    continue
                name = f"v{held.root}"
                got = self.memory.states[name].view(held.dtype, held.shape)
                size = self.memory.states[name].size
                old = self.initial[name][GUARD : GUARD + size].view(got.dtype).view(held.shape)
                self._state(name, held.dtype, got, old, self.wanted.values[result])

    def _state(self, name: str, dtype: str, got: Tensor, old: Tensor, wanted: Tensor) -> None:
        """Parts that the reference leaves alone keep their bits; the others are compared."""
        depth = 2 if got.dim() > 2 else 1
        new, before, right = (_parts(t, depth) for t in (got, old, wanted))
        kept = (_bits(right) == _bits(before)).all(-1)
        if not torch.equal(_bits(new[kept]), _bits(before[kept])):
            self._fault(f"{name}: changed a part of the state that is not its own")
        if not bool(kept.all()):
            self._numbers(name, dtype, new[~kept], right[~kept])

    def _rings(self) -> None:
        """Outside of what was sent, peers' rings keep their bits; of the own ring a first reader
        re-arms one stage."""
        memory, place = self.memory, self.memory.place
        for channel, rings in memory.peer_rings.items():
            for peer, region in enumerate(rings):
                expected = self.initial[f"ring {channel} of peer {peer}"].clone()
                inside = expected[GUARD : GUARD + region.size]
                for step in pushes_of(self.program):
                    ring = self.program.values[step.results[0]].ring
                    if ring is not None and ring.channel == channel:
                        memory.landed_in(inside, step).copy_(memory.landed(step, peer))
                if not torch.equal(region.raw, expected):
                    self._fault(f"ring {channel} of peer {peer}: wrote beside its slot")
        own = {c: self.initial[f"own ring {c}"].clone() for c in memory.own_rings}
        for value, ring in rings_of(self.program).items():
            held = self.program.values[value]
            if held.place == "mailbox" and ring.first_reader:
                at = GUARD + place.stage(value, ring, ring.rearm)
                sentinel_fill(own[ring.channel][at : at + ring.stage_bytes], held.dtype)
        for channel, wanted in own.items():
            if not torch.equal(memory.own_rings[channel].raw, wanted):
                self._fault(f"own ring {channel}: not re-armed as it must, or written elsewhere")


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of the result; infinite when NaN is in one only."""
    a, b = got.double(), wanted.double()
    both = torch.isnan(a) & torch.isnan(b)
    a, b = a.masked_fill(both, 0.0), b.masked_fill(both, 0.0)
    error = float((a - b).square().sum()) ** 0.5 / max(float(b.square().sum()) ** 0.5, 1e-30)
    return error if error == error else math.inf


def judge_choice(
    program: Program, step: Step, wanted: Evaluated, got: Tensor, rank: int
) -> str | None:
    """None, or what is wrong with the ids of a choice. Given logits leave no freedom but for the
    error of a sigmoid; computed ones do where candidates are near one another."""
    natural = wanted.natural[step.results[IDS[step.op]]]
    if torch.equal(got.long(), natural.long()):
        return None
    producer = program.producer(step.operands[0])
    given = producer is None or producer.op == "receive"
    scores = wanted.values[step.operands[0]].double()
    if step.op == "argmax_pick":
        return "not the id of the best candidate"
    if step.op == "route_topk":
        scores = torch.sigmoid(wanted.values[step.operands[0]]).double()
        scores = scores + wanted.values[step.operands[1]].double()
        allowed = SIGMOID_ERROR if given else NEAR_SCORES
    else:
        base = rank * scores.shape[1] if step.op == "argmax_local" else 0
        got, natural = got.view(-1, 1) - base, natural.view(-1, 1) - base
        allowed = 0.0 if given else TOLERANCE["f32"] * float(scores.abs().max())
    if bool(((got < 0) | (got >= scores.shape[1])).any()):
        return "an id out of range"
    ordered = got.long().sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return "an id twice in a row"
    loss = (scores.gather(1, natural.long()) - scores.gather(1, got.long())).abs()
    wrong = got.long() != natural.long()
    if float(loss.max()) > allowed:
        return f"chose a candidate {float(loss.max()):.1e} from the best"
    if given and bool((wrong & (loss == 0)).any()):
        return "equal candidates not in order of their ids"
    return None


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _parts(tensor: Tensor, depth: int) -> Tensor:
    held = tensor.flatten(0, depth - 1)
    return held.flatten(1) if held.dim() > 1 else held.unsqueeze(1)


def _restore(memory: Memory, initial: Mapping[str, Tensor]) -> None:
    for name, region in memory.changing().items():
        region.raw.copy_(initial[name])
    if "scratch" in memory.others:
        memory.others["scratch"].bytes.fill_(0xFF)


def _replay(
    memory: Memory, launch: Callable[[int], None], initial: Mapping[str, Tensor], replays: int
) -> int:
    """Replays whose written bytes differ from those of the first launch. The barrier's counter
    goes on counting, as in a model. Without states a second launch follows the first at once."""
    first = {name: region.raw.clone() for name, region in memory.changing().items()}
    different = torch.zeros(1, dtype=torch.int64, device=memory.device)
    marker = torch.zeros(1, device=memory.device)

    def put(stream: int) -> None:
        _restore(memory, initial)
        marker.fill_(1)  # a dependent launch is captured behind a kernel, not behind a copy
        launch(stream)
        if not memory.states:
            launch(stream)
        wrong = torch.zeros(1, dtype=torch.bool, device=memory.device)
        for name, region in memory.changing().items():
            wrong |= (region.raw.view(torch.int64) != first[name].view(torch.int64)).any()
        different.add_(wrong)

    graph = captured(put)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return int(different)


def token_rows(program: Program) -> int:
    """Rows of the step's tokens, 1 where the program does not say."""
    sizes = set[int]()
    for value in outside(program):
        held = program.values[value]
        if held.place == "activation":
            sizes.add(held.shape[0])
        if held.place == "mailbox":
            sizes.add(held.shape[1 if len(held.shape) == 3 else 0])
    return sizes.pop() if len(sizes) == 1 else 1


def _check_padding(
    memory: Memory,
    launch: Callable[[int], None],
    inputs: Mapping[int, Tensor],
    initial: Mapping[str, Tensor],
    finding: Finding,
) -> None:
    """Bits of all rows but the last, with zeros and with NaN in the last row of what is read."""
    rows = token_rows(memory.program)
    if rows < 2:
        return
    seen: list[dict[str, Tensor]] = []
    for fill in (0.0, torch.nan):
        _restore(memory, initial)
        _fill_last_row(memory, rows, fill)
        go(launch, memory.device)
        seen.append(_other_rows(memory, inputs, rows))
    finding.faults += [
        f"{name}: rows depend on NaN in a row of padding"
        for name, tensor in seen[0].items()
        if not torch.equal(_bits(tensor), _bits(seen[1][name]))
    ]


def _fill_last_row(memory: Memory, rows: int, fill: float) -> None:
    program = memory.program
    for value in outside(program):
        held = program.values[value]
        if held.dtype not in TOLERANCE:
            continue
        if held.place == "activation":
            memory.inputs[f"v{value}"].view(held.dtype, held.shape)[rows - 1] = fill
        if held.place == "mailbox":
            assert held.ring is not None
            region = memory.own_rings[held.ring.channel]
            at = memory.place.stage(value, held.ring)
            stage = region.view(held.dtype, held.shape, at)
            if len(held.shape) == 3:
                stage[:, rows - 1] = fill
            else:
                stage[rows - 1] = fill


def _other_rows(memory: Memory, inputs: Mapping[int, Tensor], rows: int) -> dict[str, Tensor]:
    """Copies of all that was written but for the last row and the request that it belongs to."""
    program, found = memory.program, dict[str, Tensor]()
    for value in program.written:
        held = program.values[value]
        if held.shape[0] == rows:
            view = memory.outputs[f"v{value}"].view(held.dtype, held.shape)
            found[f"v{value}"] = view[: rows - 1].clone()
    for step in pushes_of(program):
        for peer in range(program.tp):
            landed = memory.landed(step, peer)[: rows - 1]
            found[f"v{step.results[0]} at peer {peer}"] = landed.clone()
    for name, region in memory.states.items():
        held = program.values[int(name[1:])]
        view = region.view(held.dtype, held.shape).clone()
        for step in program.steps:
            if step.op == "mla_append" and program.values[step.operands[0]].root == int(name[1:]):
                table, lengths, slots = (inputs[v] for v in step.operands[3:6])
                position = int(lengths[-1]) + rows_per_request(program) - 1
                if int(slots[-1]) >= 0:
                    page = int(table[-1, position // held.shape[1]])
                    view[page, position % held.shape[1]] = 0
            elif step.op in ("kda_step", "kda_verify"):
                slot = int(inputs[step.operands[12]][-1])
                if slot >= 0:
                    view[slot] = 0
        found[name] = view
    return found
