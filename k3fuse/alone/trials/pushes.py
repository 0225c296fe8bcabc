"""What looks like an empty mailbox: -0.0, sent and computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3fuse.alone.launching import Case, Sketch, same_bits
from k3fuse.alone.memory import looks_empty
from k3fuse.alone.trials.sums import sum_case
from k3fuse.alone.trials.trial import Kernels, Trial


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
        "sum f32": sum_case(2, 5, 64, "f32", "f32"),
        "sum bf16": sum_case(2, 5, 64, "bf16", "bf16"),
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


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    return (
        Trial("B04", "-0.0 is sent", "sent as +0.0; sums give +0.0", _pushes(), _negative_zeros),
        Trial(
            "B04",
            "-0.0 is computed and sent",
            "sent as +0.0",
            _computed_pushes(),
            _computed_negative_zeros,
        ),
    )
