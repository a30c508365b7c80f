"""A baseline: the counters of a capture in a small JSON file that is kept beside the code.

Equal counters always give the same file, and each counter has its own line. So a code review shows
which counters a change raises. The file holds the number of steps and, of one step, `counters`,
`ranges` (the counters in each range) and `calls` (those of `Counters.calls`).

A counter that varies between steps has three numbers: the lowest and the highest value of a step,
and the sum of all steps (of `peak_bytes`, the highest value again). A counter that was not recorded
is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.read.compare.counters import COUNTERS, KIND, OF_WHOLE_STEP, Count, Counters
from instrument.read.trace.capture_json import BAD_JSON

FORMAT = 1
_MOST_BYTES = 16 << 20
# Counters are computed as 64-bit integers, so a larger number is a mistake.
_Number = Annotated[int, Meta(ge=0, le=2**62)]
_Cell = _Number | Annotated[list[_Number], Meta(min_length=3, max_length=3)]
_Rows = dict[str, dict[str, _Cell]]


class _Content(Struct):
    torch_instrument_baseline: Literal[1]
    steps: Annotated[int, Meta(ge=1, le=2**31)]
    counters: dict[str, _Cell]
    ranges: _Rows
    calls: _Rows


def as_text(counted: Counters) -> str:
    """The counters as the text of a baseline file."""
    counts = {name: count for name, count in counted.counts.items() if count is not None}
    sections = (
        _section("counters", {name: _cell(count) for name, count in counts.items()}),
        _section("ranges", {path: _cells(row) for path, row in counted.ranges.items()}),
        _section("calls", {path: _cells(row) for path, row in counted.calls.items()}),
    )
    head = f'  "torch_instrument_baseline": {FORMAT},\n  "steps": {counted.steps},\n'
    return "{\n" + head + ",\n".join(sections) + "\n}\n"


def read(path: Path) -> Counters:
    """Read a baseline file.

    Raises:
        CaptureError: the file cannot be read, is not a baseline, or has another format.
    """
    try:
        content = msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=_Content)
    except OSError as error:
        raise CaptureError(f"The baseline {path} cannot be read: {error.strerror}.") from None
    except BAD_JSON as error:
        raise CaptureError(
            f"The file {path} is no baseline of this version of torch-instrument ({error}): write "
            "it with `instrument baseline`."
        ) from None

    def counts(row: Mapping[str, _Cell]) -> dict[str, Count]:
        return {name: _count(name, cell, content.steps) for name, cell in row.items()}

    known: dict[str, Count | None] = dict.fromkeys(COUNTERS)
    for name, count in counts(content.counters).items():
        if name in COUNTERS or name.startswith(KIND):
            known[name] = count
    ranges, calls = (
        {path: counts(row) for path, row in rows.items()}
        for rows in (content.ranges, content.calls)
    )
    return Counters(content.steps, known, ranges, calls)


def is_baseline(path: Path) -> bool:
    """Whether the file at a path is a baseline, whatever its format version."""
    try:
        content = msgspec.json.decode(
            files.read_bytes(path, _MOST_BYTES), type=dict[str, msgspec.Raw]
        )
    except (OSError, *BAD_JSON):
        return False
    return "torch_instrument_baseline" in content


def _count(name: str, cell: _Cell, steps: int) -> Count:
    if isinstance(cell, list):
        least, most, total = cell
        return Count(total, least, most)
    return Count(cell if name in OF_WHOLE_STEP else cell * steps, cell, cell)


def _cell(count: Count) -> _Cell:
    return [count.least, count.most, count.total] if count.per_step is None else count.per_step


def _cells(row: Mapping[str, Count]) -> dict[str, _Cell]:
    return {name: _cell(row[name]) for name in sorted(row)}


def _section(title: str, rows: Mapping[str, object]) -> str:
    lines = [
        f"    {json.dumps(files.encodable(name))}: {json.dumps(files.encodable(rows[name]))}"
        for name in sorted(rows)
    ]
    inside = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
    return f'  "{title}": {inside}'
