"""Compares text with a literal, and reads numbers, at many positions of a text at once.

Eight bytes of text are read as one 64-bit number, whose lowest byte is the first byte of the text.
So about twelve operations on whole arrays test eight digits and compute their value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.events import Flags, Ints

Words = NDArray[np.uint64]

# Numbers with more digits are not read.
MOST_DIGITS = 16
_LONGEST_US = 9 * 10**15
_ONE = np.uint64(1)
_EACH = np.uint64(0x0101_0101_0101_0101)  # a 1 in each byte
_ZEROS, _LOW, _TO_HIGH, _HIGH = (_EACH * np.uint64(byte) for byte in (0x30, 0x7F, 0x76, 0x80))
# The factor for decimals, by the number of bytes that they take, including the point.
_SCALES = np.array([0, 0, 100, 10, 1])
_POWERS = 10 ** np.arange(MOST_DIGITS + 1, dtype=np.int64)


def stands(text: bytes, literal: bytes, at: Ints) -> Flags:
    """Whether the text at each position is the literal. Reads up to 7 bytes after the literal."""
    count = -(-len(literal) // 8)
    wanted = np.frombuffer(literal.ljust(8 * count, b"\0"), "<u8")
    words = _words(text, at, count)
    found: Flags = words[:, -1] & (1 << 8 * (len(literal) - 8 * count + 8)) - 1 == wanted[-1]
    for k in range(count - 1):
        found &= words[:, k] == wanted[k]
    return found


def whole_after(text: bytes, at: Ints) -> tuple[Ints, Ints]:
    """The whole numbers that begin at the positions, and how many digits each has.

    The number of digits is 0 if no number that can be read begins there. Reads 16 bytes of text
    from each position on.
    """
    words = _words(text, at, 2)
    value, count = _left(words[:, 0])
    if (full := count == 8).any():
        more, further = _left(words[:, 1])
        value = np.where(full, value * _POWERS[further] + more, value)
        count = np.where(full, count + further, count)
    return value, np.where(_is_plain(value, count), count, 0)


def whole_before(text: bytes, end: Ints) -> tuple[Ints, Ints]:
    """As `whole_after`, for the numbers that end at the positions."""
    words = _words(text, end - 16, 2)
    value, count = _right(words[:, 1])
    if (full := count == 8).any():
        more, further = _right(words[:, 0])
        value = np.where(full, value + more * 10**8, value)
        count = np.where(full, count + further, count)
    return value, np.where(_is_plain(value, count), count, 0)


def thousandths_before(text: bytes, end: Ints) -> tuple[Ints, Ints]:
    """The numbers that end at the positions, in thousandths, and how many bytes each takes.

    They have at most three decimals. The number of bytes is 0 if no number that can be read ends
    there. Reads 20 bytes of text before each position.
    """
    decimals, run = _right(_words(text, end - 8, 1)[:, 0])
    broken = (run > 0) & (run <= 3) & (_windows(text, "u1")[end - run - 1] == ord("."))
    run = np.where(broken, run + 1, 0)
    whole, count = whole_before(text, end - run)
    value = whole * 1000 + decimals * _SCALES[run]
    return value, np.where((count > 0) & (whole < _LONGEST_US), count + run, 0)


def _windows(text: bytes, kind: str) -> NDArray[Any]:
    """The bytes at each position of a text, as one value of the type `kind`."""
    return np.ndarray((len(text) - np.dtype(kind).itemsize + 1,), kind, text, 0, (1,))


def _words(text: bytes, at: Ints, count: int) -> Words:
    found: Words = _windows(text, f"V{8 * count}")[at].view("<u8").reshape(-1, count)
    return found


def _left(words: Words) -> tuple[Ints, Ints]:
    """The number that the first digits of eight bytes form, and how many digits it has."""
    digits, count = _first_digits(words)
    return _value(digits.byteswap() >> (64 - 8 * count).astype(np.uint64)), count


def _right(words: Words) -> tuple[Ints, Ints]:
    """The number that the last digits of eight bytes form, and how many digits it has."""
    digits, count = _first_digits(words.byteswap())
    return _value(digits), count


def _first_digits(words: Words) -> tuple[Words, Ints]:
    """The values of the digits before the first other byte, then 0; and how many digits."""
    digits: Words = words ^ _ZEROS
    other = _no_digit(digits)
    lowest = other & (~other + _ONE)
    # all bits below the lowest marked byte are 1; if no byte is marked, all bits are 1
    before: Words = (lowest >> np.uint64(7)) - _ONE
    return digits & before, (((before & _EACH) * _EACH) >> 56).astype(np.int64)


def _no_digit(digits: Words) -> Words:
    """A mask with the highest bit of each byte that is more than 9."""
    marked: Words = (((digits & _LOW) + _TO_HIGH) | digits) & _HIGH
    return marked


def _value(digits: Words) -> Ints:
    """The number that eight digits form; the lowest byte is the last digit.

    Adds up pairs of digits, then groups of four, then all eight.
    """
    pairs = (digits + (digits >> 8) * 10) & 0x00FF_00FF_00FF_00FF
    fours = (pairs + (pairs >> 16) * 100) & 0x0000_FFFF_0000_FFFF
    return ((fours + (fours >> 32) * 10_000) & 0xFFFF_FFFF).astype(np.int64)


def _is_plain(value: Ints, count: Ints) -> Flags:
    """Whether the numbers are valid JSON, without a leading 0, and short enough."""
    plain: Flags = (count > 0) & ((count == 1) | (value >= _POWERS[np.maximum(count - 1, 0)]))
    return plain
