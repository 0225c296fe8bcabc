"""Routing and the choice of a token: ties, NaN, logits close to one another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from k3fuse.alone.launching import Case, Sketch, same_bits
from k3fuse.alone.trials.trial import Kernels, Trial, integers

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
            ids = integers(got["ids"][row])
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
        ids = [integers(row) for row in got["ids"]]
        if len(set(ids[0])) != CHOSEN or not set(ids[0]) <= set(range(EXPERTS)):
            yield f"{name}: ids of a row of NaN {ids[0]}"
        if not bool(got["weights"].isfinite().all()):
            yield f"{name}: weights that are not finite"
        if 7 in ids[1]:
            yield f"{name}: a NaN score among finite ones was chosen"
        for value in ("ids", "weights"):
            if not same_bits(got[value][2:], plain[value][2:]):
                yield f"{name}: {value} of other rows changed"


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
    got = integers(kernels["argmax"]({"logits": logits})["ids"])
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
        if integers(got["ids"]) != [9, 0]:
            yield f"{name}: ids {integers(got['ids'])}, not [9, 0]"


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    return (
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
    )
