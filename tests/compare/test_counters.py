"""Counters of a step: on traces written by hand, and on real ones against a second way to count."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import real_traces
from builders import (
    Event,
    allocation,
    annotation,
    call,
    capture,
    copy,
    kernel,
    launched,
    made,
    node,
    span,
    step,
    write_capture,
)

from instrument.read.capture import Capture
from instrument.read.compare.counters import COUNTERS, Count, counters


def steps_of(build: Any, numbers: int = 3) -> list[Event]:
    """Steps of 1000 µs, each with the events that `build(start_us, number)` gives."""
    events = []
    for number in range(numbers):
        start = 1000 * number
        events += [step(number, start, 1000), *build(start, number)]
    return events


def per_step(found: Capture, *names: str, path: str | None = None) -> list[int | None]:
    counted = counters(found)
    return [count and count.per_step for count in (counted.count(name, path) for name in names)]


def cpu_step(start: float, number: int) -> list[Event]:
    """Two operators, one of which calls another, an `.item()`, and a read of the optimizer's."""
    return [
        annotation("model", start + 10, 400),
        span("aten::linear", start + 20, 100, Input_Dims=[[8, 3], [4, 3], [4]]),
        span("aten::addmm", start + 30, 50, Input_Dims=[[4], [8, 3], [3, 4]]),
        annotation("loss", start + 200, 100),
        span("aten::item", start + 210, 20),
        span("aten::_local_scalar_dense", start + 212, 10),
        annotation("Optimizer.step#SGD.step", start + 500, 200),
        span("aten::item", start + 510, 20),
        span("aten::_local_scalar_dense", start + 512, 10),
        span("autograd::engine::evaluate_function: X", start + 800, 50),
        span("XBackward0", start + 801, 45),
        span("aten::mul", start + 810, 10),
    ]


def test_only_outermost_operators_count_and_those_that_wait_count_as_waits(tmp_path: Path) -> None:
    found = capture(tmp_path, steps_of(cpu_step))
    # linear, the optimizer's item and mul; the loss's item waits
    assert per_step(found, "operators", "syncs") == [3, 1]
    assert per_step(found, "operators", "syncs", path="model") == [1, 1]
    assert per_step(found, "operators", "syncs", path="model/loss") == [0, 1]
    assert per_step(found, "operators", "syncs", path="nowhere") == [0, 0]
    assert per_step(found, "flops") == [2 * 8 * 3 * 4]


