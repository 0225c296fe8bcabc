"""Where the ranks of a group meet: the variables that torchrun sets, and the store they name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from k3fuse.errors import InputError, PeerFailedError

_TORCHRUN = "torchrun --nproc-per-node"


@dataclass(frozen=True)
class Rendezvous:
    """This process in its group. keeps: it keeps the store, since torchrun does not; attempt: how
    often torchrun has started the group anew."""

    rank: int
    world: int
    host: str
    port: int
    keeps: bool
    keeper: str
    attempt: str

    @classmethod
    def from_environment(
        cls, tp: int, environment: Mapping[str, str] | None = None
    ) -> Rendezvous | None:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None for a group of one.

        InputError names the variable that is missing or wrong, and when WORLD_SIZE is not `tp`.
        """
        env = os.environ if environment is None else environment
        world = _number(env, "WORLD_SIZE", tp)
        if world != tp:
            raise InputError(
                f"WORLD_SIZE is {world}, the bundle was compiled for {tp} ranks: start {tp} "
                f"processes ({_TORCHRUN}={tp}) or compile with --tp {world}"
            )
        rank = _number(env, "RANK", tp)
        if rank >= world:
            raise InputError(f"RANK is {rank}: ranks of WORLD_SIZE {world} are 0 to {world - 1}")
        if world == 1:
            return None
        host, port = _variable(env, "MASTER_ADDR", tp), _number(env, "MASTER_PORT", tp)
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world=world,
            host=host,
            port=port,
            keeps=rank == 0 and not agent,
            keeper=f"{'torchrun' if agent else 'rank 0'} at {host}:{port}",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def connect(self, limit: float) -> TCPStore:
        """Open the store, or connect to it within about `limit` seconds.

        InputError when this rank cannot keep it at MASTER_PORT, PeerFailedError when its keeper
        does not answer.
        """
        timeout = timedelta(seconds=limit / 2)  # torch tries twice
        try:
            return TCPStore(self.host, self.port, None, self.keeps, timeout, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
        if self.keeps:
            raise InputError(
                f"MASTER_PORT {self.port}: rank 0 cannot listen there ({reason}): name a free port"
            )
        raise PeerFailedError(
            f"{self.keeper} does not answer ({reason}): start all ranks with the same MASTER_ADDR "
            "and MASTER_PORT"
        )


def _variable(env: Mapping[str, str], name: str, tp: int) -> str:
    if not env.get(name):
        raise InputError(
            f"{name} is not set: start one process a GPU, for example with {_TORCHRUN}={tp}"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str, tp: int) -> int:
    text = _variable(env, name, tp)
    if not text.isdecimal():
        raise InputError(f"{name} is '{text}', not a number: start with {_TORCHRUN}={tp}")
    return int(text)
