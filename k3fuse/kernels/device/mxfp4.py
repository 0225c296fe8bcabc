"""MXFP4 weights in shared memory: scales, and codes as pairs of float16."""

from cutlass import Uint32

from k3fuse.kernels.device import instructions as ins

SCALE_BITS = 0x7F800000
SIGNS = 0x80008000
HALF_MAGNITUDES = 0x0E000E00


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
        found = Uint32(0)
        for word in self.words:
            found = found | ((~word - Uint32(0x01010101)) & word & Uint32(0x80808080))
        return found


def half_codes(word):
    """8 MXFP4 codes as four pairs (j, j+4) of float16, their values times 2^-14.

    Sign, exponent and fraction of a code in bits 15 and 11 to 9 of a float16 are that, also where
    the float16 is subnormal.
    """
    pairs = []
    for j in range(4):
        moved = word << Uint32(12 - 4 * j) if j < 3 else word
        pairs.append((moved & Uint32(SIGNS)) | ((moved >> Uint32(3)) & Uint32(HALF_MAGNITUDES)))
    return pairs
