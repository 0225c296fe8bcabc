"""Which write of an object a read must see, and which one it does see.

A number that comes out right can still be luck: old bytes that equal the new ones, or a value that
no output depends on. So every read is held against the launch list: it must see the write that is
last before it there, and nothing else may have touched those bytes since.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.schedule.model import Schedule, Storage


@dataclass(frozen=True)
class Version:
    """The write of `target` by `launch` in one step."""

    step: int
    launch: str
    target: str

    def __str__(self) -> str:
        return f"what step {self.step} @{self.launch} wrote to {self.target}"


THE_STEP = "the step"
"""The reader of the outputs, after all launches."""


class ExpectedVersions:
    """For each launch and object, the write that comes last before the read in the list."""

    def __init__(self, schedule: Schedule) -> None:
        self.overlaps = _overlaps(schedule.storages)
        latest: dict[str, str] = {}
        for launch in schedule.launches:
            latest |= {a.target: launch.name for a in launch.program if a.kind == "write"}
        self._last = latest
        self._writer: dict[tuple[str, str], tuple[str, int]] = {}
        now: dict[str, str] = {}
        for launch in schedule.launches:
            for action in launch.program:
                key = (launch.name, action.target)
                if action.kind == "write":
                    now[action.target] = launch.name
                elif action.kind == "read" and key not in self._writer and action.target in latest:
                    ago = action.target not in now  # what the step before has left
                    writer = latest[action.target] if ago else now[action.target]
                    self._writer[key] = (writer, int(ago))

    def of(self, step: int, launch: str, target: str) -> Version | None:
        """What a launch of this step must find; None for what was there at the start."""
        if launch == THE_STEP:
            return Version(step, self._last[target], target) if target in self._last else None
        found = self._writer.get((launch, target))
        if found is None or step < found[1]:
            return None
        return Version(step - found[1], found[0], target)


class Versions:
    """What has been written on each rank so far."""

    def __init__(self, expected: ExpectedVersions, ranks: int) -> None:
        self._expected = expected
        self._held: list[dict[str, Version]] = [{} for _ in range(ranks)]

    def write(self, rank: int, version: Version) -> None:
        held = self._held[rank]
        held[version.target] = version
        for other in self._expected.overlaps.get(version.target, ()):
            held[other] = version

    def wrong(self, rank: int, step: int, launch: str, target: str) -> str:
        """What is wrong with a read at this moment; empty if it sees what it must."""
        found, want = self._held[rank].get(target), self._expected.of(step, launch, target)
        if found == want:
            return ""
        start = "what was there at the start"
        return f"reads {target} and finds {found or start} instead of {want or start}"


def _overlaps(storages: tuple[Storage, ...]) -> dict[str, tuple[str, ...]]:
    """object -> other objects that share bytes with it."""
    return {
        a.name: found
        for a in storages
        if (
            found := tuple(
                b.name
                for b in storages
                if b is not a
                and b.space == a.space
                and a.offset < b.offset + b.bytes
                and b.offset < a.offset + a.bytes
            )
        )
    }
