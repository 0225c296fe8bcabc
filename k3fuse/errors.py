"""What can go wrong, sorted by who has to act.

`InputError` is the caller's to fix (exit code 2); `Refusal` is an honest "no" (exit code 1);
everything else is a defect of k3fuse and keeps its traceback.
"""


class K3FuseError(Exception):
    """Base of all errors that carry a message for the user. `exit_code` is what the CLI returns."""

    exit_code = 2


class InputError(K3FuseError):
    """Bad input: the message names the file, tensor, node or flag, and the fix."""


class CheckpointError(InputError):
    """A checkpoint or its config cannot be read or does not match the model."""


class TraceError(InputError):
    """A forward cannot be turned into a graph; names the module path and the source line."""


class ParseError(InputError):
    """Text is not a graph or a plan; names the line."""


class VerifyError(K3FuseError):
    """A graph breaks an invariant of the IR; shows the text around the bad node."""

    exit_code = 1


class PassError(K3FuseError):
    """A pass failed or broke its graph; names the pass and the reproducer file."""

    exit_code = 1


class RefusedError(K3FuseError):
    """The answer is no: a check failed, or `--strict` met something that is not proven."""

    exit_code = 1


class PeerFailedError(K3FuseError):
    """Another process of the group failed, was lost or never came; names its rank and stage."""

    exit_code = 1
