"""Where events are: their range, their source and their step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from builders import (
    CPU,
    annotation,
    capture,
    frame,
    in_steps,
    kernel,
    launched,
    made,
    node,
    span,
    step,
)

from instrument import Capture
from instrument.base.units import percent
from instrument.read.advise.diagnosis import as_text
from instrument.read.advise.evidence import evidence
from instrument.read.advise.verdict import notes, verdict
from instrument.read.facts import places
from instrument.read.facts.segments import no_operator, step_parts
from instrument.read.trace.events import Ints


def positions(made: Capture, *names: str) -> Ints:
    table = made.events
    return np.array(
        [k for name in names for k in range(len(table)) if table.names[table.name[k]] == name]
    )


def test_an_event_lies_in_the_innermost_range_and_backward_in_that_of_its_forward(tmp_path) -> None:
    found = capture(
        tmp_path,
        [
            annotation("outer", 0, 100),
            annotation("inner", 10, 50),
            made("aten::mul", 20, 10, sequence=1),
            *launched("gemm", 22, 40, 10, 5),
            span("aten::relu", 70, 10),
            span("aten::add", 200, 10),
            node("MulBackward0", 300, 20, sequence=1),
            span("aten::div", 305, 5, tid=2),
            kernel("lost", 500, 10),
        ],
    )
    for name, path in {
        "aten::mul": "outer/inner",
        "cudaLaunchKernel": "outer/inner",
        "gemm": "outer/inner",
        "aten::relu": "outer",
        "aten::add": None,
        "aten::div": "outer/inner",
        "lost": None,
    }.items():
        (code,) = places.range_codes(found, positions(found, name))
        assert [*found.links.scopes.paths.texts, None][code] == path, name


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("train.py(31): main", "train.py:31 in main"),
        (
            "/home/me/my project/train.py(31): <module>",
            "/home/me/my project/train.py:31 in <module>",
        ),
        ("/env/lib/python3.12/site-packages/acme/nets.py(7): forward", "acme/nets.py:7 in forward"),
        ("C:\\work\\train.py(3): main", "C:\\work\\train.py:3 in main"),
        ("torch/nn/modules/module.py(1): _call_impl", None),
        ("/env/lib/python3.12/site-packages/torch/nn/modules/module.py(1): forward", None),
        ("/usr/lib/python3.12/threading.py(99): wait", None),
        ("threading.py(99): wait", None),
        ("instrument/record/session.py(3): step", None),
        ("nn.Module: Linear_3", None),
        ("<built-in method item of Tensor object at 0x7f>", None),
        ("<string>(2): __init__", None),
        ("train.py(31): <genexpr>", None),
    ],
)
def test_the_source_is_a_users_frame(name: str, source: str | None) -> None:
    assert places.users_source(name) == source


def test_the_source_of_an_event_is_the_innermost_frame_of_a_user(tmp_path: Path) -> None:
    found = capture(
        tmp_path,
        [
            frame("train.py(31): main", 0, 100),
            frame("torch/_tensor.py(1): item", 10, 50),
            span("aten::item", 20, 10),
            *launched("gemm", 22, 400, 10, 5),
            span("aten::relu", 200, 10),
        ],
    )
    assert places.has_sources(found)
    item, relu, gemm = positions(found, "aten::item", "aten::relu", "gemm")
    assert places.source_of(found, item) == "train.py:31 in main"
    assert places.source_of(found, gemm) == "train.py:31 in main"
    assert places.source_of(found, relu) is None


def test_a_function_in_which_the_recording_began_has_no_line(tmp_path: Path) -> None:
    """torch gives it the line of this moment, such as that of optimizer.step(), and others their first line."""
    found = capture(
        tmp_path,
        [
            frame("train.py(40): <module>", 0, 1000),
            frame("train.py(31): main", 1, 998),
            frame("torch/profiler/profiler.py(800): step", 2, 30),
            frame("torch/autograd/profiler.py(358): _start_trace", 3, 10),
            frame("train.py(5): slow", 100, 500),
            span("aten::mul", 110, 10),
            span("aten::add", 700, 10),
        ],
    )
    codes, texts = places.source_codes(found, positions(found, "aten::mul", "aten::add"))
    assert [texts[code] for code in codes] == ["train.py:5 in slow", "train.py in main"]
    got = {*no_operator(found)["source"].drop_nulls()}
    assert got == {"train.py:5 in slow", "train.py in main", "train.py in <module>"}


def test_the_source_of_an_older_trace_is_in_its_call_stacks(tmp_path: Path) -> None:
    stack = "/env/site-packages/torch/_tensor.py(1): item;train.py(31): main;<module>"
    found = capture(
        tmp_path, [span("aten::item", 20, 10, Call_stack=stack), span("aten::inner", 22, 5)]
    )
    for event in positions(found, "aten::item", "aten::inner"):
        assert places.source_of(found, event) == "train.py:31 in main"


def test_the_common_place_goes_by_time(tmp_path: Path) -> None:
    found = capture(
        tmp_path,
        [
            annotation("model", 0, 300),
            annotation("first", 0, 100),
            span("aten::mul", 10, 80),
            annotation("second", 100, 200),
            span("aten::add", 110, 180),
            span("aten::add", 400, 10),
        ],
    )
    events = positions(found, "aten::mul", "aten::add")
    assert places.common_place(found, events) == ("model", None)
    assert places.common_place(found, events, np.array([0, 1, 0])) == ("model/second", None)
    assert places.common_place(found, events[:0]) == (None, None)


def test_shares_are_of_the_steps_but_the_first(tmp_path: Path) -> None:
    found = capture(
        tmp_path, [step(1, 0, 100), step(2, 100, 200), step(3, 300, 200), span("a", 90, 260, **CPU)]
    )
    counted = found.links.counted_steps
    assert (counted.what, counted.count, counted.total_ns) == ("step", 2, 400_000)
    assert counted.share(100_000) == 0.25
    start = np.array([90_000, 250_000])
    assert counted.within(start, start + 260_000).tolist() == [250_000, 250_000]
    assert counted.holds(np.array([0, 100_000, 300_000, 499_999, 500_000])).tolist() == [
        -1, 0, 1, 1, -1
    ]  # fmt: skip


def test_without_steps_shares_are_of_the_recording(tmp_path: Path) -> None:
    counted = capture(tmp_path, [span("a", 50, 100)]).links.counted_steps
    assert (counted.what, counted.total_ns) == ("recording", 100_000)


def test_evidence_counts_equal_names(tmp_path: Path) -> None:
    found = capture(tmp_path, [span("a", 0, 10), span("a", 20, 30), span("b", 60, 35)])
    rows = evidence(found, np.arange(3), detail="in a loop")
    assert [tuple(row)[:6] for row in rows] == [
        ("a", 2, 40_000, 20_000, 50_000, "in a loop"),
        ("b", 1, 35_000, 60_000, 95_000, "in a loop"),
    ]
    assert len(evidence(found, np.arange(3), most=1)) == 1


@pytest.mark.parametrize(
    ("share", "text"), [(0.523, "52 %"), (0.1, "10 %"), (0.042, "4.2 %"), (1.0, "100 %")]
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_recording_begins_with_its_first_event_and_not_with_the_profiler(tmp_path) -> None:
    """Kineto's span of the profiler is a hundred times as long as what it recorded."""
    profiler = span("PyTorch Profiler (0)", 0, 1_000_000, "Trace", pid="Spans", tid="PyTorch")
    work = [span("aten::mm", 900_000, 6_000), span("aten::add", 906_000, 4_000)]
    found = capture(tmp_path, [profiler, *work])
    assert found.links.counted_steps.total_ns == found.whatif.baseline_ns == 10_000_000
    assert found.diagnose().largest_parts.startswith("The largest parts: 60 % in aten::mm, 40 %")


