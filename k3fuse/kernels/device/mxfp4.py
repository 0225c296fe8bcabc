"""MXFP4 weights in shared memory: scales, and codes as pairs of bfloat16."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from k3fuse.kernels.device import instructions as ins

SCALE_BITS = 0x7F800000
SIGNS = 0x80008000
MAGNITUDES = 0x01C001C0


def shared_word(address):
    """One word of shared memory."""
    return ins.load_words(address, 4, "shared")[0]


def scale_piece(address, size):
    """`size` bytes of scales as words."""
    if size == 1:
        return [
            ins.asm(
                "{ .reg .b16 h; ld.shared.u8 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
                write_only_types=[Uint32],
                read_only_args=[address],
            )
        ]
    return ins.load_words(address, size, "shared")


def power_of_two(size, most):
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)


class Scales:
    """The E8M0 scales of a lane's row in a slot."""

    def __init__(self, address, count):
        self.size = power_of_two(count, 16)
        self.bytes = min(self.size, 4)  # scales a word
        self.words = []
        for at in range(0, count, self.size):
            self.words += scale_piece(address + at, self.size)

    def value(self, q):
        """Scale q as float32: byte 0 is 2^-127, a subnormal. 255 gives infinity here."""
        word, byte = self.words[q // self.bytes], q % self.bytes
        move = 23 - 8 * byte
        bits = word << Uint32(move) if move > 0 else word >> Uint32(-move)
        return ins.as_float(
            ins.asm(
                "max.u32 {$w0}, {$r0}, 0x400000;",
                write_only_types=[Uint32],
                read_only_args=[bits & Uint32(SCALE_BITS)],
            )
        )

    def has_nan(self):
        """Nonzero where a byte is 255."""
        return has_nan(self.words)


class UnalignedScales(Scales):
    """The E8M0 scales of a lane's row, from byte `offset` of a row at an address that is a multiple
    of four. Words of four scales; past `count`, zeros."""

    def __init__(self, row, offset, count):
        self.bytes = 4
        first = row + (offset & ~3)
        words = [shared_word(first + i * 4) for i in range(-(-(count + 3) // 4))]
        bytes_of = Uint32(offset & 3) * Uint32(0x1111) + Uint32(0x3210)
        self.words = []
        for i in range(-(-count // 4)):
            word = ins.asm(
                "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
                write_only_types=[Uint32],
                read_only_args=[words[i], words[min(i + 1, len(words) - 1)], bytes_of],
            )
            left = count - 4 * i
            self.words.append(word & Uint32((1 << (8 * left)) - 1) if left < 4 else word)


def has_nan(words):
    """Nonzero where a byte of the words is 255."""
    found = Uint32(0)
    for word in words:
        found = found | ((~word - Uint32(0x01010101)) & word & Uint32(0x80808080))
    return found


@cute.jit
def keep_nan(sums: list, low: list, high: list):
    """NaN in sums 0 and 1 (2 and 3) where a scale of `low` (`high`), words of them, is NaN.

    Such a scale was taken as infinity, so that its sums are not finite.
    """
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    rest = total - total
    if rest != Float32(0.0):
        nan = Float32(float("nan"))
        bad = [has_nan(low) != Uint32(0), has_nan(high) != Uint32(0)]
        sums = [cutlass.select_(bad[j // 2], nan, sums[j]) for j in range(4)]
    return sums


def tiny_codes(word):
    """8 MXFP4 codes as four pairs (j, j+4) of bfloat16, their values times 2^-126.

    Sign, exponent and fraction of a code in bits 15 and 8 to 6 of a bfloat16 are that, also where
    the bfloat16 is subnormal. A product with 2^6 + 2^12 puts them there, from a nibble that is
    alone in its half of the word.
    """
    pairs = []
    above = word >> Uint32(8)
    for j in range(4):
        move = 4 * (j % 2)
        alone = (word if j < 2 else above) & Uint32(0x000F000F << move)
        spread = ins.asm(
            f"mul.lo.u32 {{$w0}}, {{$r0}}, {((1 << 6) + (1 << 12)) >> move};",
            write_only_types=[Uint32],
            read_only_args=[alone],
        )
        pairs.append(spread & Uint32(SIGNS | MAGNITUDES))
    return pairs
