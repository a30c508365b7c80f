"""Read the timings file of a run, and return the last summary of each range."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import DecodeError, Struct, convert, json

from instrument.base.errors import CaptureError
from instrument.base.files import TIMINGS_FORMAT
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.trace.capture_json import Number
from instrument.read.trace.json_repair import forgiving
from instrument.read.views.table import Table

TIMINGS: Schema = schema(
    name="the name of the range; `ProfilerStep*` for whole steps",
    calls="how many times the range was called",
    mean_ns="the mean duration of a call",
    p50_ns="the median duration of a call, with an error of at most 2 %",
    p95_ns="the 95th percentile of the durations of the calls, with an error of at most 2 %",
    max_ns="the duration of the longest call",
    device_calls="how many calls have a known device time. If no device time is known, the device "
    "columns are left out",
    device_mean_ns="the mean time that a call takes in the device's stream",
    device_p50_ns="the median time that a call takes in the device's stream, with an error of at "
    "most 2 %",
    device_p95_ns="the 95th percentile of the times that calls take in the device's stream, with "
    "an error of at most 2 %",
    device_max_ns="the longest time that a call takes in the device's stream",
)
# The longest line that is read, in bytes. A line has about 400 bytes for each range.
_LONGEST_LINE = 64 << 20


class _Entry(Struct, gc=False):
    run: dict[str, Number]
    since: dict[str, Number] = {}


class Line(Struct, gc=False):
    """A line: of each range, the calls since the line before, and those of the whole run."""

    step: Number | None
    time: str
    ranges: dict[str, _Entry]
    format: int = TIMINGS_FORMAT


_DECODER = json.Decoder(Line)


def summary_table(runs: Mapping[str, Mapping[str, int]]) -> Table:
    """Return a row for each range, the longest total time first; see `TIMINGS`.

    The columns `device_…` are left out if no device time is known.
    """
    total_ns = {name: run.get("calls", 0) * run.get("mean_ns", 0) for name, run in runs.items()}
    order = sorted(runs, key=lambda name: -total_ns[name])
    known = {key for run in runs.values() for key in run}
    names = [name for name in names_of(TIMINGS)[1:] if name in known or "device" not in name]
    return Table({"name": order} | {name: [runs[k].get(name) for k in order] for name in names})


def read_timings(path: Path) -> tuple[Table, list[str]]:
    """Read the summary of the whole run from a timings file, and a heading with its last step.

    Invalid lines, such as a line that was cut short, are skipped. Cost: 0.6 s for 50 MB.

    Raises:
        CaptureError: there is no such file, the file holds no line of timings, or a newer version
            of torch-instrument wrote the file.
    """
    if path.exists() and not path.is_file():  # reading a named pipe without a writer would block
        raise CaptureError(f"The timings {path} cannot be read: it is not a regular file.")
    runs: dict[str, dict[str, int]] = {}
    last = None
    try:
        with path.open("rb") as lines:
            while text := lines.readline(_LONGEST_LINE):
                with suppress(ValueError, RecursionError):
                    last = read_line(text)
                    for name, entry in last.ranges.items():
                        runs.setdefault(name, {}).update(entry.run)
    except OSError as error:
        reason = error.strerror or error
        raise CaptureError(f"The timings {path} cannot be read: {reason}.") from error
    if last is None:
        raise CaptureError(
            f"{path} holds no timings: give a timings file, such as timings_rank0.jsonl."
        )
    if last.format > TIMINGS_FORMAT:
        raise CaptureError(
            f"The timings {path} have format {last.format}, and this version of torch-instrument "
            f"reads formats up to {TIMINGS_FORMAT}: upgrade torch-instrument."
        )
    upto = "no step ended" if last.step is None else f"up to step {last.step}"
    return summary_table(runs), [f"{path.stem}: {upto}, written {last.time}", str(path)]


def read_line(line: bytes) -> Line:
    """Read a line; raise ValueError or RecursionError if it is no line of timings."""
    try:
        return _DECODER.decode(line)
    except (DecodeError, UnicodeDecodeError):  # a lone surrogate in a name
        return convert(forgiving(line)[0], Line)