@pytest.mark.xfail(
    strict=True,
    reason="without steps, shares in tables are of the sum of all operators, and those of the verdict of "
    "the recording, which also has the gaps between them",
)
def test_shares_of_a_recording_are_of_the_length_that_the_verdict_states(tmp_path: Path) -> None:
    found = capture(tmp_path, [span("aten::mm", 0, 400), span("aten::add", 600, 400)])
    assert found.diagnose().largest_parts.startswith("The largest parts: 40 % in aten::mm")
    assert [row.share for row in found.operators] == [0.4, 0.4]


@pytest.mark.parametrize(
    "name", ["Torch-Compiled Region: 0/0", "## Call CompiledFxGraph fud64jsrxcxliekg7lhz ##"]
)
def test_the_kernels_of_compiled_code_are_no_python(tmp_path: Path, name: str) -> None:
    """A compiled graph runs its C++ kernels in no operator, beside those of extern kernels."""
    inside = annotation("model", 0, 1000), annotation(name, 50, 900), span("aten::addmm", 60, 90)
    found = capture(tmp_path, in_steps(4, 1000, *inside))
    parts = step_parts(found)
    of_kind = Counter[str]()
    for (_, kind), ns in parts.items():
        of_kind[kind] += ns
    assert of_kind == {"CPU operators": 2_700_000, "Python": 300_000}
    diagnosis = found.diagnose()
    assert "(81 % in generated kernels)" in diagnosis.largest_parts


def test_without_events_on_the_cpu_the_device_is_described(tmp_path: Path) -> None:
    found = capture(tmp_path, [kernel("conv", 0, 400), kernel("add", 600, 400)]).diagnose()
    assert verdict(found) == (
        "From its first to its last work, 1.000 ms, the device computes for 80 % and is idle for "
        "20 %, mostly waiting for work whose launch is not in the trace. The kernels with the most "
        "time: 40 % elementwise (add), 40 % convolutions (conv). Nothing found; the savings are "
        "not known, because no step could be simulated."
    )


@pytest.mark.parametrize("in_operators_us", [450, 900])
def test_time_in_operators_is_named_by_them(tmp_path, in_operators_us) -> None:
    found = capture(tmp_path, in_steps(4, 1000, span("aten::mm", 50, in_operators_us))).diagnose()
    parts = ("90 % in aten::mm", "10 % in no operator")
    if in_operators_us < 500:
        parts = ("55 % in no operator", "45 % in aten::mm")
    assert verdict(found) == (
        f"A step takes 1.000 ms. The largest parts: {', '.join(parts)}. No check finds a cause that "
        f"saves more than 3 % of a step: at most {parts[0][:4]} less if the largest part cost nothing."
    )


@pytest.mark.parametrize(("lost", "is_said"), [(1, False), (2, True)])
def test_lost_events_are_said_once_under_the_verdict(tmp_path, lost, is_said) -> None:
    steps = in_steps(10, 1000, *(span("aten::mm", 10 * k, 9) for k in range(14)))
    odd = [span("k", 20 + 10 * k, 5, cat="odd") for k in range(lost)]
    found = capture(tmp_path, [*steps, *odd])
    said = (
        f"{lost} of {150 + lost} events of the trace file could not be read: {lost} have a "
        "category (`cat`) that torch does not write."
    )
    assert notes(found.diagnose()) == [said] * is_said
    assert " ".join(as_text(found.diagnose()).split()).count(said) == is_said
