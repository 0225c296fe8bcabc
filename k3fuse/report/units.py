"""Bytes and times as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Bytes in powers of 1000, three or four digits: "8.76 GB", "512 B"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def human_us(microseconds: float) -> str:
    """Microseconds, or milliseconds from 1000 on."""
    if microseconds >= 1000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds:.1f} us"
