"""Rows of padding: nothing may depend on what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from k3fuse.alone.check import token_rows
from k3fuse.alone.inputs import rows_per_request
from k3fuse.alone.launching import Case, Kernel, Tensors, same_bits
from k3fuse.alone.trials.trial import Kernels, Trial
from k3fuse.kernels.examples import example
from k3fuse.kernels.program import Program

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
_PADDING = "rows before and all states equal in every bit, whatever rows of padding hold"
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


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    return (Trial("B45", "one launch a family", _PADDING, _padded(), padding_faults),)
