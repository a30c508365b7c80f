"""Compute the share of each kind of time in the steps, and draw the shares as a bar in a PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from instrument.read.show.summary import summary
from instrument.read.views.views import Views

#: The colours of the parts of a bar, in order: name, and red, green and blue from 0 to 255.
COLOURS: dict[str, tuple[int, int, int]] = {
    "blue": (66, 133, 244),
    "orange": (244, 150, 30),
    "purple": (150, 90, 200),
    "grey": (190, 190, 190),
    "green": (60, 160, 90),
    "red": (215, 70, 60),
    "brown": (130, 95, 70),
    "teal": (40, 160, 170),
}
_WIDTH, _HEIGHT = 800, 40


def step_split(capture: Views) -> list[tuple[str, float]]:
    """Return the kinds of time in the steps, each with its share; the shares add up to 1.

    The list is empty if the trace shows no time.
    """
    found = summary(capture)
    return [(name, found.share(ns)) for name, ns in found.kinds.items() if ns]


def bar_png(shares: Sequence[float]) -> bytes:
    """Return a PNG of a bar with a part for each share, from left to right, in `COLOURS`."""
    ends, total = [], 0.0
    for share in shares:
        total += share
        ends.append(round(min(total, 1.0) * _WIDTH))
    line = bytearray()
    for end, colour in zip(ends, COLOURS.values()):
        line += bytes(colour) * (end - len(line) // 3)
    line += b"\xff" * (3 * _WIDTH - len(line))
    # Each line of a PNG begins with the number of its filter; 0 means none.
    pixels = (b"\0" + bytes(line)) * _HEIGHT
    eight_bits, rgb = 8, 2
    head = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, eight_bits, rgb, 0, 0, 0)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(pixels)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
