"""`diff`: the change of the step as a sum of parts, the tables, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import real_traces
from builders import (
    Event,
    allocation,
    annotation,
    capture,
    kernel,
    launched,
    span,
    step,
    synchronous_steps,
    write_capture,
    write_rank,
)
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds

from compare.painter import Program
from instrument import Capture, diff
from instrument.base.errors import CaptureError
from instrument.read.compare import side
from instrument.read.compare.changes import divided
from instrument.read.compare.diff import Difference
from instrument.read.compare.text import parts as text_parts
from instrument.read.ranks.run import Run

V100, A100 = {"id": 0, "name": "Tesla V100"}, {"id": 0, "name": "NVIDIA A100"}


def training(
    read_us: int, names: tuple[str, str] = ("read", "forward"), steps: int = 4
) -> list[Event]:
    """Steps of 100 µs and the time of reading; the first one is ten times as long."""
    events, at = [], 0
    for number in range(steps):
        lasts = (100 + read_us) * (10 if number == 0 else 1)
        events += [
            step(number, at, lasts),
            annotation(names[0], at, read_us),
            span("aten::empty", at, read_us),
            annotation(names[1], at + read_us, 80),
            span("aten::mm", at + read_us + 10, 30),
            span("aten::add", at + read_us + 45, 30),
        ]
        at += lasts
    return events


def saved(folder: Path, name: str, events: list[Event], **document: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**document, "traceEvents": events}))
    return path


def is_exact(found: Difference) -> bool:
    """Whether all parts sum to their wholes, and the ranges to the step."""
    for whole in found.wholes:
        for name in ("before_ns", "after_ns", "change_ns"):
            assert sum(whole.parts.column(name)) == getattr(whole, name)
    for name in ("before", "after"):
        of_ranges = sum(ns or 0 for ns in found.ranges.column(f"{name}_step_ns"))
        assert of_ranges == getattr(found.step, f"{name}_ns")
    return True


def parts(found: Difference) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.range, row.kind): (row.before_ns, row.after_ns) for row in found.step.parts}


def row_of(table: Any, **equal: Any) -> Any:
    (row,) = table.where(**equal)
    return row


def test_the_change_of_a_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    found = diff(saved(tmp_path, "a", training(40)), saved(tmp_path, "b", training(15)))
    assert (found.before, found.after, found.what) == (("a",), ("b",), "step")
    got = (found.step.before_ns, found.step.after_ns, found.step.change_ns)
    assert got == (140_000, 115_000, -25_000)
    assert parts(found) == {
        ("read", "CPU operators"): (40_000, 15_000),
        ("forward", "CPU operators"): (60_000, 60_000),
        ("forward", "Python"): (20_000, 20_000),
        ("(no range)", "idle"): (20_000, 20_000),
    }
    assert found.step.parts[0].range == "read"  # the largest change comes first
    assert is_exact(found)
    assert repr(found) == "<Difference: mean step 140.0 µs → 115.0 µs>"


def test_a_capture_compared_with_itself_does_not_change(tmp_path: Path) -> None:
    path = saved(tmp_path, "a", training(40))
    found = diff(Capture.load(path), path)
    assert found.step.change_ns == 0
    assert not any(found.step.parts.column("change_ns"))
    assert {*found.operators.column("status"), *found.ranges.column("status")} == {"same"}
    assert found.unlike == ()


def test_the_mean_of_steps_is_divided_without_a_rest() -> None:
    assert divided([10, 10, 10], 4, 7) == [3, 2, 2]
    assert divided([7, 9], 4, 4) == [2, 2]
    assert divided([], 3, 0) == []


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40), st.integers(1, 1000))
def test_quotients_sum_to_the_whole_and_are_rounded_by_less_than_one(values, divisor) -> None:
    found = divided(values, divisor, sum(values) // divisor)
    assert sum(found) == sum(values) // divisor
    assert all(abs(each - value / divisor) < 1 for each, value in zip(found, values))


def test_steps_of_different_length_and_number_are_compared_by_their_mean(tmp_path: Path) -> None:
    def steps(lengths: list[int]) -> list[Event]:
        starts = itertools.accumulate([0, *lengths])
        return [
            event
            for number, (start, lasts) in enumerate(zip(starts, lengths))
            for event in (step(number, start, lasts), span("aten::mm", start, lasts - 1))
        ]

    before = saved(tmp_path, "a", steps([90, 10, 11, 12]))
    after = saved(tmp_path, "b", steps([90, 20, 21]))
    found = diff(before, after)
    assert (found.step.before_ns, found.step.after_ns) == (11_000, 20_500)
    assert found.step.before.median_ns == 11_000
    assert found.step.before.deviation_ns == 1_000
    assert found.step.after.deviation_ns is None  # two steps show no spread
    assert [each.sentence for each in found.unlike] == [
        "The number of steps differs: 3 before, 2 after; times are means per step."
    ]
    assert is_exact(found)


def test_the_tables_say_what_was_added_removed_and_changed(tmp_path: Path) -> None:
    def one(*more: Event) -> list[Event]:
        return [
            step(1, 0, 100),
            annotation("forward", 0, 90),
            *launched("gemm", 2, 10, 20, 1),
            *more,
        ]

    before = [
        *one(span("aten::relu", 40, 5), span("aten::mm", 50, 10, Input_Dims=[[8, 3], [3, 4]])),
        *launched("old", 70, 76, 4, 2),
    ]
    after = [
        *one(span("aten::gelu", 40, 7), span("aten::mm", 50, 10, Input_Dims=[[8, 3], [3, 4]])),
        span("aten::mm", 60, 5, Input_Dims=[[8, 3], [3, 4]]),
        allocation(62, 512),
    ]
    found = diff(capture(tmp_path, before), capture(tmp_path / "after", after))
    operators = {row.name: row for row in found.operators}
    assert {name: row.status for name, row in operators.items()} == {
        "aten::relu": "removed",
        "aten::gelu": "added",
        "aten::mm": "changed",
        "cudaLaunchKernel": "changed",
    }
    relu, product = operators["aten::relu"], operators["aten::mm"]
    assert (relu.before_calls, relu.after_calls, relu.change_calls) == (1, 0, -1)
    assert (relu.before_self_cpu_ns, relu.after_self_cpu_ns) == (5_000, 0)
    assert (product.before_calls, product.after_calls) == (1, 2)
    assert (product.before_flops, product.after_flops) == (192, 384)
    # The memory of the side without memory events is unknown, not 0.
    assert (product.before_self_cpu_bytes, product.change_self_cpu_bytes) == (None, None)
    gelu = operators["aten::gelu"]
    assert (gelu.before_calls, gelu.before_self_cpu_bytes) == (0, None)
    kernels = {row.name: (row.kind, row.status, row.change_device_ns) for row in found.kernels}
    assert kernels == {"gemm": ("kernel", "same", 0), "old": ("kernel", "removed", -4_000)}
    shapes = row_of(found.shapes, name="aten::mm")
    assert (shapes.input_shapes, shapes.status) == ("[[8, 3], [3, 4]]", "changed")
    forward = row_of(found.ranges, range="forward")
    got = (forward.status, forward.before_self_device_ns, forward.after_self_device_ns)
    assert got == ("same", 24_000, 20_000)
    counters = {
        (row.range, row.counter): (row.before, row.after, row.change) for row in found.counters
    }
    assert counters[None, "launches"] == (2, 1, -1)
    assert counters["forward", "kernels"] == (2, 1, -1)
    assert counters[None, "allocations"] == (None, 1, None)
    assert ("forward", "copies") not in counters
    assert text_parts(found, rows=1, by="operator")[-1] == [
        "Not shown, with another number of calls: cudaLaunchKernel 2 → 1, aten::relu 1 →",
        "  0, aten::mm 1 → 2.",
    ]


def test_a_renamed_range_is_removed_and_added(tmp_path: Path) -> None:
    before = saved(tmp_path, "a", training(40, ("read", "forward")))
    after = saved(tmp_path, "b", training(30, ("load", "forward")))
    found = diff(before, after)
    rows = {row.range: row.status for row in found.ranges}
    assert rows == {"read": "removed", "load": "added", "forward": "same", "(no range)": "same"}
    assert is_exact(found)


def test_only_work_of_the_compared_steps_counts(tmp_path: Path) -> None:
    events = []
    for number in range(4):
        start = 1000 * number
        events += [step(number, start, 900), annotation("model", start, 800)]
        events += launched("gemm", start, start + 10, 500 if number == 0 else 100, number + 1)
    path = saved(tmp_path, "a", events)
    found = diff(path, path)
    model, gemm = row_of(found.ranges, range="model"), row_of(found.kernels, name="gemm")
    assert (model.before_calls, model.before_self_device_ns) == (1, 100_000)
    assert (gemm.before_calls, gemm.before_device_ns) == (1, 100_000)


def test_a_loader_with_other_workers_is_the_same_loader(tmp_path: Path) -> None:
    def one(iterator: str, lasts: int) -> list[Event]:
        name = f"enumerate(DataLoader)#{iterator}.__next__"
        return [step(1, 0, 100), annotation(name, 0, lasts), span("aten::mm", 60, 10)]

    found = diff(
        saved(tmp_path, "a", one("_SingleProcessDataLoaderIter", 50)),
        saved(tmp_path, "b", one("_MultiProcessingDataLoaderIter", 10)),
    )
    assert parts(found)["enumerate(DataLoader)", "waiting for data"] == (50_000, 10_000)


def test_the_windows_and_ranks_of_runs_are_compared(tmp_path: Path) -> None:
    for name, own_us in (("before", (300, 300)), ("after", (300, 500))):
        for rank, work_us in enumerate(own_us):
            write_rank(tmp_path / name, rank, synchronous_steps(work_us), world_size=2)
    found = diff(Run.load(tmp_path / "before"), tmp_path / "after")
    assert [whole.rank for whole in found.wholes] == [None, 0, 1]
    everyone, first, second = found.wholes
    # Each rank has one step that counts; the parts of all are the mean of both.
    assert everyone.before.count == 2
    assert {row.change_ns for row in first.parts} == {0}
    assert {(row.range, row.kind): row.change_ns for row in second.parts} == {
        ("forward", "CPU operators"): 200_000,
        ("(no range)", "exposed communication"): -200_000,
        ("(no range)", "idle"): 0,
    }
    assert row_of(everyone.parts, range="forward").change_ns == 100_000
    assert is_exact(found)


def test_the_windows_of_a_rank_are_taken_together(tmp_path: Path) -> None:
    def window(name: str, first: int, read_us: int, breaks: int, size: int) -> None:
        events = [
            *training(read_us),
            allocation(1700, size, 64, size),
            allocation(1701, -size, 64, 0),
        ]
        about = {"first_step": first, "last_step": first + 2, "steps": 3}
        dynamo = {"dynamo": {"graph_breaks": {"print": breaks}, "recompilations": 0}}
        write_capture(tmp_path / "run", events, name, window=about, environment=dynamo)

    window("early", 10, 40, 1, 512)
    window("late", 20, 60, 2, 2048)
    found = diff(tmp_path / "run", tmp_path / "run" / "late")
    assert (found.before, found.after) == (("early", "late"), ("late",))
    assert (found.step.before.count, found.step.after.count) == (6, 3)
    assert parts(found)["read", "CPU operators"] == (50_000, 60_000)
    counters = {row.counter: (row.before, row.after) for row in found.counters if row.range is None}
    assert counters["graph_breaks"] == (3, 2)
    assert counters["peak_bytes"] == (2048, 2048)
    assert counters["operators"] == (3, 3)
    assert counters["allocations"] == (1 / 3, 1 / 3)
    read = row_of(found.ranges, range="read")
    got = (read.before_calls, read.before_self_cpu_ns, read.after_self_cpu_ns)
    assert got == (1, 50_000, 60_000)


def test_a_window_of_a_run_is_compared_with_its_name(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, synchronous_steps(300), world_size=2)
    (window,) = Run.load(tmp_path).windows
    assert diff(window, window).step.change_ns == 0


def test_only_the_phase_that_both_sides_have_is_compared(tmp_path: Path) -> None:
    window = {"first_step": 1, "last_step": 3, "steps": 3}
    write_capture(tmp_path / "a", training(40), "train", window=window)
    write_capture(tmp_path / "a", training(90), "val", window={**window, "phase": "validation"})
    after = write_capture(tmp_path / "b", training(40), window=window)
    found = diff(tmp_path / "a", after)
    assert found.step.change_ns == 0
    assert [each.sentence for each in found.unlike] == [
        "Only the phase train is compared; left out: validation."
    ]
    with pytest.raises(CaptureError, match="the phase is validation before and train after"):
        diff(tmp_path / "a" / "val", after)


def test_a_capture_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    write_capture(tmp_path / "a", training(40))
    broken = write_capture(tmp_path / "a", training(40), "broken")
    assert broken.folder
    (broken.folder / "trace.json.gz").unlink()
    found = diff(tmp_path / "a", saved(tmp_path, "b", training(40)))
    assert any(each.sentence.startswith("Left out: The capture") for each in found.unlike)
    with pytest.raises(CaptureError, match="holds no trace"):
        diff(broken.folder, tmp_path / "b.json")


def test_nothing_at_a_path_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = saved(tmp_path, "a", training(40))
    with pytest.raises(CaptureError, match=r"There is no capture at .*missing"):
        diff(path, tmp_path / "missing")


def loaders(**settings: Any) -> dict[str, Any]:
    return {"environment": {"loaders": [settings]}}


def threads(count: int) -> dict[str, Any]:
    return {"environment": {"threads": {"intra_op": count}}}


UNLIKE = [
    ({"devices": ["V100"]}, {"devices": ["A100"]}),
    ({"world_size": 1}, {"world_size": 8}),
    (loaders(batch_size=32), loaders(batch_size=64)),
    ({"host": "one"}, {"host": "two"}),
    ({"rank": 0}, {"rank": 3}),
    ({"versions": {"torch": "2.12"}}, {"versions": {"torch": "2.13"}}),
    (threads(4), threads(8)),
    (loaders(workers=0), loaders(workers=4)),
]


def test_what_differs_is_said_and_what_would_mislead_is_refused(tmp_path, golden) -> None:
    lines = []
    for number, facts in enumerate(UNLIKE):
        was, now = (
            write_capture(tmp_path / f"{number}{side}", training(read_us), **each)
            for side, read_us, each in zip("ab", (40, 15), facts)
        )
        found = diff(was, now, force=True)
        assert found.step.change_ns == -25_000
        ((sentence, misleads),) = found.unlike
        lines.append(f"{'refused' if misleads else 'said'}: {sentence}")
        if misleads:
            refused = f"are too unlike to be compared: {sentence} Use instrument diff --force"
            with pytest.raises(CaptureError, match=re.escape(refused)):
                diff(was, now)
        else:
            assert diff(was, now).unlike == found.unlike
    golden("diff_unlike.txt", "\n".join(lines))


def test_a_device_and_steps_on_one_side_only_are_refused(tmp_path: Path) -> None:
    cpu = saved(tmp_path, "cpu", training(40))
    device = saved(tmp_path, "device", [*training(40), *launched("gemm", 1500, 1510, 10, 1)])
    with pytest.raises(CaptureError, match="AFTER holds work of a device, BEFORE holds none"):
        diff(cpu, device)
    bare = saved(tmp_path, "bare", [e for e in training(40) if "ProfilerStep" not in e["name"]])
    with pytest.raises(CaptureError, match="BEFORE holds finished steps; AFTER holds none"):
        diff(cpu, bare)


def test_other_programs_and_other_inputs_are_refused(tmp_path: Path) -> None:
    def one(name: str, batch: int, around: str = "forward") -> list[Event]:
        return [
            step(1, 0, 100),
            annotation(around, 0, 90),
            *(span(name, 2 * k, 1, Input_Dims=[[batch, k]]) for k in range(40)),
        ]

    first = saved(tmp_path, "a", one("aten::mm", 8))
    with pytest.raises(CaptureError, match="both sides call, 0 % of the calls have the same"):
        diff(first, saved(tmp_path, "b", one("aten::mm", 16)))
    with pytest.raises(CaptureError, match="The programs differ: 0 % of the operators' calls"):
        diff(first, saved(tmp_path, "c", one("aten::conv2d", 8, "other")))
    # A compiled program has other operators in the same ranges.
    compiled = diff(first, saved(tmp_path, "d", one("triton_mm", 8)))
    assert [each.misleads for each in compiled.unlike] == [False]


def test_recordings_of_different_detail_are_said(tmp_path: Path) -> None:
    plain = training(40)
    detailed = [*plain, allocation(1500, 8), span("aten::mul", 1410, 1, Input_Dims=[[2]])]
    found = diff(saved(tmp_path, "a", plain), saved(tmp_path, "b", detailed))
    assert [each.sentence for each in found.unlike] == [
        "Only AFTER was recorded with input shapes and memory; this recording makes its steps "
        "longer."
    ]


def test_kernels_that_are_all_slower_tell_of_another_clock_rate(tmp_path: Path) -> None:
    def one(factor: float) -> list[Event]:
        events = [step(1, 0, 1000)]
        for k in range(12):
            events += launched(f"kernel {k}", 60 * k, 60 * k + 6, (10 + k) * factor, k + 1)
        return events

    slower = diff(saved(tmp_path, "a", one(1)), saved(tmp_path, "b", one(1.2)))
    assert [each.sentence for each in slower.unlike] == [
        "The kernels that run equally often on both sides take 20 % longer after the change: the "
        "clock rate of the device may differ.",
        "The clock's resolution differs: 1 µs before, 1 ns after.",
    ]
    assert diff(tmp_path / "a.json", saved(tmp_path, "c", one(1))).unlike == ()


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    names = ("\x1b[2J", "a/b"), ("(no launch)", "")
    found = [saved(tmp_path, str(k), training(40, pair)) for k, pair in enumerate(names)]
    assert is_exact(diff(*found))


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace is read once for all pairs."""
    monkeypatch.setattr("instrument.read.compare.diff.load", _loaded)


