"""Whether a row alone has the bits that it has among others: the launches of two buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3fuse.alone.launching import Kernel, Tensors, same_bits
from k3fuse.kernels.program import Program

_ROLES: Mapping[tuple[str, int], str] = {
    ("kda_step", 10): "slotted",
    ("kda_step", 11): "slotted",
    ("kda_step", 12): "slots",
    ("mla_append", 0): "paged",
    ("mla_append", 3): "table",
    ("mla_append", 5): "slots",
    ("mla_attend_latent", 1): "paged",
    ("mla_attend_latent", 2): "table",
    ("mla_attend_latent", 4): "slots",
}
"""How the requests of a step find their part of a state; all else goes by rows."""


def unlike(one: Program, many: Program) -> str | None:
    """None, or why two buckets' launches of one name do not do the same."""
    if one.label != many.label:
        return f"other ops with more rows: {many.label}"
    if one.steps != many.steps or one.written != many.written:
        return "the same ops on other values"
    return None


def parity(one: Kernel, many: Kernel, *, seed: int = 1) -> dict[str, Any]:
    """Every row of `many` against `one` on that row's inputs: all that is written, sent or kept.

    `one` may have a few rows where there are no requests: the first is compared then, and the
    others hold the rows that follow it. max_diff: the largest difference, and largest: the largest
    number, of the values that differ.
    """
    rows = _rows(many)
    roles = _roles(many)
    slotted = [n for n, role in roles.items() if role == "slotted"]
    slots = [n for n, role in roles.items() if role == "slots"]
    if slotted:
        count = many.program.values[many.case.names[slotted[0]]].shape[0]
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:rows]
    else:
        chosen = torch.arange(rows)
    x = many.draw(seed, {name: many.tensor(name, chosen) for name in slots})
    whole = many(x)
    differing: dict[str, None] = {}
    most, largest = 0.0, 0.0
    for row in range(rows):
        alone = one(_only(one, many, x, roles, row))
        for name, got in alone.items():
            role = roles.get(name, "")
            if role == "slotted":
                a, b = got[0], whole[name][int(chosen[row])]
            elif role == "paged":
                pages = _pages(roles, x, row)
                a, b = got[: len(pages)], whole[name][pages]
            elif many.program.values[many.case.names[name]].place == "pushed":
                a, b = got[:, 0], whole[name][:, row]
            else:
                a, b = got[0], whole[name][row]
            if same_bits(a, b):
                continue
            differing[name] = None
            apart = (a.double() - b.double()).abs().nan_to_num(nan=math.inf)
            most = max(most, float(apart.max()))
            largest = max(largest, float(b.double().abs().max()))
    found: dict[str, Any] = {"equal": not differing, "max_diff": most}
    if differing:
        found |= {"largest": largest, "values": list(differing)}
    return found


def _roles(kernel: Kernel) -> dict[str, str]:
    found: dict[int, str] = {}
    for step in kernel.program.steps:
        for position, value in enumerate(step.operands):
            role = _ROLES.get((step.op, position))
            if role is not None:
                found[kernel.program.values[value].root] = role
    return {name: found[i] for name, i in kernel.case.names.items() if i in found}


def _rows(kernel: Kernel) -> int:
    """Rows of the step, from what a launch writes, sends or reads by rows."""
    program = kernel.program
    for held in program.values:
        if held.place == "activation":
            return held.rows
        if held.place in ("mailbox", "pushed"):
            return held.shape[1 if len(held.shape) == 3 else 0]
    raise AssertionError(f"{program.label} has no rows")


def _pages(roles: Mapping[str, str], x: Tensors, row: int) -> Tensor:
    (table,) = (name for name, role in roles.items() if role == "table")
    return x[table][row].long()


def _only(
    one: Kernel, many: Kernel, x: Tensors, roles: Mapping[str, str], row: int
) -> dict[str, Tensor]:
    """The inputs of one row; its state is in slot 0, its pages are the first in order."""
    found: dict[str, Tensor] = {}
    slots = [name for name, role in roles.items() if role == "slots"]
    for name, tensor in x.items():
        held = one.program.values[one.case.names[name]]
        role = roles.get(name, "")
        if held.place == "weight":
            found[name] = tensor
        elif role == "slots":
            found[name] = torch.zeros(1)
        elif role == "table":
            found[name] = torch.arange(held.shape[1]).view(1, -1)
        elif role == "slotted":
            found[name] = torch.zeros(held.shape, dtype=tensor.dtype, device=tensor.device)
            found[name][0] = tensor[int(x[slots[0]][row])]
        elif role == "paged":
            pages = _pages(roles, x, row)
            found[name] = torch.zeros(held.shape, dtype=tensor.dtype, device=tensor.device)
            found[name][: len(pages)] = tensor[pages]
        elif held.place == "mailbox" and tensor.dim() == 3:
            found[name] = tensor.roll(-row, 1)[:, : held.shape[1]]
        else:
            found[name] = tensor.roll(-row, 0)[: held.shape[0]]
    return found
