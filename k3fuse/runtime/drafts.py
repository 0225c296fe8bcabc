"""Drafting without a draft model: what followed the last time these tokens stood here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Draft = Callable[[Sequence[int], int], list[int]]
"""(tokens of a request so far, count) -> `count` guesses of what follows."""

LONGEST = 3
"""Tokens at the end of a request that are looked up at most; longer matches win."""


def prompt_lookup(tokens: Sequence[int], count: int) -> list[int]:
    """What followed the latest earlier occurrence of the last 3, 2 or 1 tokens.

    Where that is shorter than `count`, or nothing matches, the last token is repeated
    (prompt lookup decoding, Saxena 2023).
    """
    known = list(tokens)
    for size in range(min(LONGEST, len(known) - 1), 0, -1):
        tail = known[-size:]
        for start in range(len(known) - size - 1, -1, -1):
            if known[start : start + size] == tail:
                found = known[start + size : start + size + count]
                return found + found[-1:] * (count - len(found))
    return known[-1:] * count
