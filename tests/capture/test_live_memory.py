"""What lives in memory over time: by hand, against torch's own timeline, and on real traces."""

from __future__ import annotations

import json
import warnings
from functools import partial

import numpy as np
import pytest
import real_traces
import torch
from builders import allocation, annotation, capture, frame, span, step
from golden import Golden, rows_as_lines
from real_traces import needs_traces
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from instrument.base.errors import CaptureError, ConfigError
from instrument.read.capture import Capture
from instrument.read.views.memory_timeline import BEFORE, OTHERS, UNKNOWN, extremes


def test_a_plot_has_the_lowest_and_the_highest_point_of_each_span_of_time() -> None:
    level = np.array([4, 1, 2, 9, 3, 0, 5, 6, 8, 7])
    chosen = [0, 1, 3, 5, 8, 9]  # the ends, and the extremes of five points each
    assert extremes(level, 100 + np.arange(10), 2).tolist() == chosen


on_cuda = partial(allocation, device=0, reserved=1000)

# 500 bytes live before the window. The peak is 790 at 32 µs: with 100 of linear, 140 of relu, 50 outside of operators.
EVENTS = [
    step(3, 0, 50),
    annotation("forward", 5, 30),
    annotation("layer", 8, 14),
    frame("nn.Module: Net_0", 5, 30),
    frame("forward.py(3): forward", 6, 28),
    frame("nn.Module: Linear_1", 8, 14),
    span("aten::linear", 10, 10),
    span("aten::empty", 11, 2),
    span("aten::relu.out", 24, 4),
    span("aten::relu", 29, 4),
    step(4, 50, 50),
    span("aten::add", 60, 5),
    on_cuda(12, 100, 1, 600),
    on_cuda(15, 150, 2, 750),
    on_cuda(18, -150, 2, 600),  # the address is used again
    on_cuda(26, 40, 2, 640),
    on_cuda(30, 50, 4, 690, tid=2),
    on_cuda(32, 100, 5, 790),
    on_cuda(40, -300, 9, 490),  # of before the window
    on_cuda(41, -100, 5, 390),
    on_cuda(62, 100, 3, 490),
    on_cuda(63, -40, 2, 450),
    allocation(13, 8, 1, 8),  # the same address on another device
    allocation(45, -8, 1, 0),
]


def test_the_tables_and_the_curve(tmp_path, golden: Golden) -> None:
    """Checked by hand. A free has the names of what it frees; the curve stands on the 500 bytes of before the window."""
    found = capture(tmp_path, EVENTS)
    live, memory = found.memory_live, found.memory
    assert memory.kinds == ("operator", "range", "module")
    for row in found.memory_devices:
        assert row.net_bytes == row.allocated_bytes - row.freed_bytes
        assert row.net_bytes == sum(found.memory_steps.where(device=row.device).column("net_bytes"))
        parts = live(device=row.device).column("bytes")
        assert sum(parts) == row.peak_bytes
    tables = rows_as_lines(
        {
            "devices": found.memory_devices,
            "steps": found.memory_steps,
            "events": found.memory_events,
            **{f"live at the peak, by {by}": live(by) for by in memory.kinds},
            **{
                f"live at {ns} ns": live(at_ns=ns) for ns in (1_000, 16_000, 17_999, 18_000, 99_000)
            },
            "live on the CPU": live(device="cpu"),
        }
    )
    curve = memory.curve("operator")
    assert (curve.device, curve.by) == ("cuda:0", "operator")
    shown = {"time_ns": curve.time_ns, "reserved_bytes": curve.reserved_bytes, **curve.series}
    golden("memory.txt", "\n".join([tables, *(f"curve, {k}: {v}" for k, v in shown.items())]))
    one = memory.curve("operator", most=1).series
    assert list(one) == [BEFORE, "aten::relu", OTHERS]
    assert [*map(sum, zip(*one.values()))] == [*map(sum, zip(*curve.series.values()))]


