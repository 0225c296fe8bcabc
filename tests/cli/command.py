"""Runs a command line in this process, as a shell would."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any, cast

from k3fuse.cli import main


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was written; an exception that is no exit goes to the test."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """stdout as the one JSON object that it has to be."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return cast("dict[str, Any]", value)


def call(*arguments: object) -> Outcome:
    """Run `k3fuse` with these arguments."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


def call_ok(*arguments: object) -> Outcome:
    """Run a command that has to succeed."""
    outcome = call(*arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def refused(*arguments: object, code: int = 2) -> str:
    """The message of a command that has to fail with `code`, and print nothing else."""
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome
    assert "Traceback" not in outcome.err
    assert outcome.err.strip()
    return " ".join(outcome.err.split())
