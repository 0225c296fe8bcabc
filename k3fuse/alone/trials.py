"""Trials of kernels: inputs on which kernels of this field went wrong, with the right answers.

Numbers such as B32 are those of the published faults that the tests name too. A trial launches
the kernels of its cases and yields what is wrong, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.alone.check import token_rows
from k3fuse.alone.inputs import rows_per_request
from k3fuse.alone.launching import Case, Kernel, Sketch, Tensors, same_bits
from k3fuse.alone.memory import looks_empty
from k3fuse.alone.reference import evaluate
from k3fuse.functional import mxfp4
from k3fuse.kernels.examples import example
from k3fuse.kernels.program import Program

Kernels = Mapping[str, Kernel]


@dataclass(frozen=True)
class Trial:
    """fault: the number of the published fault. right: the right answer in words.

    run: launches the kernels of the cases, by the same names, and yields what is wrong.
    """

    fault: str
    name: str
    right: str
    cases: Mapping[str, Case]
    run: Callable[[Kernels], Iterator[str]]

    @property
    def title(self) -> str:
        return f"{self.fault} {self.name}"


ELSEWHERE: Mapping[str, str] = {
    "B40": "tests/checkpoint/test_transformers_checkpoint.py::test_in_memory_layout_is_refused",
    "B44": "tests/lowering/test_select.py::test_a_refusal_keeps_its_reason",
    "B50": "tests/lowering/test_assign_buffers.py"
    "::test_k3_snapshots_keep_their_bytes_until_their_last_reader",
}
"""Faults that are not a kernel's matter, and where they are tested."""

# -- routing --------------------------------------------------------------------------------------
EXPERTS, CHOSEN = 896, 16


def _route(rows: int, top_k: int, *, sent: bool = False) -> Case:
    s = Sketch(2 if sent else 1)
    if sent:
        s.ring("logits", "f32", rows, EXPERTS, place="mailbox")
    else:
        s.value("logits", "f32", rows, EXPERTS)
    s.value("bias", "f32", EXPERTS, place="weight")
    _choose(s, rows, top_k)
    return s.case()


def _choose(s: Sketch, rows: int, top_k: int) -> None:
    s.value("ids", "i32", rows, top_k)
    s.value("weights", "f32", rows, top_k)
    s.step(
        "route_topk",
        ["logits", "bias"],
        ["ids", "weights"],
        top_k=top_k,
        renormalize=True,
        scale=1.0,
    )


def _routed(rows: int, top_k: int = CHOSEN) -> dict[str, Case]:
    """Logits from memory, and from the mailbox."""
    return {"given": _route(rows, top_k), "sent": _route(rows, top_k, sent=True)}


