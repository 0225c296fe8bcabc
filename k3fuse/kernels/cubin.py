"""What ptxas decided, read from a cubin: registers, stack and code size of a kernel.

Reads the ELF section `.nv.info`, whose attributes 0x2f and 0x11 give registers and stack bytes for
a symbol index; nothing on the build machine can ask a driver.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_REGISTERS, _STACK = 0x2F, 0x11
_WITH_PAYLOAD = 4  # format byte of attributes whose 16-bit value is the size of what follows


@dataclass(frozen=True)
class Resources:
    """registers a thread; stack: bytes a thread of local memory; code: bytes of instructions."""

    registers: int
    stack: int
    code: int


def resources(cubin: bytes, symbol: str) -> Resources:
    """Resources of one kernel; KeyError if the cubin does not hold `symbol`."""
    sections = _sections(cubin)
    index = _symbol_index(sections[".symtab"], sections[".strtab"], symbol)
    found = {
        attribute: value
        for attribute, owner, value in _attributes(sections[".nv.info"])
        if owner == index
    }
    return Resources(found[_REGISTERS], found.get(_STACK, 0), len(sections[f".text.{symbol}"]))


def _sections(cubin: bytes) -> dict[str, bytes]:
    start = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * i) for i in range(count)]
    names = cubin[headers[names_at][4] :]
    return {
        _text(names, name): cubin[offset : offset + length] if kind != 8 else b""  # 8: no bits
        for name, kind, _, _, offset, length in headers
    }


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _symbol_index(symbols: bytes, names: bytes, wanted: str) -> int:
    for index in range(len(symbols) // 24):
        if _text(names, struct.unpack_from("<I", symbols, index * 24)[0]) == wanted:
            return index
    raise KeyError(f"the cubin has no symbol {wanted}")


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol index, value) of attributes with two words."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _WITH_PAYLOAD:
            if size == 8:
                yield attribute, *struct.unpack_from("<II", info, at)
            at += size
