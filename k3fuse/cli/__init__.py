"""The command line: one file a command, each with a `register`; errors become exit codes here."""

from __future__ import annotations

import os
import sys

import torch
import typer

from k3fuse import __version__
from k3fuse.cli import (
    bench,
    diff,
    doctor,
    inspect,
    kernel,
    opt,
    prove,
    roofline,
    run,
    synth,
    verify,
)
from k3fuse.cli import compile as compile_command
from k3fuse.cli.output import err_console
from k3fuse.errors import K3FuseError, PeerFailedError

app = typer.Typer(
    name="k3fuse",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compile the decode step of large mixture-of-experts models into few checked launches.",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    if version:
        print(f"k3fuse {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


_COMMANDS = (
    *(synth, compile_command, verify, prove, run, bench),
    *(inspect, diff, opt, kernel, roofline, doctor),
)
for _command in _COMMANDS:
    _command.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run one command. Exit codes: 0 ok, 1 the answer is no, 2 wrong use or bad input."""
    try:
        app(args=arguments)
    except K3FuseError as error:
        err_console.print(f"k3fuse: {error}", markup=False, highlight=False)
        if isinstance(error, PeerFailedError) and torch.cuda.is_initialized():
            os._exit(error.exit_code)  # a kernel that waits for ever would hold up an ordinary end
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.exit(0)
    except OSError as error:  # a disk or a permission, not a defect of ours
        place = f"{error.filename}: " if error.filename is not None else ""
        reason = error.strerror or str(error)
        err_console.print(f"k3fuse: {place}{reason}", markup=False, highlight=False)
        sys.exit(2)