_loaded = cache(side.load)


@pytest.mark.usefixtures("sides")
@real_traces.needs_traces
@pytest.mark.parametrize("after", real_traces.each())
@pytest.mark.parametrize("before", real_traces.each())
def test_the_parts_of_all_real_pairs_sum_exactly(before: str, after: str) -> None:
    found = diff(real_traces.path(before), real_traces.path(after), force=True)
    assert is_exact(found)
    if before == after:
        assert not any(found.step.parts.column("change_ns"))
        assert {*found.kernels.column("status"), *found.operators.column("status")} <= {"same"}


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_the_parts_of_mutated_traces_sum_exactly(seed: int, tmp_path: Path) -> None:
    """Events that are missing, moved, stretched, renamed and doubled, so that they nest no more."""
    random = Random(seed)
    events = Program(random, length=120).make().events
    mutated = []
    for event in events:
        if random.random() < 0.1:
            continue
        if random.random() < 0.2:
            event = {**event, "ts": event["ts"] + random.randint(-30, 30)}
        if random.random() < 0.2:
            event = {**event, "dur": random.choice((0, 0.001, event["dur"] * 3))}
        if random.random() < 0.1:
            event = {**event, "name": random.choice(["", "(no range)", "ProfilerStep#1", "x/y"])}
        mutated += [event] * random.choice((1, 1, 1, 2))
    before, after = saved(tmp_path, "a", events), saved(tmp_path, "b", mutated)
    assert is_exact(diff(before, after, force=True))
    assert is_exact(diff(after, before, force=True))


