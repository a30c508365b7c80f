"""The record of a run that has only a timings file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instrument.compare.run_record import read_run
from instrument.errors import CaptureError
from instrument.range_names import STEP


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    """A timings file; each line holds the entries of an interval."""
    ranges = [{name: {"since": entry, "run": {}} for name, entry in each.items()} for each in lines]
    texts = [
        json.dumps({"format": 1, "step": step, "time": "", "ranges": each})
        for step, each in enumerate(ranges)
    ]
    (folder / "timings_rank0.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def test_a_line_that_holds_only_device_times_of_a_range_counts_as_no_call(tmp_path: Path) -> None:
    whole = {STEP: {"calls": 1, "mean_ns": 10_000}}
    called = {"mlp": {"calls": 2, "mean_ns": 3_000}}
    late = {"mlp": {"device_calls": 1, "device_mean_ns": 5}}
    found = read_run(written(tmp_path, whole, whole | called, whole | late, whole | called))
    assert (found.steps, found.step_ns) == (3, 10_000)
    assert found.ranges_ns == {"mlp": 6_000}


@pytest.mark.parametrize("entries", [{}, {STEP: {"calls": 0}}, {"mlp": {"calls": 1, "mean_ns": 5}}])
def test_a_timings_file_without_steps_is_refused(tmp_path: Path, entries: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match="no window with two steps and no timings file"):
        read_run(written(tmp_path, entries, entries, entries))
