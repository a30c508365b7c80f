"""Where the time of the steps goes, as a few shares, and as a bar in a PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from instrument.analysis.views import Views
from instrument.report.notebook import DEVICE_PARTS

#: The colours of the parts of a bar, in order: their names, and their red, green and blue.
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
    """Return the parts of the steps with their shares, at most eight, which add up to 1.

    With device work, the parts are what the device did. Otherwise they are the outermost ranges
    with all CPU time that they caused, the largest first. Empty if the trace shows no time.
    """
    if len(capture.work.event):
        (row,) = capture.breakdown
        whole = row.total_ns or 1
        return [(words, getattr(row, name) / whole) for name, words in DEVICE_PARTS.items()]
    shares: dict[str, float] = {}
    outermost = ""
    for ranged in capture.ranges:
        outermost = ranged.name if ranged.depth == 0 else outermost
        shares[outermost] = shares.get(outermost, 0.0) + (ranged.share or 0.0)
    for rest in capture.ranges.rest:
        shares[rest.name] = rest.share or 0.0
    found = sorted(shares.items(), key=lambda part: -part[1])
    few, others = found[: len(COLOURS) - 1], found[len(COLOURS) - 1 :]
    more = [("others", sum(share for _, share in others))] if others else []
    return [part for part in [*few, *more] if part[1]]


def bar_png(shares: Sequence[float]) -> bytes:
    """Return a bar as a PNG: a part in the next of `COLOURS` for each share, from left to right."""
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
    head = struct.pack(
        ">IIBBBBB", _WIDTH, _HEIGHT, 8, 2, 0, 0, 0
    )  # 8 bits each of red, green, blue
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(pixels)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
