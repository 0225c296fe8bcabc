"""What a user can choose about a compilation, as frozen data: part of every cache key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from k3fuse.errors import InputError

MAX_BATCH = 64
"""Rows, and so requests, that a step can hold: the kernels for few rows end there."""

MAX_ROWS_PER_REQUEST = 8
"""Rows of a verify step: the last token and up to seven drafts (K3 spec 6.4)."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of `k3fuse compile`, one field a flag.

    tp: ranks of the tensor-parallel group. batches: requests of each bucket. verify_rows: rows a
    request of the verify buckets (0: none). context: cached tokens a request that bytes and times
    are stated for. max_context, page_size: size of the paged MLA cache. protocol: how all-reduces
    travel. prefetch: whether L2 prefetch windows are inserted. kernels: whether kernels are
    selected and compiled. debug: whether their waits are bounded and reported.
    """

    target: str
    tp: int = 1
    batches: tuple[int, ...] = (1,)
    verify_rows: int = 0
    context: int = 1
    max_context: int = 4096
    page_size: int = 64
    protocol: Literal["auto", "one_shot", "two_shot"] = "auto"
    prefetch: bool = False
    bisect_limit: int | None = None
    kernels: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise InputError(f"--tp {self.tp}: the group needs at least one rank")
        if not self.batches:
            raise InputError("--batch is empty: name at least one batch, for example --batch 1,8")
        for batch in self.batches:
            if not 1 <= batch <= MAX_BATCH:
                raise InputError(f"--batch {batch}: a bucket holds 1 to {MAX_BATCH} requests")
        if len(set(self.batches)) != len(self.batches):
            raise InputError(f"--batch {','.join(map(str, self.batches))}: a batch is named twice")
        if self.verify_rows and not 2 <= self.verify_rows <= MAX_ROWS_PER_REQUEST:
            raise InputError(
                f"--verify-rows {self.verify_rows}: a verify step has 2 to {MAX_ROWS_PER_REQUEST} "
                "rows a request"
            )
        for batch in self.batches:
            if batch * self.verify_rows > MAX_BATCH:
                raise InputError(
                    f"--batch {batch} --verify-rows {self.verify_rows}: "
                    f"{batch * self.verify_rows} rows, a step holds at most {MAX_BATCH}"
                )
        if self.page_size < 1 or self.max_context < 1 or not 1 <= self.context <= self.max_context:
            raise InputError(
                f"--context {self.context}, --max-context {self.max_context}, --page-size "
                f"{self.page_size}: need 1 <= context <= max context and a page of at least 1"
            )

    @property
    def slots(self) -> int:
        """State slots: one for each request of the largest bucket."""
        return max(self.batches)

    @property
    def max_pages(self) -> int:
        """Pages of one request's block table."""
        return -(-self.max_context // self.page_size)

    @property
    def pages(self) -> int:
        return self.slots * self.max_pages

    def as_dict(self) -> dict[str, object]:
        """Plain data for manifests and cache keys."""
        return dataclasses.asdict(self)