def test_points_of_time_are_shown_since_the_first_event(tmp_path) -> None:
    up_for_50_days = [each | {"ts": each["ts"] + 4_359_044_661_000} for each in EVENTS]
    found = capture(tmp_path, up_for_50_days)
    got = [row.peak_ns for row in found.memory_devices]
    assert got == [4_359_044_661_032_000, 4_359_044_661_013_000]
    text = repr(found.memory_devices).splitlines()
    assert text[0].endswith("  peak at")
    assert ("32.00 µs" in text[2], "13.00 µs" in text[3]) == (True, True)
    assert ">32.00 µs</td>" in found.memory_devices._repr_html_()
    assert "30.00 µs" in repr(found.memory_live().where(name="[no operator]"))
    steps = found.steps.sort("number").select(["number", "start_ns"])
    assert str(steps).splitlines()[2:] == ["     4  50.00 µs", "     3      0 ns"]
    assert steps.head(1)[0].start_ns == 4_359_044_661_050_000


def test_a_free_that_the_file_lists_first_frees_what_was_allocated_before_it(tmp_path) -> None:
    found = capture(tmp_path, [on_cuda(20, -10, 1), on_cuda(10, 10, 1)])
    assert len(found.memory_live(at_ns=15_000)) == 1
    assert len(found.memory_live(at_ns=25_000)) == 0


def test_a_device_type_without_a_name_is_a_number(tmp_path) -> None:
    event = on_cuda(1, 1, 1, 1)
    events = [{**event, "args": event["args"] | {"Device Type": kind}} for kind in (20, 21, -1)]
    rows = capture(tmp_path, events).memory_devices
    found = {row.device: row.allocations for row in rows}
    assert found == {"privateuse1:0": 1, "device 21:0": 1, "device -1:0": 1}


def test_the_cpus_libraries_allocate_memory_of_the_cpu(tmp_path) -> None:
    """torch's numbers: CPU 0, MKLDNN 2, IDEEP 5; 1 is CUDA."""
    events = [span("aten::add", 0, 10)]
    for kind in (0, 1, 2, 5):
        event = allocation(2, 1 << kind)
        events.append({**event, "args": event["args"] | {"Device Type": kind}})
    (row,) = capture(tmp_path, events).operators
    assert (row.cpu_bytes, row.device_bytes) == (1 + 4 + 32, 2)


