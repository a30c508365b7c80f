"""What holds for any trace: for those in the repository, and for real ones in the folder that INSTRUMENT_TRACES names."""

from __future__ import annotations

import numpy as np
import pytest
import real_traces
from capture.plain_loops import top_level_ns
from real_traces import load

from instrument.read.views.operators import UNLAUNCHED_ROW


@pytest.mark.parametrize("name", real_traces.every())
def test_the_parts_of_the_host_are_the_whole_to_the_nanosecond(name: str) -> None:
    capture = load(name)
    parts = capture.ranges_attribution
    assert sum(parts.column("cpu_ns")) == top_level_ns(capture.events) > 0
    if None not in parts.column("device_ns"):
        launched = capture.operators.where(f"name != '{UNLAUNCHED_ROW}'")
        assert sum(parts.column("device_ns")) == sum(launched.column("self_device_ns"))


@pytest.mark.parametrize("name", real_traces.every())
def test_nothing_is_faster_than_its_device(name: str) -> None:
    capture = load(name)
    for row in capture.efficiency:
        assert (row.bound_share or 0) < 1, row
        assert (row.peak_share or 0) < 1, row
        assert row.device_ns is None or row.device_ns >= 0
    for row in capture.efficiency_steps:
        assert (row.mfu or 0) < 1
        assert (row.flops_covered or 0) <= 1
    counted = sum(row.device_ns or 0 for row in capture.efficiency)
    assert counted <= sum(row.device_ns for row in capture.kernels) + sum(
        row.device_ns for row in capture.copies
    )


@pytest.mark.parametrize("name", real_traces.every())
def test_the_replay_with_residues_repeats_the_recording(name: str) -> None:
    model = load(name).whatif.model
    times = model.program.run(model.weights(model.measured))
    assert np.array_equal(times, model.moments.time_ns)
    assert model.program.kept.all()


@pytest.mark.parametrize("name", real_traces.every())
def test_the_critical_path_of_each_lasts_from_the_first_step_to_the_last(name: str) -> None:
    model = load(name).whatif.model
    ends = model.ends_ns(model.moments.time_ns)
    begin = ends[0] if len(ends) > 1 else model.moments.time_ns[model.moments.step_start[0]]
    found = load(name).whatif.critical_path
    assert sum(row.total_ns for row in found) == ends[-1] - begin


@pytest.mark.parametrize("name", real_traces.every())
def test_a_faster_part_never_costs_and_no_bound_excludes_the_saving(name: str) -> None:
    whatif = load(name).whatif
    model = whatif.model
    edits = [whatif.scale(operator="*", by=0.5)]
    if len(whatif.model.work.event):
        edits.append(whatif.scale(kernel="*", by=0.5))
    for found in edits:
        times = [
            model.program.run(model.weights(scenario.variants[0].costs))
            for scenario in (found, whatif)
        ]
        after, before = map(model.ends_ns, times)
        assert (after <= before).all()
        assert found.low_ns <= found.saving_ns <= found.high_ns
