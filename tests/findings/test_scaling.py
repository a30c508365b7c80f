"""Findings on traces with many threads, names, ranges or steps: the same results, and no quadratic work."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import annotation, call, capture, frame, kernel, launched, made, node, span, step

from findings.twins import found
from instrument.read.advise import autograd, recording
from instrument.read.advise.finding import Evidence
from instrument.read.advise.operators import _KERNELS, _attention
from instrument.read.advise.waits import _causes, _waits
from instrument.read.facts import places


def launching_threads(count: int) -> list[dict[str, Any]]:
    """Two steps; in the second, each thread works 1600 µs and then launches a kernel, one after another.

    While a thread works, the next one works too, on something that nobody waits for.
    """
    events = [step(1, 0, 10), step(2, 10, 2000 * count)]
    for k in range(count):
        start, tid, other = 10 + 2000 * k, 100 + k, 100 + (k + 1) % count
        events += [
            annotation("prepare", start, 1500, tid=tid),
            span(f"aten::work{k % 2}", start + 100, 1000 + 100 * (k % 2), tid=tid),
            span("aten::beside", start, 1000, tid=other),
            call("cudaLaunchKernel", start + 1590, 10, k + 1, tid=tid),
            kernel("gemm", start + 1600, 400, correlation=k + 1),
        ]
    return events


def test_each_gap_counts_for_the_thread_that_ends_it(tmp_path: Path) -> None:
    trace = capture(tmp_path, launching_threads(8))
    causes = _causes(trace, _waits(trace))
    assert causes.select("name", "calls", "total_ns").rows() == [
        ("aten::work1", 4, 4 * 1_100_000),
        ("aten::work0", 4, 4 * 1_000_000),
        ("prepare", 8, 4 * 400_000 + 4 * 500_000),
        ("[no range and no operator]", 8, 8 * 90_000),
        ("cudaLaunchKernel", 8, 8 * 10_000),
    ]
    # The thread of the steps launches nothing, so earlier launches do not make them shorter.
    assert not found(trace, "device-idle")


def waits(count: int, operators: int) -> list[dict[str, Any]]:
    """Two steps; the second waits for the device in many operators, and each wait leaves it idle."""
    events = [step(1, 0, 10), step(2, 10, 1000 * count)]
    for k in range(count):
        start, first = 10 + 1000 * k, 2 * k + 1
        events += [
            annotation(f"range{k % 2}", start, 900),
            frame("train.py(9): log", start + 9, 345),
            *launched("gemm", start, start + 10, 300, first),
            span(f"aten::wait{k % operators}", start + 10, 330 + k % 5),
            call("cudaStreamSynchronize", start + 16, 300 + k % 5),
            *launched("gemm", start + 795 + k % operators, start + 810, 190, first + 1),
        ]
    return events


def test_synchronising_calls_are_grouped_by_operator_and_range(tmp_path: Path) -> None:
    (finding,) = found(capture(tmp_path, waits(12, 3)), "synchronising-calls")
    assert len(finding.evidence) == 5  # of six groups of two calls each
    assert finding.evidence[0] == Evidence(
        "aten::wait2",
        2,
        302_000 + 303_000,
        8_026_000,
        8_329_000,
        "in range0, at train.py:9 in log, leaves the device idle for 984.0 µs",
    )


def test_many_operators_that_wait_are_located_at_once(tmp_path, monkeypatch) -> None:
    asked = 0
    nodes_of = places.nodes_of

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return nodes_of(*arguments)

    monkeypatch.setattr(places, "nodes_of", counted)
    times = []
    for operators in (2, 40):
        asked = 0
        assert found(capture(tmp_path, waits(40, operators)), "synchronising-calls")
        times.append(asked)
    assert times[0] == times[1]


def validations(ranges: int) -> list[dict[str, Any]]:
    """Two steps of 10 ms with a forward and its backward, short ranges without, and one of 1 ms.

    The last two ranges make 40 nodes; the kernel of the last short range works for 1 ms.
    """
    events, number = [], 10
    for at in (0, 1):
        start = 10_000 * at
        events += [
            step(at, start, 10_000),
            made("aten::mm", start + 1, 10, number),
            node("MmBackward0", start + 20, 20, number),
        ]
        number += 1
        for k in range(ranges + 1):
            begin, nodes = start + 100 + 50 * k, 40 if k >= ranges - 1 else 2
            events += [
                annotation(
                    "long" if k == ranges else f"short{k}", begin, 1000 if k == ranges else 40
                ),
                *(made("aten::mm", begin + 1 + 0.9 * j, 0.8, number + j) for j in range(nodes)),
            ]
            number += nodes
        events += launched("gemm", begin - 20, begin, 1000, at + 1)
    return events


def test_only_ranges_that_make_many_nodes_are_measured(tmp_path, monkeypatch) -> None:
    measured = []
    share_of = autograd.share_with_device

    def counted(*arguments: Any) -> float:
        measured.append(arguments)
        return share_of(*arguments)

    monkeypatch.setattr(autograd, "share_with_device", counted)
    trace = capture(tmp_path, validations(60))
    places = [problem.place for problem in autograd.unused_autograd(trace)]
    assert [place and place[0] for place in places] == ["short59", "long"]
    assert len(measured) == 2


def test_attentions_beside_each_other_share_no_operator(tmp_path: Path) -> None:
    events, between = [step(1, 0, 10), step(2, 10, 20 * 100)], 0
    for k in range(20):
        names = ["aten::bmm", *["aten::mul"] * (k % 3), "aten::softmax", "aten::add", "aten::bmm"]
        between += len(names) - 2
        events += [span(name, 10 + 100 * k + 10 * j, 9) for j, name in enumerate(names)]
        events.append(span("aten::relu", 10 + 100 * k + 90, 9))
    trace = capture(tmp_path, events)
    softmax, nodes = _attention(trace, _KERNELS["cpu"])
    names = [trace.events.names[k] for k in trace.events.name[trace.links.call_tree.index[nodes]]]
    assert (len(softmax), len(nodes)) == (20, between)
    assert set(names) == {"aten::mul", "aten::softmax", "aten::add"}


@pytest.mark.parametrize("count", [4, 5, 8, 41])
def test_additional_time_of_names_in_few_steps(tmp_path: Path, count: int) -> None:
    random = np.random.default_rng(count)
    took: dict[str, list[int]] = {}
    events = []
    for at in range(count):
        events.append(step(at, 1000 * at, 1000))
        for k in range(8):
            # Some names occur in each step, others in one of them.
            name = f"aten::op{random.integers(3 if k < 4 else 2 * count)}"
            lasts = int(random.integers(1, 100))
            took.setdefault(name, [0] * count)[at] += 1000 * lasts
            events.append(span(name, 1000 * at + 110 * k, lasts))
    causes = recording._causes(capture(tmp_path, events))
    assert {name: more_ns for name, more_ns, _ in causes} == {
        name: int(times[0] - np.median(times[1:])) for name, times in took.items() if times[0]
    }


def test_a_name_for_each_step_takes_little_memory(tmp_path: Path) -> None:
    count = 1500
    events = []
    for at in range(count):
        length = 20_000 if at == 0 else 100
        start = 20_000 + 100 * at if at else 0
        events += [step(at, start, length), span(f"aten::op{at}", start, length - 10)]
    trace = capture(tmp_path, events)
    assert trace.links.call_tree
    tracemalloc.start()
    try:
        (finding,) = recording.first_step(trace)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert finding.what.endswith("100 % of the difference is aten::op0")
    assert peak < 4 * count * count  # a table of all names and steps takes twice that