def test_the_first_step_does_not_count(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        more = [span("aten::first", start + 900, 5)] if number == 0 else []
        return [*cpu_step(start, number), *more]

    counted = counters(capture(tmp_path, steps_of(build)))
    assert counted.steps == 2
    assert counted.counts["operators"] == Count(6, 3, 3)


def test_a_single_step_and_a_recording_without_steps_count_whole(tmp_path: Path) -> None:
    assert per_step(capture(tmp_path / "one", steps_of(cpu_step, 1)), "operators") == [3]
    assert per_step(capture(tmp_path, cpu_step(0, 0)), "operators", "syncs") == [3, 1]


def test_a_counter_that_differs_between_steps_varies(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        rare = [annotation("rare", start + 100, 50), span("aten::item", start + 110, 5)]
        return [
            annotation("model", start + 10, 900),
            *(span("aten::relu", start + 20 + 10 * k, 5) for k in range(number)),
            *(rare if number % 2 else []),
        ]

    counted = counters(capture(tmp_path, steps_of(build, 4)))
    # relu once, twice and three times; item in the first and the last of these steps
    count = Count(8, 2, 4)
    assert counted.counts["operators"] == count
    assert count.per_step is None
    assert counted.ranges["model"]["operators"] == count
    assert counted.ranges["model/rare"]["operators"] == Count(2, 0, 1)
    assert counted.calls["model"] == {"aten::relu": Count(6, 1, 3)}
    assert counted.calls["model/rare"] == {"aten::item": Count(2, 0, 1)}


def test_what_was_not_recorded_is_unknown_and_not_zero(tmp_path: Path) -> None:
    counts = counters(capture(tmp_path, [*steps_of(lambda start, _: [span("aten::mm", start, 5)])]))
    unknown = {name for name, count in counts.counts.items() if count is None}
    assert unknown == {
        *("launches", "kernels", "copies", "copied_bytes", "flops"),
        *("allocations", "allocated_bytes", "peak_bytes", "graph_breaks", "recompilations"),
    }
    assert counts.count("flops", "anywhere") is None
    assert counts.count("collectives.all_reduce") == Count(0, 0, 0)
    with pytest.raises(KeyError):
        counts.count("kernel")


def test_the_backward_belongs_to_the_range_of_its_forward(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        sequence = 10 + number
        return [
            annotation("layer", start + 10, 100),
            made("aten::relu", start + 20, 50, sequence),
            node("ReluBackward0", start + 500, 50, sequence),
            span("aten::threshold_backward", start + 510, 20, tid=2),
        ]

    assert per_step(capture(tmp_path, steps_of(build)), "operators", path="layer") == [2]


def test_memory_counts_by_step_and_range(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        return [
            annotation("model", start + 10, 400),
            allocation(start + 20, 100, 1, 100),
            allocation(start + 30, 50, 2, 150),
            allocation(start + 40, -100, 1, 50),
            allocation(start + 600, 70, 3, 120),
            allocation(start + 700, -120, 2, 0),
        ]

    found = capture(tmp_path, steps_of(build))
    names = ("allocations", "allocated_bytes")
    assert per_step(found, *names, "peak_bytes") == [3, 220, 150]
    assert per_step(found, *names, "peak_bytes", path="model") == [2, 150, None]


def test_the_peak_is_that_of_the_device_and_on_the_cpu_the_increase(tmp_path: Path) -> None:
    def kept(device: int | None) -> list[Event]:
        return [
            event
            for number in range(3)
            for event in (
                step(number, 1000 * number, 1000),
                allocation(1000 * number + 10, 8, number + 1, 8 * (number + 1), device=device),
            )
        ]

    assert counters(capture(tmp_path, kept(None))).counts["peak_bytes"] == Count(8, 8, 8)
    both = [*kept(0), *(each for each in kept(None) if each["name"] == "[memory]")]
    assert counters(capture(tmp_path / "device", both)).counts["peak_bytes"] == Count(24, 16, 24)


def device_step(start: float, number: int) -> list[Event]:
    """A kernel of an operator in a range, a copy to the device, and a call that waits."""
    first = 10 * number + 1
    return [
        annotation("model", start + 10, 100),
        span("aten::mm", start + 15, 60),
        *launched("gemm", start + 20, start + 40, 50, first),
        call("cudaMemcpyAsync", start + 200, 10, first + 1),
        copy(start + 210, 20, correlation=first + 1, bytes=64),
        call("cudaDeviceSynchronize", start + 300, 100, first + 2),
    ]


def test_a_device_counts_launches_kernels_copies_and_calls_that_wait(tmp_path: Path) -> None:
    found = capture(tmp_path, steps_of(device_step))
    assert per_step(found, "launches", "kernels", "copies", "copied_bytes") == [1, 1, 1, 64]
    assert per_step(found, "syncs", "operators") == [1, 1]
    assert per_step(found, "launches", "kernels", "copies", path="model") == [1, 1, 0]


def test_work_counts_in_the_step_that_launched_it(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        return launched("late", start + 10, start + 1500, 10, number + 1)

    assert per_step(capture(tmp_path, steps_of(build)), "kernels") == [1]


def test_copies_of_unknown_size_leave_the_bytes_unknown(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        return [
            call("cudaMemcpyAsync", start + 200, 10, number + 1),
            copy(start + 210, 20, correlation=number + 1),
        ]

    assert per_step(capture(tmp_path, steps_of(build)), "copies", "copied_bytes") == [1, None]


def test_collectives_count_by_kind(tmp_path: Path) -> None:
    def build(start: float, number: int) -> list[Event]:
        return [
            span("c10d::allreduce_", start + 10, 10),
            span("_c10d_functional::all_gather_into_tensor", start + 30, 20),
            span("c10d::_allgather_base_", start + 35, 10),
            span("aten::mul", start + 60, 5),
        ]

    found = capture(tmp_path, steps_of(build))
    kinds = ("collectives", "collectives.all_reduce", "collectives.all_gather")
    assert per_step(found, *kinds, "operators") == [2, 1, 1, 1]
    assert per_step(found, "collectives.broadcast") == [0]


def test_torchs_records_count_where_the_trace_has_no_operators_of_collectives(tmp_path) -> None:
    def build(start: float, number: int) -> list[Event]:
        record = {"Collective_name": "allreduce"}
        return [span("record_param_comms", start + 10, 10, **record)]

    assert per_step(capture(tmp_path, steps_of(build)), "collectives.all_reduce") == [1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (None, [None, None]),
        ({"dynamo": None}, [0, 0]),
        ({"dynamo": {"graph_breaks": {"print": 2, "item": 1}, "recompilations": 4}}, [3, 4]),
        ({"dynamo": {"graph_breaks": None, "recompilations": None}}, [None, None]),
    ],
)
def test_breaks_and_recompilations_come_from_the_metadata(tmp_path, environment, expected) -> None:
    found = write_capture(tmp_path, steps_of(cpu_step), environment=environment)
    assert per_step(found, "graph_breaks", "recompilations") == expected


def test_a_trace_without_events_counts_nothing(tmp_path: Path) -> None:
    assert per_step(capture(tmp_path, [step(1, 0, 10)]), "operators", "syncs") == [0, 0]
    assert set(counters(capture(tmp_path, [step(1, 0, 10)])).counts) == set(COUNTERS)


def brute_force(path: Path) -> tuple[Counter[str], int]:
    """Count the outermost operators of each step but the first by comparing intervals one by one."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    events = [
        event
        for event in json.loads(text, strict=False)["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("ProfilerStep#")
    )[1:]
    ends: dict[Any, float] = {}
    found: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["cat"] != "cpu_op" or not re.fullmatch(r"\w+::\w+(\.\w+)?", event["name"]):
            continue
        thread = (event["pid"], event["tid"])
        if event["ts"] + event["dur"] <= ends.get(thread, 0):
            continue
        ends[thread] = event["ts"] + event["dur"]
        if any(start <= event["ts"] < end for start, end in steps):
            found[event["name"]] += 1
    return found, len(steps)


COUNTED = ("v100_ns_resolution", "mi300x_resnet_checkpoint_train", "a100_nccl_2ranks_rank0")


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(COUNTED))
def test_the_calls_of_real_traces_are_those_that_a_loop_counts(name: str) -> None:
    expected, steps = brute_force(real_traces.path(name))
    counted = counters(real_traces.load(name))
    found: Counter[str] = Counter()
    for inside in counted.calls.values():
        for operator, count in inside.items():
            found[operator] += count.total
    assert counted.steps == steps
    assert found == expected
    operators, syncs = counted.counts["operators"], counted.counts["syncs"]
    assert operators is not None
    assert syncs is not None
    assert sum(expected.values()) - 20 * steps <= operators.total <= sum(expected.values())


QUERIES = {
    "kernels": "select count(*) from events where kind = 'kernel' and counted",
    "copies": "select count(*) from events where kind = 'copy' and counted",
    "copied_bytes": "select sum(bytes) from events where kind = 'copy' and counted",
    "launches": "select count(distinct launcher) from events where counted and launcher is not "
    "null and kind in ('kernel', 'communication')",
    "flops": "select sum(flops) from events where counted",
}


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(("v100_resnet50_workers0", "b200_eager")))
def test_counters_are_the_answers_to_questions_in_sql(name: str) -> None:
    found = real_traces.load(name)
    counts = counters(found).counts
    totals = {counter: count and count.total for counter, count in counts.items()}
    assert {each: found.sql(query).frame.item() for each, query in QUERIES.items()} == {
        each: totals[each] for each in QUERIES
    }


def test_a_kernel_without_a_launch_counts_when_it_runs(tmp_path: Path) -> None:
    events = steps_of(lambda start, _: [kernel("orphan", start + 10, 5)])
    assert per_step(capture(tmp_path, events), "kernels", "launches") == [1, 0]


def test_the_documentation_lists_all_counters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ci.md").read_text("utf-8")
    table = page.partition("## Counters\n")[2].partition("\n\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*COUNTERS]


@pytest.mark.parametrize(("host", "waits"), [("Pageable", 1), ("Pinned", 0)])
def test_a_copy_that_blocks_is_a_wait_in_counter_and_table(tmp_path, host, waits) -> None:
    def build(start: float, number: int) -> list[Event]:
        moves = {
            **copy(start + 20, 200, correlation=number + 1),
            "name": f"Memcpy DtoH (Device -> {host})",
        }
        return [
            span("aten::copy_", start + 5, 240),
            call("cudaMemcpyAsync", start + 10, 220, number + 1),
            moves,
        ]

    found = capture(tmp_path, steps_of(build))
    assert per_step(found, "syncs") == [waits]
    assert sum(found.synchronisations.column("calls")) == 3 * waits
