"""The parts of the steps: each nanosecond in one range and one kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import polars as pl
import pytest
import real_traces
from builders import REDUCES, annotation, call, capture, copy, frame, launched, span, step
from golden import Golden
from seeds import seeds

from compare.painter import LOADER, Program
from instrument.read.facts.idle import device_time, lasting_steps
from instrument.read.facts.segments import no_operator, plain_path, ranges_of_steps, step_parts
from instrument.read.facts.step_index import CountedSteps
from instrument.read.views.views import Views


def counted(views: Views) -> CountedSteps:
    return lasting_steps(views.links, views.work).only(views.links.counted_steps.kept)


def parts_of(views: Views) -> dict[tuple[str, str], int]:
    return step_parts(views)


CASES = {
    # After a step that does not count, one of 1000 µs. The call takes 5 µs, and the kernel begins 20 µs after it: 25 µs
    # launch, 300 compute. Of the collective 100 µs are beside the kernel, and 50 exposed; of the copy 25 are exposed.
    "each kind of time": [
        *(step(0, 0, 100), step(1, 100, 1000), annotation(LOADER, 100, 100), annotation("forward", 200, 500)),
        *launched("gemm", 250, 275, 300, 1),
        *launched(REDUCES, 300, 475, 150, 2, tid=9),
        *(call("cudaMemcpyAsync", 310, 5, 3), copy(600, 50, correlation=3), call("cudaDeviceSynchronize", 650, 50)),
        span("aten::item", 800, 100),
    ],
    # In a trace of another program, a range `data` may be anything.
    "a trace of the CPU alone": [
        *(step(3, 0, 1000), annotation("data", 0, 100), annotation("forward", 100, 400), span("aten::mm", 200, 100)),
        *(annotation("gloo:all_reduce", 500, 300, tid=2), span(LOADER, 900, 50)),
    ],
    "operators and Python in ranges": [
        *(step(0, 0, 100), step(1, 100, 1000), annotation("forward", 200, 500), span("aten::linear", 300, 200)),
        *(span("aten::mm", 350, 100), annotation("inner", 600, 50), span("aten::item", 800, 100)),
    ],
    "steps that overlap": [step(0, 0, 10), step(1, 10, 100), step(2, 50, 100), span("aten::mm", 60, 30)],
    # Coroutines on one thread: the wait for the device begins before the operator ends.
    "calls that overlap": [step(1, 0, 100), span("aten::mm", 10, 40), call("cudaDeviceSynchronize", 30, 50)],
    "no steps": [annotation("a", 0, 30), span("aten::mm", 50, 50)],
    "no events": [],
    "a range with the name of no range": [step(1, 0, 10), annotation("(no range)", 0, 4), span("aten::mm", 5, 3)],
}  # fmt: skip


def test_the_parts_of_steps_by_hand(tmp_path: Path, golden: Golden) -> None:
    told = []
    for name, events in CASES.items():
        views = capture(tmp_path, events)
        parts = parts_of(views)
        assert sum(parts.values()) == counted(views).total_ns
        told.append(
            "\n".join(
                [f"{name}:", *(f"  {path}, {kind}: {ns}" for (path, kind), ns in parts.items())]
            )
        )
    golden("step_parts.txt", "\n".join(told))


def test_time_in_no_operator_is_cut_at_the_borders_of_ranges_and_functions(tmp_path: Path) -> None:
    events = [
        step(0, 0, 1000),
        annotation("forward", 200, 500),
        span("aten::linear", 300, 200),
        annotation("inner", 600, 50),
        frame("train.py(1): main", 0, 1000),
        frame("torch/nn/modules/module.py(1): call", 210, 300),
        frame("train.py(9): log", 620, 300),
    ]
    found = no_operator(capture(tmp_path, events))
    sides = (pl.col(side) // 1000 for side in ("start_ns", "end_ns"))
    main, log = "train.py:1 in main", "train.py:9 in log"
    assert found.select(*sides, "path", "source").rows() == [
        (0, 200, "(no range)", main),
        (200, 210, "forward", main),
        (210, 300, "forward", None),
        (500, 510, "forward", None),
        (510, 600, "forward", main),
        (600, 620, "forward/inner", main),
        (620, 650, "forward/inner", log),
        (650, 700, "forward", log),
        (700, 920, "(no range)", log),
        (920, 1000, "(no range)", main),
    ]


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        (f"train/{LOADER}", "train/enumerate(DataLoader)"),
        ("enumerate(DataPipe)#Mapper", "enumerate(DataPipe)"),
        ("train/forward", "train/forward"),
    ],
)
def test_a_loader_has_the_same_name_with_and_without_workers(path: str, plain: str) -> None:
    assert plain_path(path) == plain


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_random_steps_are_split_as_painted(seed: int, tmp_path: Path) -> None:
    program = Program(Random(seed), length=120).make()
    assert parts_of(capture(tmp_path, program.events)) == program.painted()


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_the_ranges_of_each_step_are_those_of_the_step_alone(seed: int, tmp_path: Path) -> None:
    views = capture(tmp_path, Program(Random(seed), length=120).make().events)
    span, found = counted(views), ranges_of_steps(views)
    assert [sum(each.values()) for each in found] == (span.end_ns - span.start_ns).tolist()
    ranges: Counter[str] = Counter()
    for each in found:
        ranges.update(each)
    parts: Counter[str] = Counter()
    for (path, _), ns in step_parts(views).items():
        parts[path] += ns
    assert ranges == parts


@pytest.mark.parametrize("name", real_traces.every())
def test_the_parts_of_real_steps_sum_to_the_steps(name: str) -> None:
    views = real_traces.load(name)
    found = step_parts(views)
    assert sum(found.values()) == counted(views).total_ns
    assert min(found.values()) > 0
    if len(views.links.steps) and len(views.work.event):
        # The exposed parts of the devices' work are those of another sweep.
        spent = device_time(views)
        for kind, name in (
            ("compute", "compute_ns"),
            ("exposed communication", "exposed_communication_ns"),
            ("copy", "exposed_copy_ns"),
        ):
            total = sum(ns for (_, each), ns in found.items() if each == kind)
            assert total == spent[name], kind