@real_traces.needs_traces
@pytest.mark.nightly  # reads 150,000 events
def test_with_workers_the_resnet_no_longer_waits_for_its_loader() -> None:
    """TensorBoard's plugin gives 59.3 ms for the loader of a step without workers, and 1.2 ms with four."""
    found = diff(*(real_traces.path(f"v100_resnet50_workers{n}") for n in (0, 4)))
    first = found.step.parts[0]
    assert (first.range, first.kind) == ("enumerate(DataLoader)", "waiting for data")
    assert first.change_ns == pytest.approx(-58e6, rel=0.05)
    assert first.change_ns < found.step.change_ns < 0


@pytest.mark.usefixtures("sides")
@real_traces.needs_traces
@pytest.mark.parametrize(
    ("other", "late"),
    real_traces.each(
        (f"a100_megatron_tp8_rank{other}", f"a100_megatron_tp8_rank{late}")
        for other in (1, 3, 4, 5, 7)
        for late in (0, 6)
    ),
)
def test_a_rank_that_is_late_has_cpu_work_where_others_wait_in_collectives(other, late) -> None:
    """Ranks 0 and 6 leave their device idle for a third of the step (HTA says 37 and 34 %), and the others wait."""
    found = diff(real_traces.path(other), real_traces.path(late))
    less, more = (row for row in found.step.parts.head(2))
    assert (less.range, less.kind) == ("nccl:all_reduce", "exposed communication")
    got = (more.kind, more.change_ns > 100e6, less.change_ns < -150e6)
    assert got == ("CPU operators", True, True)


