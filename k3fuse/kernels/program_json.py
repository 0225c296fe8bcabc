"""Programs as JSON, for folders of kernels that travel to a GPU without the compiler."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from k3fuse.kernels.program import Held, Program, Ring, Step


def program_data(program: Program) -> dict[str, Any]:
    """A program as JSON takes it."""
    return {
        "tp": program.tp,
        "values": [
            [v.dtype, list(v.shape), v.place, v.root, None if v.ring is None else astuple(v.ring)]
            for v in program.values
        ],
        "steps": [
            [s.op, dict(s.attributes), list(s.operands), list(s.results)] for s in program.steps
        ],
        "written": list(program.written),
        "trigger": program.trigger,
    }


def program_from(data: dict[str, Any]) -> Program:
    """The program that `program_data` wrote."""
    values = tuple(
        Held(dtype, tuple(shape), place, root, None if ring is None else Ring(*ring))
        for dtype, shape, place, root, ring in data["values"]
    )
    steps = tuple(
        Step(op, tuple(sorted(attributes.items())), tuple(operands), tuple(results))
        for op, attributes, operands, results in data["steps"]
    )
    return Program(data["tp"], values, steps, tuple(data["written"]), data["trigger"])
