"""The delta rule: accepted drafts, chunks, slots that others have poisoned."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3fuse.alone.launching import Case, Kernel, Sketch, Tensors, same_bits
from k3fuse.alone.trials.trial import Kernels, Trial, different, pick

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


def _weights(given: Tensors) -> dict[str, Tensor]:
    return pick(given, ["conv_q", "conv_k", "conv_v", "a_log", "dt_bias"])


def _rows(given: Tensors, requests: int, begin: int, end: int) -> dict[str, Tensor]:
    """Rows begin to end of every request."""
    parts = {n: given[n].view(requests, -1, given[n].shape[1]) for n in ROWS}
    return {n: part[:, begin:end].flatten(0, 1) for n, part in parts.items()}


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
    serial = pick(x, STATES)
    for row in range(2):
        live = [s if a > row else -1 for s, a in zip(slots, accepted, strict=True)]
        qkv = x["journal_qkv"][slots, row]
        rows = {"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2]}
        rows |= {"f": x["journal_f"][slots, row], "b": x["journal_b"][slots, row]}
        given = {**_weights(x), **serial, **rows, "slots": torch.tensor(live)}
        serial = pick(step(given), STATES)
    for name in STATES:
        for slot, kind in ((0, "nothing was accepted"), (1, "a neighbour"), (3, "a neighbour")):
            if not same_bits(got[name][slot], x[name][slot]):
                yield f"{name} of slot {slot} changed: {kind}"
    yield from different(got, serial, STATES, "commit against serial steps")
    yield from different(got, x, JOURNALS, "commit")


def _serial(
    step: Kernel, given: Tensors, states: Tensors, rows: list[Tensors], slots: list[int]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain steps: outputs of each and the states at the end."""
    outputs, states = list[Tensor](), pick(states, STATES)
    for row in rows:
        made = step({**_weights(given), **states, **row, "slots": torch.tensor(slots)})
        outputs.append(made["o"])
        states = pick(made, STATES)
    return outputs, states


def _speculation(kernels: Kernels) -> Iterator[str]:
    step, verify, commit = (kernels[n] for n in ("step", "verify", "commit"))
    slots = [3, 1]
    x = verify.draw(1, {"slots": verify.tensor("slots", slots)})
    after = _rows(step.draw(2), 2, 0, 1)
    drafts: list[Tensors] = [_rows(x, 2, row, row + 1) for row in range(4)]
    seen = verify(x)
    yield from different(seen, x, STATES, "verify")
    outputs, _ = _serial(step, x, x, drafts, slots)
    wanted = torch.stack(outputs, 1).flatten(0, 1)
    yield from different(seen, {"o": wanted}, ["o"], "verify against serial steps")
    for accepted in ((3, 1), (4, 0), (2, 4)):
        given = {**_weights(x), **pick(x, STATES), **pick(seen, JOURNALS)}
        given |= {"slots": torch.tensor(slots), "accepted": torch.tensor(accepted)}
        committed = commit(given)
        states: dict[str, Tensor] = pick(x, STATES)
        for row, draft in enumerate(drafts):
            live = [s if a > row else -1 for s, a in zip(slots, accepted, strict=True)]
            _, states = _serial(step, x, states, [draft], live)
        what = f"{accepted} accepted"
        yield from different(committed, states, STATES, f"{what}, states")
        (o,), states = _serial(step, x, states, [after], slots)
        (o_after,), states_after = _serial(step, x, pick(committed, STATES), [after], slots)
        one, two = {**states, "o": o}, {**states_after, "o": o_after}
        yield from different(two, one, ["o", *STATES], f"{what}, the plain step after")


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
            yield from different(got, wanted, ["o", *STATES], f"{bound}chunks of {size}")


def _poisoned_slot(kernels: Kernels) -> Iterator[str]:
    step = kernels["step"]
    x = step.draw(4, {"slots": step.tensor("slots", [0, 2])})
    clean = step(x)
    bad = {**x, **{name: x[name].clone() for name in STATES}}
    for name in STATES:
        bad[name][[1, 3]] = torch.nan
    got = step(bad)
    yield from different(got, clean, ["o"], "NaN in other slots")
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
    yield from different(again, fresh, ["o"], "a slot that was zeroed")
    for name in STATES:
        if not same_bits(again[name][3], fresh[name][0]):
            yield f"a slot that was zeroed: other bits of {name}"


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    softplus = {f"softplus {n}": _kda("kda_step", 2, n, None) for n in (4, 2, 1)}
    speculation = {
        "step": _kda("kda_step", 2, 1),
        "verify": _kda("kda_verify", 2, 4),
        "commit": _kda("kda_commit", 2, 4),
    }
    return (
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
    )
