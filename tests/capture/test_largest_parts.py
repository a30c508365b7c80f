"""The parts of the steps that take most time, in traces by hand and against torch's own sums."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from builders import annotation, capture, in_steps, launched, made, node, span, step, write_capture

from instrument import Capture
from instrument.read.views.largest_parts import largest_parts

TYPES = {"net": "Net", "a": "Block", "b": "Block", "head": "Head"}
MODEL = [
    annotation("net", 0, 500),
    annotation("a", 0, 150),
    made("aten::mm", 0, 100, 1),
    span("aten::copy_", 20, 40),  # its time counts for aten::mm, which calls it
    annotation("b", 150, 250),
    made("aten::mm", 150, 200, 2),
    annotation("head", 400, 60),
    annotation("Optimizer.step#Adam.step", 500, 100),
    node("MmBackward0", 600, 200, 2, tid=1),
    span("aten::mm", 610, 150),
    annotation("small", 960, 40),
]


def test_modules_of_one_class_are_one_part_and_their_backward_is_another(tmp_path: Path) -> None:
    found = write_capture(tmp_path, in_steps(3, 1000, *MODEL), module_types=TYPES)
    assert largest_parts(found) == (
        "The largest parts: 40 % in 2 Block modules (30 % in aten::mm), 20 % in the backward of 2 "
        "Block modules (15 % in aten::mm), 16 % in no range (16 % in no operator)."
    )


def test_what_activation_checkpointing_repeats_is_a_part_of_its_own(tmp_path: Path) -> None:
    events = [
        annotation("a", 0, 100),
        annotation("b", 100, 100),
        node("CheckpointFunctionBackward", 200, 600, 1, tid=1),
        span("aten::detach", 202, 2),
        annotation("b", 210, 250),
        made("aten::mm", 220, 200, 7),
        annotation("a", 500, 250),
        made("aten::mm", 510, 200, 8),
        annotation("Optimizer.step#Adam.step", 900, 100),
    ]
    found = write_capture(tmp_path, in_steps(3, 1000, *events), module_types=TYPES)
    assert "50 % in the recomputation of 2 Block modules (40 % in aten::mm), " in largest_parts(
        found
    )


def test_time_counts_for_the_innermost_range(tmp_path: Path) -> None:
    inside = [annotation("outer", 0, 900), annotation("inner", 0, 700), span("aten::sort", 0, 100)]
    found = capture(tmp_path, in_steps(3, 1000, *inside))
    assert largest_parts(found) == (
        "The largest parts: 70 % in inner (60 % in no operator), 20 % in outer (20 % in "
        "no operator), 10 % in no range (10 % in no operator)."
    )


def test_device_work_counts_for_the_range_that_launched_it(tmp_path: Path) -> None:
    def found(folder: str, kernel_us: float) -> str:
        events = [
            event
            for number in range(3)
            for event in [
                step(number, number * 1000, 1000),
                annotation("first", number * 1000, 100),
                span("aten::conv2d", number * 1000, 50),
                *launched(
                    "conv", number * 1000 + 10, number * 1000 + 20, kernel_us, 2 * number + 1
                ),
                annotation("second", number * 1000 + 200, 100),
                *launched(
                    "add", number * 1000 + 210, number * 1000 + 700, 100, 2 * number + 2, tid=8
                ),
            ]
        ]
        return largest_parts(capture(tmp_path / folder, events))

    assert found("apart", 600) == (
        "The largest ranges on the device: "
        "60 % in first (60 % in aten::conv2d), 10 % in second (10 % in no operator)."
    )
    # The shares of the ranges would add up to more than 100 %.
    assert not found("overlapping", 950)


def test_the_shares_are_those_of_torchs_own_sums(tmp_path: Path) -> None:
    rows, weight = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)
    actions = [torch.profiler.ProfilerAction.RECORD_AND_SAVE, torch.profiler.ProfilerAction.NONE]
    activities, trace = [torch.profiler.ProfilerActivity.CPU], tmp_path / "trace.json"
    (rows @ weight).sort().values.sum().backward()  # the first product of a process takes longer
    with torch.profiler.profile(activities=activities, schedule=actions.__getitem__) as profile:
        with torch.profiler.record_function("large"):
            loss = (rows @ weight).sort().values.sum()
        loss.backward()
        profile.step()
    profile.export_chrome_trace(str(trace))
    total = {each.key: each.cpu_time_total for each in profile.key_averages()}
    nodes = sum(ns for name, ns in total.items() if name.startswith("autograd::engine::"))
    found = largest_parts(Capture.load(trace))
    for name, us in ("in large (", total["large"]), ("in the backward of large (", nodes):
        shown = re.search(rf"([\d.]+) % {re.escape(name)}", found)
        share = 100 * us / total["ProfilerStep*"]
        # parts below 5 % are not shown: on a busy machine, one may be
        assert float(shown[1]) == pytest.approx(share, abs=0.6) if shown else share < 5.6, found
