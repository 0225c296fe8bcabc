"""A schedule as data: launches, what each does in program order, and the edges between them.

This is all that the proofs look at. `lowering` makes it from a plan, and its text form
(`schedule.text`) can be written by hand to ask whether some ordering is safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3fuse.schedule.edges import Edge

Access = Literal["weight", "activation", "state", "mailbox", "host"]
"""weight: never written by the step. host: a value the host reads or passes at launch time."""

ActionKind = Literal[
    "read",  # load from an object
    "write",  # store to an object
    "wait",  # griddepcontrol.wait: all launches before on the stream are complete and visible
    "trigger",  # griddepcontrol.launch_dependents: the next launch may start; see ScheduledLaunch
    "publish",  # store one use of a mailbox into every peer's stage
    "poll",  # spin until every peer's part of one use has arrived
    "rearm",  # write the empty pattern into the stage that the mailbox's rule names
    "barrier",  # all ranks arrive before any goes on
    "fence",  # make earlier generic stores visible to the async proxy
    "check",  # compare a flag with a value
]


@dataclass(frozen=True)
class Action:
    """One step of a launch's program.

    target: the object, mailbox or flag. use: which use of a mailbox in the step. via: how memory
    is touched: "generic" (ld/st), "tma" (bulk copies), "multimem", or for a check what the flag is
    compared with ("epoch", "counter", "gridid", "constant").
    """

    kind: ActionKind
    target: str = ""
    access: Access = "activation"
    use: int = 0
    via: str = "generic"


@dataclass(frozen=True)
class ScheduledLaunch:
    """A launch and its resources. grid (0: no kernel yet) and cluster in CTAs, smem in bytes a CTA.

    A trigger that ends the program is the one that completion gives: no instruction, and the next
    launch starts with all stores visible. Any other trigger makes nothing visible, and where a
    program names none, it may come at any time.

    ctas_per_sm: how many of its CTAs share an SM by its launch bounds (registers are not modelled,
    so one is all that can be counted on otherwise). smem_parts: (what for, bytes) of smem, checked
    against it when given. spins: its CTAs wait for one another, or for peers that may wait for
    them, so all of them must be resident together. host_metadata: it reads a host value when it is
    launched, which a replay would not repeat.
    """

    name: str
    stream: str
    after: tuple[Edge, ...]
    program: tuple[Action, ...]
    grid: int = 0
    cluster: int = 1
    threads: int = 128
    smem: int = 0
    ctas_per_sm: int = 1
    smem_parts: tuple[tuple[str, int], ...] = ()
    spins: bool = False
    host_metadata: bool = False

    @property
    def waits(self) -> bool:
        return any(action.kind == "wait" for action in self.program)


@dataclass(frozen=True)
class Storage:
    """Where an object lives: a range of a named space (the arena, a multicast buffer ...)."""

    name: str
    space: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class MailboxRule:
    """A ring that peers write: stages, uses a step, and which stage a reader re-arms.

    Use k of step s is use g = s * uses + k of the ring and works on stage g mod stages. The reader
    of use g re-arms the stage of use g + rearm; rearm 0 means that nobody does: words carry the
    number of their use, and barriers guard the reuse. payload_excludes_sentinel: producers never
    send the pattern that means empty. control: the word that counts its uses ("" when uses are
    numbered by the plan). space:
    "peer" (unicast stores) or "multicast" (multimem only).
    """

    name: str
    stages: int
    rearm: int
    uses: int
    space: str = "peer"
    sentinel: str = "negative_zero"
    payload_excludes_sentinel: bool = True
    control: str = ""
    protocol: str = "push_partial"


@dataclass(frozen=True)
class Schedule:
    """One step of every rank (all run the same), to be replayed."""

    name: str
    target: str
    ranks: int
    launches: tuple[ScheduledLaunch, ...]
    storages: tuple[Storage, ...] = ()
    mailboxes: tuple[MailboxRule, ...] = ()
    outputs: tuple[str, ...] = ()

    def launch(self, name: str) -> ScheduledLaunch:
        return next(launch for launch in self.launches if launch.name == name)