def _ties(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        logits = torch.zeros(2, EXPERTS)
        logits[1, 800:816] = 1
        got = kernel({"logits": logits, "bias": torch.zeros(EXPERTS)})
        for row, first in enumerate((0, 800)):
            ids = _integers(got["ids"][row])
            if ids != list(range(first, first + CHOSEN)):
                yield f"{name}, row {row}: ids {ids}"
        if float((got["weights"] - 0.0625).abs().max()) > 1e-7:
            largest = float((got["weights"] - 0.0625).abs().max())
            yield f"{name}: weights are off by {largest:.1e}"


def _nan_scores(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        x = kernel.draw(1)
        x["logits"][0] = 0
        plain = kernel(x)
        x["logits"][0] = torch.nan
        x["logits"][1] = -5
        x["logits"][1, 7] = torch.nan
        got = kernel(x)
        ids = [_integers(row) for row in got["ids"]]
        if len(set(ids[0])) != CHOSEN or not set(ids[0]) <= set(range(EXPERTS)):
            yield f"{name}: ids of a row of NaN {ids[0]}"
        if not bool(got["weights"].isfinite().all()):
            yield f"{name}: weights that are not finite"
        if 7 in ids[1]:
            yield f"{name}: a NaN score among finite ones was chosen"
        for value in ("ids", "weights"):
            if not same_bits(got[value][2:], plain[value][2:]):
                yield f"{name}: {value} of other rows changed"


def _integers(tensor: Tensor) -> list[int]:
    return [int(number) for number in tensor.flatten()]


def _argmax() -> Case:
    s = Sketch()
    s.value("logits", "f32", 4, 10240)
    s.value("ids", "i64", 4)
    s.step("argmax", ["logits"], ["ids"])
    return s.case()


def _nan_logits(kernels: Kernels) -> Iterator[str]:
    logits = torch.full((4, 10240), -3.0)
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    logits[1, 9000:9002] = -1
    logits[2] = torch.nan
    logits[2, 10239] = -torch.inf
    got = _integers(kernels["argmax"]({"logits": logits})["ids"])
    if got != [0, 9000, 10239, 0]:
        yield f"tokens {got}, not [0, 9000, 10239, 0]"


def _narrow() -> dict[str, Case]:
    s = Sketch()
    s.value("x", "bf16", 2, 64)
    s.value("w", "bf16", EXPERTS, 64, place="weight")
    s.value("logits", "f32", 2, EXPERTS)
    s.value("bias", "f32", EXPERTS, place="weight")
    s.step("linear", ["x", "w"], ["logits"], out="f32")
    _choose(s, 2, 1)
    p = Sketch(2)
    p.value("x", "bf16", 2, 64)
    p.value("w", "bf16", EXPERTS // 2, 64, place="weight")
    p.value("logits", "f32", 2, EXPERTS // 2, place="internal")
    p.ring("sent", "f32", 2, EXPERTS, place="pushed")
    p.step("linear", ["x", "w"], ["logits"], out="f32")
    p.step("push_gather", ["logits"], ["sent"], dim=1)
    return {**_routed(2, 1), "computed": s.case(), "pushed": p.case()}


def _narrowed(kernels: Kernels) -> Iterator[str]:
    bias = torch.zeros(EXPERTS)
    logits = torch.zeros(2, EXPERTS)
    logits[0, 5], logits[0, 9] = 1, 1 + 2**-9
    x, w = torch.zeros(2, 64), torch.zeros(EXPERTS, 64)
    x[0, 0], x[0, 1] = 1, 2**-9
    w[5, 0] = w[9, 0] = w[9, 1] = 1
    halves = [kernels["pushed"]({"x": x, "w": w.chunk(2)[r]}, rank=r)["sent"] for r in (0, 1)]
    arrived = torch.cat([half[1] for half in halves], 1)
    if not torch.equal(arrived.cpu(), logits):
        yield f"logits {arrived[0, 5].item()} and {arrived[0, 9].item()} arrive"
    seen = {
        "given": kernels["given"]({"logits": logits, "bias": bias}),
        "sent": kernels["sent"]({"logits": arrived, "bias": bias}),
        "computed": kernels["computed"]({"x": x, "w": w, "bias": bias}),
    }
    for name, got in seen.items():
        if _integers(got["ids"]) != [9, 0]:
            yield f"{name}: ids {_integers(got['ids'])}, not [9, 0]"


# -- MXFP4 ----------------------------------------------------------------------------------------
SIDE, FEW = 64, 4  # both widths of an expert; experts
ONE_HALF, ONE, FOUR = 1, 2, 6  # codes


def _experts() -> Case:
    s = Sketch()
    s.value("z", "bf16", SIDE, SIDE)
    s.value("ids", "i32", SIDE, 1)
    s.value("weights", "f32", SIDE, 1)
    matrices = ["w1", "w3", "w2"]
    for name in matrices:
        s.value(name, "u8", FEW, SIDE, SIDE // 2, place="weight")
    for name in matrices:
        s.value(f"{name}_scale", "u8", FEW, SIDE, SIDE // mxfp4.GROUP, place="weight")
    s.value("y", "f32", SIDE, SIDE)
    operands = ["z", "ids", "weights", *matrices, *(f"{name}_scale" for name in matrices)]
    s.step("moe_experts", operands, ["y"], activation="silu", beta=0.0, linear_beta=0.0, out="f32")
    return s.case()


class _Packed:
    """An MXFP4 weight of all experts: codes [E, N, K], and scale bytes [E, N, K/32]."""

    def __init__(self, codes: Tensor, scales: Tensor | int) -> None:
        self.codes = codes.expand(FEW, SIDE, SIDE).to(torch.uint8)
        groups = torch.as_tensor(scales, dtype=torch.uint8)
        self.scales = groups.expand(FEW, SIDE, SIDE // mxfp4.GROUP)

    def bytes(self) -> Tensor:
        return self.codes[..., 0::2] | (self.codes[..., 1::2] << 4)

    def numbers(self) -> Tensor:
        """What codes and scales are worth, in float64 by definition and not by library."""
        size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
        value = torch.cat([size, -size])[self.codes.int()]
        power = torch.ldexp(torch.ones(self.scales.shape).double(), self.scales.int() - 127)
        power = power.masked_fill(self.scales == 255, torch.nan)
        return value * power.repeat_interleave(mxfp4.GROUP, -1)


def _diagonal(code: int) -> Tensor:
    return torch.eye(SIDE) * code


def _all(code: int) -> Tensor:
    return torch.full((1, SIDE, SIDE), code)


_TOKEN_EXPERT = torch.arange(SIDE).view(SIDE, 1) % FEW


def _expert(kernel: Kernel, z: Tensor, w1: _Packed, w3: _Packed, w2: _Packed) -> Tensor:
    """One expert a token with weight 1; in float64 on the CPU."""
    given: dict[str, Tensor] = {"z": z, "ids": _TOKEN_EXPERT, "weights": torch.ones(SIDE, 1)}
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        given |= {name: weight.bytes(), f"{name}_scale": weight.scales}
    return kernel(given)["y"].double().cpu()


def _of_tokens(weight: _Packed) -> Tensor:
    """[token, row]: the column of the token's own number in the weight of its expert."""
    numbers = weight.numbers()
    return torch.stack([numbers[t % FEW, :, t] for t in range(SIDE)])


def _same(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(
        got.nan_to_num(nan=0.0), wanted.float().double().nan_to_num(nan=0.0)
    )


def _random_packed(low: int, high: int) -> _Packed:
    codes = torch.randint(0, 16, (FEW, SIDE, SIDE))
    return _Packed(codes, torch.randint(low, high, (FEW, SIDE, SIDE // mxfp4.GROUP)))


def _codes(kernels: Kernels) -> Iterator[str]:
    """Every element of each weight alone: the others stand so that it passes as it is.

    silu(32) is 32 in float32, so with gate 32 an up of 2^-5 makes h = 1.
    """
    kernel, identity = kernels["experts"], torch.eye(SIDE)
    torch.manual_seed(1)  # pyright: ignore[reportUnknownMemberType]
    down = _random_packed(120, 135)
    down.codes[:, 0, :4] = torch.tensor([0x1, 0x2, 0x7, 0xF], dtype=torch.uint8)
    down.scales[:, 0, 0] = 127
    y = _expert(
        kernel,
        identity,
        _Packed(_diagonal(FOUR), 127 + 3),
        _Packed(_diagonal(ONE_HALF), 127 - 4),
        down,
    )
    if [y[t, 0].item() for t in range(4)] != [0.5, 1.0, 6.0, -6.0]:
        yield f"bytes 0x21, 0xF7 of w2 give {[y[t, 0].item() for t in range(4)]}"
    if not _same(y, _of_tokens(down)):
        yield "w2: codes or scales read wrong"
    up = _random_packed(120, 135)
    up.codes[:, 0, :4] = torch.tensor([0x1, 0x2, 0x7, 0xF], dtype=torch.uint8)
    up.scales[:, 0, 0] = 127
    y = _expert(
        kernel, identity, _Packed(_all(FOUR), 127 + 3), up, _Packed(_diagonal(ONE), 127 - 5)
    )
    if [y[t, 0].item() for t in range(4)] != [0.5, 1.0, 6.0, -6.0]:
        yield f"bytes 0x21, 0xF7 of w3 give {[y[t, 0].item() for t in range(4)]}"
    if not _same(y, _of_tokens(up)):
        yield "w3: codes or scales read wrong"
    gate, last = _random_packed(127, 132), SIDE - 1  # column `last` makes up = 1 for all tokens
    gate.codes[:, :, last] = 0
    ones = torch.zeros(1, SIDE, SIDE)
    ones[..., last] = ONE
    signs: list[Tensor] = []
    for sign in (1, -1):  # silu lets positive gates pass
        z = sign * 64 * identity
        z[:, last] = 1
        signs.append(_expert(kernel, z, gate, _Packed(ones, 127), _Packed(_diagonal(ONE), 127 - 6)))
    if not _same((signs[0] - signs[1]).float().double(), _of_tokens(gate)):
        yield "w1: codes or scales read wrong"


def _scales(kernels: Kernels) -> Iterator[str]:
    kernel, identity = kernels["experts"], torch.eye(SIDE)
    torch.manual_seed(2)  # pyright: ignore[reportUnknownMemberType]
    codes = torch.randint(0, 4, (FEW, SIDE, SIDE)) + 8 * torch.randint(0, 2, (FEW, SIDE, SIDE))
    extremes = torch.tensor([0, 1, 127, 254, 255]).repeat(SIDE)[:SIDE]
    scales = torch.full((SIDE, SIDE // mxfp4.GROUP), 127)
    scales[:, 0] = extremes
    first = torch.arange(SIDE) < mxfp4.GROUP  # tokens of the group with extreme scales
    for power in (0, 20):
        down = _Packed(codes, scales)
        y = _expert(
            kernel,
            identity,
            _Packed(_diagonal(FOUR), 127 + 3),
            _Packed(_diagonal(ONE_HALF), 127 - 4 + power),
            down,
        )
        wanted = _of_tokens(down) * 2.0**power
        wanted[:, extremes == 255] = torch.nan  # 0 times NaN too
        for scale in (0, 1, 127, 254, 255):
            here = extremes == scale
            if not _same(y[:, here], wanted[:, here]):
                a, b = y[first][:, here].flatten(), wanted[first][:, here].flatten()
                at = int((a != b.float().double()).nonzero()[0])
                yield (
                    f"w2, scale byte {scale}, h = 2^{power}: "
                    f"{a[at].item():.9e} instead of {b[at].item():.9e}"
                )
    # Up: z is 2^100, so that byte 0 gives 2^-27 times a code, and gate 32 there.
    scales[:, 0] = extremes.masked_fill(extremes == 254, 100)
    up = _Packed(codes, scales)
    gate, back = _Packed(_all(FOUR), 127 + 3 - 100), _Packed(_diagonal(ONE), 127 - 5 - 20)
    y = _expert(kernel, identity * 2.0**100, gate, up, back)
    wanted = _of_tokens(up) * 2.0**80
    bad = (extremes == 255)[None, :].expand(SIDE, -1)
    wanted[bad] = torch.nan
    wanted[bad.any(1)] = torch.nan  # h holds a NaN, which meets every row of w2
    if not _same(y, wanted):
        yield "w3: NaN of a scale byte 255 does not reach every column of its expert"
    scales = scales.masked_fill(scales == 255, 127)
    up = _Packed(codes, scales)
    y = _expert(kernel, identity * 2.0**100, gate, up, back)
    if not _same(y, _of_tokens(up) * 2.0**80):
        yield "w3: scale bytes 0 and 1 read wrong"
    gate.scales = gate.scales.clone()
    gate.scales[1, 3, 0] = 255
    y = _expert(kernel, identity * 2.0**100, gate, up, back)
    mine = _TOKEN_EXPERT.flatten() == 1
    if not bool(y[mine].isnan().all()) or bool(y[~mine].isnan().any()):
        yield "w1: NaN of a scale byte 255 is not in all columns of its expert, and there alone"


# -- KDA ------------------------------------------------------------------------------------------
SLOTS, HEADS, HEAD_DIM = 5, 2, 64
ROWS = ("q", "k", "v", "f", "b")
JOURNALS = ("journal_qkv", "journal_f", "journal_b")
STATES = ("conv", "recurrent")


def _kda(op: str, requests: int, rows: int, bound: float | None = -5.0) -> Case:
    s, tokens, width = Sketch(), requests * rows, HEADS * HEAD_DIM
    inputs: list[str] = []
    if op != "kda_commit":
        inputs = [s.value(name, "bf16", tokens, width) for name in ROWS[:4]]
        inputs.append(s.value("b", "bf16", tokens, HEADS))
    weights = [s.value(f"conv_{n}", "f32", width, 1, 4, place="weight") for n in "qkv"]
    weights.append(s.value("a_log", "f32", HEADS, place="weight"))
    weights.append(s.value("dt_bias", "f32", width, place="weight"))
    states = [
        s.value("conv", "bf16", SLOTS, 3, width, 3, place="state"),
        s.value("recurrent", "f32", SLOTS, HEADS, HEAD_DIM, HEAD_DIM, place="state"),
    ]
    hosts = [s.value("slots", "i32", requests, place="host")]
    journals: list[str] = []
    if op != "kda_step":
        journals = [
            s.value("journal_qkv", "bf16", SLOTS, rows, 3, width, place="state"),
            s.value("journal_f", "bf16", SLOTS, rows, width, place="state"),
            s.value("journal_b", "bf16", SLOTS, rows, HEADS, place="state"),
        ]
    given = {"head_dim": HEAD_DIM, "gate_lower_bound": bound}
    if op == "kda_commit":
        hosts.append(s.value("accepted", "i32", requests, place="host"))
        s.step(op, journals + weights + states + hosts, [s.version(n) for n in states], **given)
        return s.case()
    changed = [s.version(n) for n in (states if op == "kda_step" else journals)]
    operands = inputs + weights + states + hosts + journals
    results = [s.value("o", "f32", tokens, width), *changed]
    s.step(op, operands, results, rows_per_request=rows, **given)
    return s.case()


def _pick(given: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: given[name] for name in names}


def _weights(given: Tensors) -> dict[str, Tensor]:
    return _pick(given, ["conv_q", "conv_k", "conv_v", "a_log", "dt_bias"])


def _rows(given: Tensors, requests: int, begin: int, end: int) -> dict[str, Tensor]:
    """Rows begin to end of every request."""
    parts = {n: given[n].view(requests, -1, given[n].shape[1]) for n in ROWS}
    return {n: part[:, begin:end].flatten(0, 1) for n, part in parts.items()}


def _different(a: Tensors, b: Tensors, names: Iterable[str], what: str) -> Iterator[str]:
    for name in names:
        if not same_bits(a[name], b[name]):
            yield f"{what}: other bits of {name}"


def _nothing_accepted(kernels: Kernels) -> Iterator[str]:
    commit, step = kernels["commit"], kernels["step"]
    slots, accepted = [4, 0, 2, -1], [1, 0, 2, 3]
    x = commit.draw(1, {"slots": commit.tensor("slots", slots)})
    x["accepted"] = commit.tensor("accepted", accepted)
    for name in STATES:  # 10, 20 and 30 for the requests, NaN for the neighbours
        x[name][:] = torch.nan
        for slot, number in zip(slots[:3], (10, 20, 30), strict=True):
            x[name][slot] = number
    got = commit(x)
    serial = _pick(x, STATES)
    for row in range(2):
        live = [s if a > row else -1 for s, a in zip(slots, accepted, strict=True)]
        qkv = x["journal_qkv"][slots, row]
        rows = {"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2]}
        rows |= {"f": x["journal_f"][slots, row], "b": x["journal_b"][slots, row]}
        given = {**_weights(x), **serial, **rows, "slots": torch.tensor(live)}
        serial = _pick(step(given), STATES)
    for name in STATES:
        for slot, kind in ((0, "nothing was accepted"), (1, "a neighbour"), (3, "a neighbour")):
            if not same_bits(got[name][slot], x[name][slot]):
                yield f"{name} of slot {slot} changed: {kind}"
    yield from _different(got, serial, STATES, "commit against serial steps")
    yield from _different(got, x, JOURNALS, "commit")


def _serial(
    step: Kernel, given: Tensors, states: Tensors, rows: list[Tensors], slots: list[int]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain steps: outputs of each and the states at the end."""
    outputs, states = list[Tensor](), _pick(states, STATES)
    for row in rows:
        made = step({**_weights(given), **states, **row, "slots": torch.tensor(slots)})
        outputs.append(made["o"])
        states = _pick(made, STATES)
    return outputs, states


def _speculation(kernels: Kernels) -> Iterator[str]:
    step, verify, commit = (kernels[n] for n in ("step", "verify", "commit"))
    slots = [3, 1]
    x = verify.draw(1, {"slots": verify.tensor("slots", slots)})
    after = _rows(step.draw(2), 2, 0, 1)
    drafts: list[Tensors] = [_rows(x, 2, row, row + 1) for row in range(4)]
    seen = verify(x)
    yield from _different(seen, x, STATES, "verify")
    outputs, _ = _serial(step, x, x, drafts, slots)
    wanted = torch.stack(outputs, 1).flatten(0, 1)
    yield from _different(seen, {"o": wanted}, ["o"], "verify against serial steps")
    for accepted in ((3, 1), (4, 0), (2, 4)):
        given = {**_weights(x), **_pick(x, STATES), **_pick(seen, JOURNALS)}
        given |= {"slots": torch.tensor(slots), "accepted": torch.tensor(accepted)}
        committed = commit(given)
        states: dict[str, Tensor] = _pick(x, STATES)
        for row, draft in enumerate(drafts):
            live = [s if a > row else -1 for s, a in zip(slots, accepted, strict=True)]
            _, states = _serial(step, x, states, [draft], live)
        what = f"{accepted} accepted"
        yield from _different(committed, states, STATES, f"{what}, states")
        (o,), states = _serial(step, x, states, [after], slots)
        (o_after,), states_after = _serial(step, x, _pick(committed, STATES), [after], slots)
        one, two = {**states, "o": o}, {**states_after, "o": o_after}
        yield from _different(two, one, ["o", *STATES], f"{what}, the plain step after")


def _chunks(kernels: Kernels) -> Iterator[str]:
    for bound in ("", "softplus "):
        slots = [4, 2]
        x = kernels[f"{bound}4"].draw(3)
        wanted = kernels[f"{bound}4"]({**x, "slots": torch.tensor(slots)})
        for size in (2, 1):
            rows: list[Tensors] = [_rows(x, 2, at, at + size) for at in range(0, 4, size)]
            outputs, states = _serial(kernels[f"{bound}{size}"], x, x, rows, slots)
            parts = [o.view(2, size, -1) for o in outputs]
            got = {**states, "o": torch.cat(parts, 1).flatten(0, 1)}
            yield from _different(got, wanted, ["o", *STATES], f"{bound}chunks of {size}")


def _poisoned_slot(kernels: Kernels) -> Iterator[str]:
    step = kernels["step"]
    x = step.draw(4, {"slots": step.tensor("slots", [0, 2])})
    clean = step(x)
    bad = {**x, **{name: x[name].clone() for name in STATES}}
    for name in STATES:
        bad[name][[1, 3]] = torch.nan
    got = step(bad)
    yield from _different(got, clean, ["o"], "NaN in other slots")
    for name in STATES:
        if not same_bits(got[name][[0, 2]], clean[name][[0, 2]]):
            yield f"NaN in other slots changes {name}"
        if not same_bits(got[name][[1, 3]], bad[name][[1, 3]]):
            yield f"{name} of other slots changed"
    fresh = step({**x, **{name: torch.zeros_like(x[name]) for name in STATES}})
    for name in STATES:
        bad[name][3] = 0
        bad[name][2] = 0
    again = step({**bad, "slots": torch.tensor([3, 2])})
    yield from _different(again, fresh, ["o"], "a slot that was zeroed")
    for name in STATES:
        if not same_bits(again[name][3], fresh[name][0]):
            yield f"a slot that was zeroed: other bits of {name}"


# -- the latent cache -----------------------------------------------------------------------------
LATENT, ROPE, QUERIES, PAGE, TABLE = 512, 64, 6, 64, 4


def _cache(s: Sketch, requests: int) -> tuple[str, list[str]]:
    cache = s.value("cache", "bf16", requests * TABLE, PAGE, LATENT + ROPE, place="state")
    hosts = [s.value("table", "i32", requests, TABLE, place="host")]
    hosts += [s.value(n, "i32", requests, place="host") for n in ("lengths", "slots")]
    return cache, hosts


def _append(requests: int, rows: int) -> Case:
    s = Sketch()
    cache, hosts = _cache(s, requests)
    latent = s.value("latent", "bf16", requests * rows, LATENT)
    rope = s.value("rope", "bf16", requests * rows, ROPE)
    operands = [cache, latent, rope, *hosts]
    s.step("mla_append", operands, [s.version(cache)], rows_per_request=rows)
    return s.case()


def _attend(requests: int, rows: int) -> Case:
    s = Sketch()
    query = s.value("query", "bf16", requests * rows, QUERIES * (LATENT + ROPE))
    cache, hosts = _cache(s, requests)
    o = s.value("o", "bf16", requests * rows, QUERIES * LATENT)
    s.step(
        "mla_attend_latent",
        [query, cache, *hosts],
        [o],
        kv_lora=LATENT,
        rope_dim=ROPE,
        softmax_scale=(128 + ROPE) ** -0.5,
        rows_per_request=rows,
    )
    return s.case()


def _cached_speculation(kernels: Kernels) -> Iterator[str]:
    rows, lengths = 4, [126, 40]  # the first request goes on to a new page
    hosts = {"lengths": kernels["attend 1"].tensor("lengths", lengths)}
    hosts["slots"] = kernels["attend 1"].tensor("slots", [0, 1])
    x = kernels["attend 4"].draw(5, hosts)
    x |= {n: t for n, t in kernels["append 4"].draw(6).items() if n in ("latent", "rope")}
    after = kernels["attend 1"].draw(7, hosts)
    after |= {n: t for n, t in kernels["append 1"].draw(8).items() if n in ("latent", "rope")}

    def run(cache: Tensor, rows: Tensors, ahead: list[int], size: int) -> tuple[Tensor, Tensor]:
        """Append and attend: the cache and o."""
        given = {**_pick(x, ["table", "slots"]), "cache": cache}
        given["lengths"] = x["lengths"] + torch.tensor(ahead, device=x["lengths"].device)
        parts = _pick(rows, ["latent", "rope"])
        appended = kernels[f"append {size}"]({**given, **parts})["cache"]
        given["cache"] = appended
        return appended, kernels[f"attend {size}"]({**given, "query": rows["query"]})["o"]

    def drafted(row: int) -> dict[str, Tensor]:
        names = ("query", "latent", "rope")
        return {n: x[n].view(2, rows, -1)[:, row].contiguous() for n in names}

    verified, o = run(x["cache"], x, [0, 0], rows)
    cache, caches, outputs = x["cache"], list[Tensor](), list[Tensor]()
    for row in range(rows):
        cache, one = run(cache, drafted(row), [row, row], 1)
        outputs.append(one)
        caches.append(cache)
    if not same_bits(cache, verified):
        yield "verify against serial steps: other bits of the cache"
    wanted = torch.stack(outputs, 1).flatten(0, 1)
    if not same_bits(o, wanted):
        apart = float((o.double() - wanted.double()).abs().max())
        yield f"verify against serial steps: o differs by up to {apart:.1e}"
    _, one = run(verified, after, [1, 1], 1)
    _, two = run(caches[0], after, [1, 1], 1)
    if not same_bits(one, two):
        yield "rejected at 2: the plain step after gives other bits of o"
    _, one = run(verified, after, [rows, rows], 1)
    _, two = run(cache, after, [rows, rows], 1)
    if not same_bits(one, two):
        yield "all accepted: the plain step after gives other bits of o"


def _reused_page(kernels: Kernels) -> Iterator[str]:
    attend = kernels["attend 1"]
    x = attend.draw(9)  # NaN wherever no row may look
    fresh = attend({**x, "cache": x["cache"].nan_to_num(nan=0.0)})
    yield from _different(attend(x), fresh, ["o"], "NaN in positions that are not seen")


# -- sums over ranks ------------------------------------------------------------------------------
def _sum(ranks: int, rows: int, width: int, dtype: str, out: str) -> Case:
    s = Sketch(ranks)
    s.ring("slots", dtype, ranks, rows, width, place="mailbox")
    s.value("sum", out, rows, width)
    s.step("sum_slots", ["slots"], ["sum"], out=out)
    return s.case()


def _norm_of_sum(rows: int) -> Case:
    case = Case.of(example("slots_norm", f"4,{rows},7168"))
    return Case(case.program, {**case.names, "slots": case.names["v0"], "sum": case.names["v3"]})


def _sums() -> dict[str, Case]:
    found = {f"4 ranks, {rows} rows": _sum(4, rows, 64, "f32", "f32") for rows in (1, 8, 64)}
    found["4 ranks, to bf16"] = _sum(4, 3, 96, "f32", "bf16")
    found["4 ranks of bf16"] = _sum(4, 3, 96, "bf16", "bf16")
    found["4 ranks of bf16, to f32"] = _sum(4, 2, 7168, "bf16", "f32")
    found["16 ranks"] = _sum(16, 2, 7168, "f32", "bf16")
    found |= {f"row norm, {rows} rows": _norm_of_sum(rows) for rows in (1, 8)}
    return found


def _sum_inputs(kernel: Kernel, slots: Tensor) -> dict[str, Tensor]:
    x = {name: t for name, t in kernel.draw(1).items() if name not in ("v0", "v1")}
    if "v1" in kernel.case.names:
        x["v1"] = torch.zeros(slots.shape[1:])
    return {**x, "slots": slots}


def _order(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        held = kernel.program.values[kernel.case.names["slots"]]
        terms = torch.zeros(held.shape)
        # 2^27 is 1e8's neighbour that bf16 holds too.
        large = 1e8 if held.dtype == "f32" else 2.0**27
        for rank, term in enumerate((large, 1, -large, 1)):
            terms[rank] = term
        sums = kernel(_sum_inputs(kernel, terms))["sum"]
        if not bool((sums == 1).all()):
            yield f"{name}: {sums.flatten()[0].item()} instead of 1"


def _any_terms(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        held = kernel.program.values[kernel.case.names["slots"]]
        torch.manual_seed(11)  # pyright: ignore[reportUnknownMemberType]
        terms = torch.randn(held.shape) * 10.0 ** torch.randint(-3, 4, held.shape)
        x = _sum_inputs(kernel, kernel.tensor("slots", terms) + 0.0)
        index = {kernel.case.names[n]: kernel.tensor(n, t) for n, t in x.items()}
        total = kernel.case.names["sum"]
        wanted = evaluate(kernel.program, index, wanted={total}).values[total]
        if not same_bits(kernel(x)["sum"], wanted):
            yield f"{name}: other bits than the reference"


# -- what looks like an empty mailbox --------------------------------------------------------------
def _push(op: str, dtype: str, ranks: int, width: int) -> Case:
    """Five rows of memory, sent as they are."""
    s = Sketch(ranks)
    x = s.value("x", dtype, 5, width)
    _send(s, op, x, 5, width)
    return s.case()


def _send(s: Sketch, op: str, name: str, rows: int, width: int) -> None:
    dtype = s.values[s.names[name]].dtype
    shape = (rows, s.tp * width) if op == "push_gather" else (s.tp, rows, width)
    if op == "push_chunks":
        shape = (s.tp, rows, width // s.tp)
    s.ring("sent", dtype, *shape, place="pushed")
    s.step(op, [name], ["sent"], **({} if op == "push_partial" else {"dim": 1}))


def _pushes() -> dict[str, Case]:
    return {
        "partial sums f32": _push("push_partial", "f32", 2, 64),
        "partial sums bf16": _push("push_partial", "bf16", 2, 64),
        "chunks f32": _push("push_chunks", "f32", 2, 64),
        "shards f32": _push("push_gather", "f32", 4, 48),
        "shards bf16": _push("push_gather", "bf16", 4, 48),
        "shards bf16, odd": _push("push_gather", "bf16", 2, 7),
        "sum f32": _sum(2, 5, 64, "f32", "f32"),
        "sum bf16": _sum(2, 5, 64, "bf16", "bf16"),
    }


def _negative_zeros(kernels: Kernels) -> Iterator[str]:
    arrived: dict[str, Tensor] = {}
    for name, kernel in kernels.items():
        if name.startswith("sum"):
            continue
        held = kernel.program.values[kernel.case.names["x"]]
        slots: list[Tensor] = []
        for rank in range(2):
            torch.manual_seed(20)  # pyright: ignore[reportUnknownMemberType]
            x = torch.randn(held.shape)
            x[0], x[1], x[2, 3] = -0.0, 0.0, -0.0
            x[3, 1::2] = torch.nan
            x[4] *= -1 if rank else 1
            x = kernel.tensor("x", x)
            sent = kernel({"x": x}, rank=rank)["sent"]
            for peer in range(kernel.program.tp):
                landed = sent[peer]
                wanted = x.chunk(kernel.program.tp, 1)[peer] if "chunks" in name else x
                if looks_empty(landed, held.dtype):
                    yield f"{name}: peer {peer} is sent what looks like an empty mailbox"
                elif not same_bits(landed.nan_to_num(nan=9), (wanted + 0.0).nan_to_num(nan=9)):
                    yield f"{name}: peer {peer} is sent other bits"
            slots.append(sent[1])
        arrived[name] = torch.stack(slots)
    for dtype in ("f32", "bf16"):
        terms = arrived[f"partial sums {dtype}"]
        if looks_empty(terms, dtype):
            return  # it would wait for ever
        total = kernels[f"sum {dtype}"]({"slots": terms})["sum"]
        zero = torch.zeros_like(total[0])
        for row, what in ((0, "-0.0 and -0.0"), (1, "+0.0 and +0.0"), (4, "x and -x")):
            if not same_bits(total[row], zero):
                yield f"sum {dtype}: {what} do not give +0.0"
        if not bool(total[3, 1::2].isnan().all()):
            yield f"sum {dtype}: NaN got lost"
        if bool(total[[0, 1, 2, 4]].isnan().any()):
            yield f"sum {dtype}: NaN got into other rows"


def _computed_pushes() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for op, out in (("push_gather", "bf16"), ("push_partial", "f32"), ("push_chunks", "f32")):
        s = Sketch(2)
        s.value("x", "bf16", 5, 64)
        s.value("w", "bf16", 64, 64, place="weight")
        s.value("factor", out, 5, 64)
        for name in ("y", "z"):
            s.value(name, out, 5, 64, place="internal")
        s.step("linear", ["x", "w"], ["y"], **({"out": "f32"} if out == "f32" else {}))
        s.step("mul", ["y", "factor"], ["z"])
        _send(s, op, "z", 5, 64)
        found[f"linear, {op}"] = s.case()
    s = Sketch(2)
    s.value("x", "bf16", 5, 64)
    s.value("w", "bf16", 64, 64, place="weight")
    s.value("y", "bf16", 5, 64, place="internal")
    s.step("linear", ["x", "w"], ["y"])
    _send(s, "push_gather", "y", 5, 64)
    found["linear that underflows"] = s.case()
    s = Sketch(2)
    s.value("x", "bf16", 5, 64)
    s.value("w", "bf16", 64, place="weight")
    s.value("y", "bf16", 5, 64, place="internal")
    s.step("rms_norm", ["x", "w"], ["y"], eps=1e-5)
    _send(s, "push_partial", "y", 5, 64)
    found["row norm"] = s.case()
    s = Sketch(2)
    s.value("x", "f32", 5, 4096)
    s.value("y", "f32", 5, 1, place="internal")
    s.value("id", "i64", 5, 1, place="internal")
    s.step("argmax_local", ["x"], ["y", "id"])
    _send(s, "push_gather", "y", 5, 1)
    s.ring("ids", "i64", 5, 2, place="pushed")
    s.step("push_gather", ["id"], ["ids"], dim=1)
    found["argmax"] = s.case()
    return found


def _computed_negative_zeros(kernels: Kernels) -> Iterator[str]:
    for name, kernel in kernels.items():
        x = kernel.draw(21)
        x["x"][0] = -0.0
        if "factor" in x:
            x["factor"][0] = -1
        if name == "linear that underflows":
            x["x"][:], x["w"][:] = 0, -(2.0**-40)
            x["x"][:, 0] = 2.0**-100  # -2^-140 is -0.0 in bf16
        sent = kernel(x)["sent"]
        dtype = kernel.program.values[kernel.case.names["sent"]].dtype
        if looks_empty(sent, dtype):
            yield f"{name}: sends what looks like an empty mailbox"
        if not same_bits(sent[:, 0], torch.zeros_like(sent[:, 0])):
            yield f"{name}: a result of -0.0 is not sent as +0.0"


# -- rows of padding ------------------------------------------------------------------------------
PADDED = {
    "linear": "4,3216,7168",
    "rms_norm": "4,7168",
    "slots_norm": "4,4,7168",
    "kda": "4,6,128,1",
    "mla_attend": "4,6,512,64,200,1",
    "experts": "4,64,8,1024,192",
    "route": "4,896,16",
    "argmax": "4,10240",
    "attn_res": "4,7168,4",
}
VERIFIED = {"kda": "3,6,128,4", "mla_attend": "3,6,512,64,200,4"}
FILLS = (0.0, torch.nan, torch.inf, -torch.inf)


def _padded() -> dict[str, Case]:
    found = {name: Case.of(example(name, sizes)) for name, sizes in PADDED.items()}
    found |= {f"{n} verify": Case.of(example(n, sizes)) for n, sizes in VERIFIED.items()}
    return found


def padding_faults(kernels: Kernels) -> Iterator[str]:
    """The last request is padding and holds zeros, NaN, Inf in turn: no bit of other rows, and
    none of any state, may depend on it."""
    for name, kernel in kernels.items():
        program = kernel.program
        rows, spare = token_rows(program), rows_per_request(program)
        if rows <= spare:
            continue
        first: dict[str, Tensor] | None = None
        x = kernel.draw(30)
        for value in slots_of(kernel):
            x[value][-1] = -1
        for fill in FILLS:
            got = _without_padding(kernel, kernel(_filled(kernel, x, spare, fill)), rows, spare)
            if first is None:
                first = got
            wrong = [n for n in got if not same_bits(got[n], first[n])]
            if wrong:
                yield f"{name}: {', '.join(wrong)} with {fill} in rows of padding"


def slots_of(kernel: Kernel) -> list[str]:
    """Names of the values that hold the requests' slots."""
    at = {"kda_step": 12, "kda_verify": 12, "kda_commit": 10, "mla_append": 5}
    at["mla_attend_latent"] = 4
    found = {s.operands[at[s.op]] for s in kernel.program.steps if s.op in at}
    return [name for name, value in kernel.case.names.items() if value in found]


def _filled(kernel: Kernel, x: Tensors, spare: int, fill: float) -> dict[str, Tensor]:
    given = dict(x)
    for name, tensor in x.items():
        place = kernel.program.values[kernel.case.names[name]].place
        if not tensor.is_floating_point() or place not in ("activation", "mailbox"):
            continue
        given[name] = tensor.clone()
        of_ranks = place == "mailbox" and tensor.dim() == 3
        (given[name][:, -spare:] if of_ranks else given[name][-spare:]).fill_(fill)
    return given


def _without_padding(kernel: Kernel, got: Tensors, rows: int, spare: int) -> dict[str, Tensor]:
    """Rows of results and of what was sent that are no padding; states whole."""
    found: dict[str, Tensor] = {}
    for name, tensor in got.items():
        place = kernel.program.values[kernel.case.names[name]].place
        if place == "state":
            found[name] = tensor
        elif place == "pushed":
            found[name] = tensor[:, : rows - spare]
        elif tensor.shape[0] == rows:
            found[name] = tensor[: rows - spare]
    return found


def padding_trial(programs: Mapping[str, Program]) -> Trial:
    """B45 for launches of a model."""
    cases = {name: Case.of(program) for name, program in programs.items()}
    return Trial("B45", "launches of a model", _PADDING, cases, padding_faults)


_PADDING = "rows before and all states equal in every bit, whatever rows of padding hold"


def trials() -> tuple[Trial, ...]:
    """All trials whose programs are made by hand."""
    experts = {"experts": _experts()}
    softplus = {f"softplus {n}": _kda("kda_step", 2, n, None) for n in (4, 2, 1)}
    speculation = {
        "step": _kda("kda_step", 2, 1),
        "verify": _kda("kda_verify", 2, 4),
        "commit": _kda("kda_commit", 2, 4),
    }
    cached = {f"append {n}": _append(2, n) for n in (1, 4)}
    cached |= {f"attend {n}": _attend(2, n) for n in (1, 4)}
    sums = _sums()
    in_order = {n: case for n, case in sums.items() if not n.startswith("16")}
    return (
        Trial("B04", "-0.0 is sent", "sent as +0.0; sums give +0.0", _pushes(), _negative_zeros),
        Trial(
            "B04",
            "-0.0 is computed and sent",
            "sent as +0.0",
            _computed_pushes(),
            _computed_negative_zeros,
        ),
        Trial("B32", "equal scores", "lower ids first, weights 1/16", _routed(2), _ties),
        Trial(
            "B34",
            "scores of NaN",
            "distinct ids in range, finite weights, NaN not chosen, other rows unchanged",
            _routed(4),
            _nan_scores,
        ),
        Trial(
            "B34",
            "logits of NaN",
            "NaN never wins; a row of NaN gives token 0",
            {"argmax": _argmax()},
            _nan_logits,
        ),
        Trial("B36", "router logits 2^-9 apart", "expert 9, never 5", _narrow(), _narrowed),
        Trial("B41", "MXFP4 codes", "0x21 is 0.5, 1; 0xF7 is 6, -6; all exact", experts, _codes),
        Trial("B42", "MXFP4 scales", "0 is 2^-127, 254 2^127, 255 NaN", experts, _scales),
        Trial("B45", "one launch a family", _PADDING, _padded(), padding_faults),
        Trial(
            "B46",
            "nothing accepted",
            "the state is kept; accepted rows give what serial steps do",
            {"commit": _kda("kda_commit", 4, 3), "step": _kda("kda_step", 4, 1)},
            _nothing_accepted,
        ),
        Trial(
            "B47",
            "verify, commit, plain step",
            "the bits of serial steps",
            speculation,
            _speculation,
        ),
        Trial(
            "B47",
            "verify and plain step over the cache",
            "the bits of serial steps",
            cached,
            _cached_speculation,
        ),
        Trial(
            "B52",
            "a chunk of 4 rows, two of 2, four of 1",
            "equal in every bit",
            {**{str(n): _kda("kda_step", 2, n) for n in (4, 2, 1)}, **softplus},
            _chunks,
        ),
        Trial(
            "B53",
            "NaN in another slot",
            "no effect; a zeroed slot is a fresh one",
            {"step": _kda("kda_step", 2, 1)},
            _poisoned_slot,
        ),
        Trial(
            "B53",
            "NaN in the rest of a page",
            "no effect",
            {"attend 1": _attend(2, 1)},
            _reused_page,
        ),
        Trial("B56", "order of a sum over ranks", "1e8 + 1 - 1e8 + 1 is 1", in_order, _order),
        Trial("B56", "any terms over ranks", "the bits of the reference", sums, _any_terms),
    )
