"""What a debug kernel leaves behind when it gives up waiting for a peer."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST = 4  # words before the record: how many threads gave up


def read_error_record(record: Tensor) -> str:
    """The record in words, or nothing when no launch gave up.

    Word 0 counts the threads that gave up; words 4 to 10 are of the first: rank, launch, CTA,
    thread, mailbox (value of the launch's program), use of the mailbox, word seen.
    """
    words = [int(word) for word in record.cpu().view(torch.int32)[:16]]
    if words[0] == 0:
        return ""
    rank, launch, cta, thread, value, use, seen = words[_FIRST : _FIRST + 7]
    return (
        f"rank {rank} gave up waiting: launch {launch} of the plan, CTA {cta}, thread {thread}, "
        f"mailbox of v{value}, use {use}; the word there is still {seen & 0xFFFFFFFF:#010x} "
        f"({words[0]} threads gave up)"
    )
