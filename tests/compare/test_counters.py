"""Counters of a step: on traces written by hand, and on real ones against a second way to count."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
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
from golden import Golden

from instrument.read.capture import Capture
from instrument.read.compare.counters import COUNTERS, Count, counters

Build = Callable[[float, int], list[Event]]


def steps_of(build: Build, numbers: int = 3) -> list[Event]:
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


def varying(start: float, number: int) -> list[Event]:
    """`relu` once more in each step, and `item` in every second one."""
    rare = [annotation("rare", start + 100, 50), span("aten::item", start + 110, 5)]
    relus = [span("aten::relu", start + 20 + 10 * k, 5) for k in range(number)]
    return [annotation("model", start + 10, 900), *relus, *(rare if number % 2 else [])]


def with_backward(start: float, number: int) -> list[Event]:
    return [
        *(annotation("layer", start + 10, 100), made("aten::relu", start + 20, 50, 10 + number)),
        node("ReluBackward0", start + 500, 50, 10 + number),
        span("aten::threshold_backward", start + 510, 20, tid=2),
    ]


def allocating(start: float, number: int) -> list[Event]:
    changes = (20, 100, 1, 100), (30, 50, 2, 150), (40, -100, 1, 50), (600, 70, 3, 120)
    memory = [allocation(start + at, *change) for at, *change in (*changes, (700, -120, 2, 0))]
    return [annotation("model", start + 10, 400), *memory]


def keeping(*devices: int | None) -> Build:
    """8 bytes more in each step are kept."""
    return lambda start, number: [
        allocation(start + 10, 8, number + 1, 8 * (number + 1), device=each) for each in devices
    ]


def device_step(start: float, number: int) -> list[Event]:
    """A kernel of an operator in a range, a copy to the device, and a call that waits."""
    first = 10 * number + 1
    return [
        *(annotation("model", start + 10, 100), span("aten::mm", start + 15, 60)),
        *launched("gemm", start + 20, start + 40, 50, first),
        call("cudaMemcpyAsync", start + 200, 10, first + 1),
        copy(start + 210, 20, correlation=first + 1, bytes=64),
        call("cudaDeviceSynchronize", start + 300, 100, first + 2),
    ]


def copying(start: float, number: int) -> list[Event]:
    """Copies of unknown size."""
    moved = copy(start + 210, 20, correlation=number + 1)
    return [call("cudaMemcpyAsync", start + 200, 10, number + 1), moved]


def collective(start: float, number: int) -> list[Event]:
    return [
        span("c10d::allreduce_", start + 10, 10),
        span("_c10d_functional::all_gather_into_tensor", start + 30, 20),
        span("c10d::_allgather_base_", start + 35, 10),
        span("aten::mul", start + 60, 5),
    ]


def first_has_more(start: float, number: int) -> list[Event]:
    return [*cpu_step(start, number), *([] if number else [span("aten::first", start + 900, 5)])]


# Three steps each, of which the first does not count.
CASES = {
    # linear, the optimizer's item and mul are operators; the loss's item waits. 2 · 8 · 3 · 4 FLOPs.
    "outermost operators, and those that wait": steps_of(cpu_step),
    "the first step has more": steps_of(first_has_more),
    "a single step counts": steps_of(cpu_step, 1),
    "a recording without steps counts whole": cpu_step(0, 0),
    # relu once, twice and three times; item in the first and the last of these steps.
    "counters that vary": steps_of(varying, 4),
    "the backward belongs to the range of its forward": steps_of(with_backward),
    "memory": steps_of(allocating),
    # The peak is that of the device, and on the CPU the increase.
    "memory of the CPU that grows": steps_of(keeping(None)),
    "memory of the CPU and of a device that grows": steps_of(keeping(0, None)),
    "a device": steps_of(device_step),
    "work counts in the step that launched it": steps_of(
        lambda start, number: launched("late", start + 10, start + 1500, 10, number + 1)
    ),
    "copies of unknown size": steps_of(copying),
    "collectives": steps_of(collective),
    "torch's records, without operators of collectives": steps_of(
        lambda start, _: [span("record_param_comms", start + 10, 10, Collective_name="allreduce")]
    ),
    "a kernel without a launch counts when it runs": steps_of(
        lambda start, _: [kernel("orphan", start + 10, 5)]
    ),
    "one step without events": [step(1, 0, 10)],
}


def test_counters_by_hand(tmp_path: Path, golden: Golden) -> None:
    """The counters that are known, as [total, least, most], of the step and of each range, and its calls."""
    told = []
    for name, events in CASES.items():
        counted = counters(capture(tmp_path, events))
        told.append(f"---- {name}: {counted.steps} steps")
        for path, counts in {"step": counted.counts, **counted.ranges}.items():
            known = {key: tuple(count) for key, count in counts.items() if count is not None}
            told.append(f"{path}: {json.dumps(known)}")
        told += [f"calls of {path}: {json.dumps(calls)}" for path, calls in counted.calls.items()]
    golden("counters.txt", "\n".join(told))


def test_counters_of_ranges_that_are_not_there(tmp_path: Path) -> None:
    found = counters(capture(tmp_path, steps_of(cpu_step)))
    got = [found.count(name, "nowhere") for name in ("operators", "collectives.broadcast")]
    assert got == [Count(0, 0, 0)] * 2
    assert found.counts.keys() == {*COUNTERS}
    assert Count(8, 2, 4).per_step is None
    assert Count(6, 3, 3).per_step == 3
    of_memory = counters(capture(tmp_path, steps_of(allocating)))
    assert of_memory.count("peak_bytes", "model") is None, "a peak is that of the whole step"


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
