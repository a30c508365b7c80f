"""Reads what a run's timings have written: the last summary of each range."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from instrument.capture.table import Table
from instrument.errors import CaptureError

_KINDS = ("calls", "mean_ns", "p50_ns", "p95_ns", "max_ns")


def summary_table(runs: Mapping[str, Mapping[str, int]]) -> Table:
    """A row for each range with its calls, mean, median, 95th percentile and maximum, those with the most time first.

    `p50_ns` and `p95_ns` are within 2 %, the others exact. The columns `device_…` are there where one is known.
    """
    order = sorted(runs, key=lambda name: -runs[name].get("calls", 0) * runs[name].get("mean_ns", 0))
    known = {key for run in runs.values() for key in run}
    columns = [*_KINDS, *(key for key in (f"device_{kind}" for kind in _KINDS) if key in known)]
    return Table({"name": order} | {column: [runs[name].get(column) for name in order] for column in columns})


def read_timings(path: Path) -> tuple[Table, str]:
    """The whole run's summary from a file of timings, and a heading: up to which step, and when that was.

    Lines that are cut short are left out. Cost: every line is read, 0.6 s for 50 MB.

    Raises:
        CaptureError: there is no such file, or no line of timings in it.
    """
    runs: dict[str, dict[str, int]] = {}
    last = None
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    said = json.loads(line)
                    for name, entry in said["ranges"].items():
                        runs.setdefault(name, {}).update(entry["run"])
                    last = said
    except OSError as error:
        raise CaptureError(f"The timings {path} cannot be read: {error.strerror or error}.") from error
    if last is None:
        raise CaptureError(f"{path} holds no timings: give the timings_rank0.jsonl that a run has written.")
    upto = "no step ended" if last["step"] is None else f"up to step {last['step']}"
    return summary_table(runs), f"{path.stem}: {upto}, written {last['time']}\n{path}"