def test_work_without_a_launch_has_a_part_of_its_own(tmp_path: Path) -> None:
    events = [step(1, 0, 100), span("aten::mm", 0, 10), kernel("early", 20, 30)]
    path = saved(tmp_path, "a", events)
    assert parts(diff(path, path))["(no launch)", "compute"] == (30_000, 30_000)


def test_three_captures_on_each_side_give_intervals(tmp_path: Path) -> None:
    before = [saved(tmp_path, f"a{us}", training(us)) for us in (40, 42, 44)]
    after = [saved(tmp_path, f"b{us}", training(us)) for us in (15, 16, 20)]
    found = diff(before, after)
    assert found.given == (f"{before[0]} and 2 more", f"{after[0]} and 2 more")
    assert (found.step.change_ns, found.step.samples) == (-25_000, (3, 3))
    # All nine differences of a capture after and one before lie in an interval of 90 %.
    assert (found.step.low_ns, found.step.high_ns) == (-29_000, -20_000)
    read = row_of(found.step.parts, range="read")
    assert (read.change_ns, read.low_ns, read.high_ns) == (-25_000, -29_000, -20_000)
    forward = row_of(found.ranges, range="forward")
    assert (forward.low_step_ns, forward.high_step_ns) == (0, 0)
    product = row_of(found.operators, name="aten::mm")
    assert (product.low_self_cpu_ns, product.low_self_device_ns) == (0, None)
    assert is_exact(found)
    interval = "From 3 captures before and 3 after, the change is from −29.0 µs to −20.0 µs"
    assert interval in " ".join(str(found).split())
    assert "| 90 % interval |" in found._repr_markdown_()
    fewer = diff(before[:2], after[:2])
    assert (fewer.step.low_ns, fewer.step.high_ns) == (None, None)
    assert "An interval needs three captures on each side." in " ".join(str(fewer).split())