@pytest.mark.parametrize("uptime_us", [0, 4_359_044_661_000])
def test_a_thinned_curve_keeps_the_highest_the_lowest_and_the_last(tmp_path, uptime_us) -> None:
    up_and_down = [(1000 * k // 64, size) for k in range(64) for size in (k + 1, -k - 1)]
    up_and_down.append((990, 7))
    events = [
        on_cuda(uptime_us + us + (size < 0) * 0.5, size, k)
        for k, (us, size) in zip((n // 2 + 1 for n in range(129)), up_and_down)
    ]
    curve = capture(tmp_path, events).memory.curve(points=4)
    level = [sum(values) for values in zip(*curve.series.values())]
    assert len(level) <= 2 * 4 + 3
    assert {16, 32, 48, 64, 0} <= set(level), "the highest of each quarter, and the lowest"
    assert level[-1] == 7
    assert curve.time_ns == sorted(curve.time_ns)


def test_the_telling_kind_tells_the_most_of_the_peak(tmp_path) -> None:
    memory = capture(tmp_path, EVENTS).memory
    assert memory.most_telling() == "module", "all three tell 240 of 290"
    assert memory.most_telling(most=1) == "module"
    bare = [
        event_
        for event_ in EVENTS
        if event_.get("cat") not in ("user_annotation", "python_function")
    ]
    memory = capture(tmp_path, bare).memory
    assert (memory.kinds, memory.most_telling()) == (("operator",), "operator")
    outside = [annotation("forward", 0, 2), span("aten::mm", 5, 5), on_cuda(6, 10, 1)]
    assert capture(tmp_path, outside).memory.most_telling() == "operator", "the range tells nothing"


OLD = [  # torch 1.9: no addresses, no totals
    step(1, 0, 50),
    span("aten::mm", 5, 10),
    on_cuda(6, 100, None),
    on_cuda(8, 30, None),
    on_cuda(20, -100, None),
    on_cuda(30, -70, None),
]


def test_without_addresses_and_totals_it_is_known_how_much_and_not_what(tmp_path) -> None:
    found = capture(tmp_path, OLD)
    memory = found.memory
    row = found.memory_devices[0]
    assert (row.peak_net_bytes, row.net_bytes) == (130, -40)
    assert {row.peak_bytes, row.reserved_bytes} == {None}
    assert [tuple(row) for row in found.memory_live()] == [(None, 130, None, None)]
    assert [tuple(row) for row in found.memory_steps] == [("cuda:0", 1, None, -40, None)]
    assert [row.operator for row in found.memory_events] == ["aten::mm", "aten::mm", None, None]
    assert {row.address for row in found.memory_events} == {None}
    assert memory.curve().series == {BEFORE: [40] * 4, UNKNOWN: [100, 130, 30, -40]}


def test_what_cannot_be_told_gets_one_sentence(tmp_path) -> None:
    found = capture(tmp_path, EVENTS)
    with pytest.raises(
        CaptureError, match=r"^The trace holds no memory events of cuda:1; it has cuda:0, cpu\.$"
    ):
        found.memory_live(device="cuda:1")
    with pytest.raises(
        ConfigError,
        match=r"^Memory cannot be grouped by 'name'; choose operator, range or module\.$",
    ):
        found.memory_live("name")
    empty = capture(tmp_path, [span("aten::mm", 0, 5)])
    tables = (empty.memory_devices, empty.memory_steps, empty.memory_events)
    assert [*map(len, tables)] == [0] * 3
    with pytest.raises(
        CaptureError,
        match=r"^The trace holds no memory events; record it with profile_memory=true\.$",
    ):
        empty.memory_live()
    with pytest.raises(
        CaptureError, match=r"^The trace holds no modules; record it with with_stack=true\.$"
    ):
        capture(tmp_path, OLD).memory_live("module")


def test_a_recording_has_the_peak_and_the_end_of_torchs_own_timeline(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    ) as profiler:
        with record_function("forward"):
            loss = model(torch.randn(16, 32)).sum()
        loss.backward()
        optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler.export_memory_timeline(str(tmp_path / "theirs.json"), device="cpu")
    _, theirs = json.loads((tmp_path / "theirs.json").read_text())
    before = sum(
        p.numel() * 4 for p in model.parameters()
    )  # torch sees the parameters used, and counts them as there
    found = Capture.load(tmp_path / "trace.json")
    ours = found.memory_devices[0]
    assert ours.peak_net_bytes == max(map(sum, theirs)) - before
    assert ours.net_bytes == sum(theirs[-1]) - before
    gradients = {
        row.name: row.bytes
        for row in found.memory_live("operator", at_ns=2**62)
        if "Backward" in row.name
    }
    assert sum(gradients.values()) == before, "the gradients are as large as the parameters"


with_memory = [  # instants of memory, device peak in bytes
    ("h100_qwen_0.5b_inference", "cuda:0", 2250, 2088508416),
    ("h100_timesformer_inference", "cuda:0", 1206, 4490752000),
    ("v100_216k_events", "cuda:1", 26770, 6629508096),
    ("v100_resnet50_workers0", "cuda:0", 8220, None),
]


@needs_traces
@pytest.mark.parametrize(("name", "device", "events", "peak"), real_traces.each(with_memory))
def test_real_traces(name, device, events, peak) -> None:
    found = real_traces.load(name)
    memory = found.memory
    row = found.memory_devices[0]
    assert (row.device, row.allocations + row.frees, row.peak_bytes) == (device, events, peak)
    for line in memory.timelines.values():
        net, used = line["net_bytes"] - line["net_bytes"][0], line["allocated_bytes"]
        assert used.null_count() == len(used) or (used - used[0] == net).all()
        device_, level_ = line["device"][0], line["level_bytes"]
        for by in memory.kinds:
            assert sum(found.memory_live(by, device=device_).column("bytes")) == level_.max()
            curve = memory.curve(by, device=device_)
            level = [sum(values) for values in zip(*curve.series.values())]
            assert max(level) - min(level) == level_.max() - level_.min()
    assert sum(found.memory_events.column("size_bytes")) == sum(
        found.memory_devices.column("net_bytes")
    )
