"""The segments of steps: in each lane they sum exactly to each step."""

from __future__ import annotations

from pathlib import Path
from random import Random

import polars as pl
import pytest
import real_traces
from builders import capture, launched
from compare.painter import Program
from seeds import seeds

from instrument.read.capture import Capture
from instrument.read.facts.idle import WAITS, device_steps, device_time, lasting_steps
from instrument.read.facts.schema import names_of
from instrument.read.facts.segments import LANES, SEGMENTS, segments
from instrument.read.show.summary import summary
from instrument.read.views.views import Views


def check(views: Views) -> None:
    links, work = views.links, views.work
    for lane in LANES:
        rows = segments(views, lane)
        assert rows.columns == names_of(SEGMENTS)
        if lane == "device" and not len(views.work.event):
            assert not len(rows)
            continue
        spans = links.finished_steps
        if lane != "cpu":
            spans = (lasting_steps if lane == "step" else device_steps)(links, work)
        of_step = rows.group_by("step", maintain_order=True).agg(pl.sum("duration_ns"))
        lasts_ns = [ns for ns in (spans.end_ns - spans.start_ns).tolist() if ns]
        assert [ns for ns in of_step["duration_ns"].to_list() if ns] == lasts_ns, lane
        assert (rows["start_ns"][1:] >= rows["end_ns"][:-1]).all(), "none overlaps another"
        assert rows["kind"].null_count() == rows["path"].null_count() == 0
        counted = rows.filter("counted")["duration_ns"].sum()
        assert counted == spans.only(links.counted_steps.kept).total_ns


@pytest.mark.parametrize("seed", seeds(12, 200))
def test_random_steps(seed: int, tmp_path: Path) -> None:
    check(capture(tmp_path, Program(Random(seed), length=120).make().events))


@pytest.mark.parametrize("name", real_traces.every())
def test_real_steps(name: str) -> None:
    views = real_traces.load(name)
    check(views)
    if len(views.links.steps):
        of_steps = lasting_steps(views.links, views.work).only(views.links.counted_steps.kept)
        lasts_ns = (of_steps.end_ns - of_steps.start_ns).tolist()
        assert lasts_ns == views.whatif.counted_steps, "a step lasts as long as the simulated one"
    spent = device_time(views)
    rows = segments(views, "device").filter("counted").group_by("kind").agg(pl.sum("duration_ns"))
    by_kind = dict(rows.iter_rows())
    for cause in WAITS:
        assert by_kind.get(cause.removesuffix("_ns").replace("_", " "), 0) == spent[cause]
    both = by_kind.get("compute and communication", 0)
    assert both == spent["overlap_ns"]
    assert by_kind.get("compute", 0) + both == spent["compute_ns"]
    assert by_kind.get("exposed communication", 0) == spent["exposed_communication_ns"]
    assert by_kind.get("copy", 0) == spent["exposed_copy_ns"]


@pytest.mark.parametrize(
    ("delay_us", "lasts_us", "launch_us"), [(1000, 1305, 1005), (1001, 300, 0)]
)
def test_a_recording_begins_with_its_first_device_work_if_that_is_late(
    delay_us: int, lasts_us: int, launch_us: int, tmp_path: Path
) -> None:
    """Launches of 5 µs at 0 and 10 µs; the device runs 100 and 200 µs of work, the first after the delay."""
    begins = 5 + delay_us
    events = [*launched("first", 0, begins, 100, 1), *launched("second", 10, begins + 100, 200, 2)]
    views = capture(tmp_path, events)
    check(views)
    assert views.whatif.counted_steps == summary(views).steps_ns == [lasts_us * 1000]
    assert summary(views).kinds["compute"] == 300_000
    assert summary(views).kinds["launch"] == launch_us * 1000
    assert views.whatif.scale(kernel="second", by=0.5).saving_ns == 100_000
    assert sum(row.total_ns for row in views.whatif.critical_path) == lasts_us * 1000
    assert views.whatif.unexplained == pytest.approx(launch_us / lasts_us, abs=0.03)


def test_a_capture_without_events_has_one_empty_recording(tmp_path: Path) -> None:
    views: Capture = capture(tmp_path, [])
    assert all(len(segments(views, lane)) == 0 for lane in LANES)