def test_a_range_of_some_captures_takes_no_time_in_the_others(tmp_path: Path) -> None:
    before = [saved(tmp_path, f"a{k}", training(40)) for k in range(3)]
    names = ("read", "forward"), ("load", "forward"), ("load", "forward")
    after = [saved(tmp_path, f"b{k}", training(40, pair)) for k, pair in enumerate(names)]
    read = row_of(diff(before, after).ranges, range="read")
    assert (read.low_step_ns, read.high_step_ns) == (-40_000, 0)


def test_kernels_match_by_name_then_by_label_then_without_their_tile(tmp_path: Path) -> None:
    def one(*names: str) -> list[Event]:
        events = [step(1, 0, 1000)]
        for k, name in enumerate(names):
            events += launched(name, 10 + 50 * k, 20 + 50 * k, 10, k + 1)
        return events

    add = "void at::native::vectorized_elementwise_kernel<{}, at::native::AddFunctor<float>>(int)"
    before = ("volta_sgemm_64x64_nt", add.format(4), add.format(2), "same", "old")
    after = ("volta_sgemm_128x32_nt", add.format(8), "same", "new")
    found = diff(saved(tmp_path, "a", one(*before)), saved(tmp_path, "b", one(*after)))
    rows = {row.name: (row.status, row.before_calls, row.after_calls) for row in found.kernels}
    assert rows == {
        "gemm nt f32": ("same", 1, 1),
        "add<f32>": ("changed", 2, 1),
        "same": ("same", 1, 1),
        "old": ("removed", 1, 0),
        "new": ("added", 0, 1),
    }
    added = row_of(found.kernels, name="add<f32>")
    got = (added.before_full_name, added.after_full_name)
    assert got == (f"{add.format(2)} + {add.format(4)}", add.format(8))
    assert row_of(found.kernels, name="new").before_full_name is None
    assert any("add<f32> (by label)" in line for line in str(found).splitlines())
