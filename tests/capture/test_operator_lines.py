"""The column `line` of the events: the user's line that called each operator, by samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import (
    BACKWARD,
    accumulation,
    annotation,
    in_steps,
    launched,
    made,
    node,
    span,
    write_capture,
    write_samples,
)

from instrument import Capture
from instrument.base.errors import CaptureError
from instrument.export.sinks.stacks import Stacks
from instrument.read.facts.places import common_place
from instrument.read.facts.segments import no_operator
from instrument.read.show.page.flame import flame_graphs
from instrument.read.show.page.page import payload
from instrument.read.views.lines import heaviest_lines

BASE_NS = 1_790_857_026_000_000_000


def lines_of(capture: Capture, kind: str = "operator") -> list[tuple[str, str | None]]:
    rows = capture.sql(f"select name, line from events where kind = '{kind}' order by start_ns")
    return [(row.name, row.line) for row in rows]


def of(tmp_path: Path, events: list[Any], *samples: Any) -> Capture:
    capture = write_capture(tmp_path, events, base_ns=BASE_NS)
    write_samples(tmp_path, samples, BASE_NS)
    return capture


# In each of three steps, two matrix products and a sort.
STEPS = in_steps(
    3,
    1000,
    annotation("forward", 0, 500),
    span("aten::matmul", 10, 90),
    span("aten::mm", 20, 50),
    span("aten::matmul", 200, 100),
    span("aten::sort", 600, 100),
)
FIRST, INSIDE, SECOND, SORT = "aten::matmul", "aten::mm", "aten::matmul", "aten::sort"


def test_a_sample_in_one_step_names_the_line_in_every_step(tmp_path: Path) -> None:
    capture = of(tmp_path, STEPS, (2030, [4]), (250, [5]), (500, [6]))
    step = [(FIRST, "train.py:4"), (INSIDE, "train.py:4"), (SECOND, "train.py:5"), (SORT, None)]
    assert lines_of(capture) == 3 * step
    assert lines_of(capture, "range") == 3 * [("forward", None)]


@pytest.mark.parametrize(("fives", "line"), [(1, "train.py:4"), (2, None)])
def test_samples_that_disagree_name_a_line_with_two_thirds_or_none(tmp_path, fives, line) -> None:
    samples = [(50, [4]), (1050, [4]), *[(2050, [5])] * fives]
    assert lines_of(of(tmp_path, STEPS, *samples))[0] == (FIRST, line)


def test_a_step_that_calls_it_differently_often_does_not_have_the_line(tmp_path) -> None:
    capture = of(tmp_path, [*STEPS, span("aten::sort", 1800, 50)], (650, [4]))
    lines = [line for name, line in lines_of(capture) if name == SORT]
    assert lines == ["train.py:4", None, None, "train.py:4"]


def test_the_line_is_the_users_innermost_one(tmp_path: Path) -> None:
    library = ("library", "torch/functional.py", 7, "sort")
    capture = of(tmp_path, STEPS, (650, [library, 4, 9]), (50, [library]))
    assert dict(lines_of(capture)) == {FIRST: None, INSIDE: None, SORT: "train.py:4"}


def test_backward_and_kernels_have_the_line_of_the_forward(tmp_path: Path) -> None:
    events = in_steps(1, 1000, span("aten::linear", 10, 90), *launched("gemm", 30, 40, 20, 1))
    events += [
        made("aten::addmm", 20, 50, 7),
        node("AddmmBackward0", 500, 100, 7),
        span("aten::mm", 510, 20, tid=2),
        *launched("gemm_backward", 515, 530, 20, 2, tid=2),
        *accumulation(600, 50),
        node("MulBackward0", 700, 50, 8),
    ]
    capture = of(tmp_path, events, (50, [4]))
    lines = lines_of(capture)
    assert {line for name, line in lines if "Mul" not in name} == {"train.py:4"}
    assert [line for name, line in lines if "Mul" in name] == [None]
    assert lines_of(capture, "kernel")[0] == ("gemm", "train.py:4")


def test_without_samples_no_line_is_known(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, STEPS)
    assert {line for _, line in lines_of(capture)} == {None}
    (tmp_path / "lines_rank0.json").write_text("{")  # only the view of the lines says so
    assert {line for _, line in lines_of(Capture.load(capture.folder or ""))} == {None}


# The places of findings.


def place(capture: Capture, name: str) -> str | None:
    events = capture.sql(f"select id from events where name = '{name}'").frame["id"].to_numpy()
    return common_place(capture, events)[1]


def test_without_stacks_operators_are_at_the_line_with_half_of_their_time(tmp_path) -> None:
    capture = of(tmp_path, STEPS, (1050, [4]), (250, [5]))
    assert place(capture, "aten::matmul") == "train.py:5 in main"  # with 300 of 570 µs
    assert place(capture, "aten::sort") is None


def test_where_no_line_has_half_of_the_time_the_place_is_the_function(tmp_path: Path) -> None:
    equal = in_steps(2, 1000, *(span("aten::mm", start, 100) for start in (0, 300, 600)))
    capture = of(tmp_path, equal, (50, [4]), (350, [5]), (650, [6]))
    assert place(capture, "aten::mm") == "train.py in main"


def test_operators_with_few_samples_have_the_place_of_half_of_these(tmp_path: Path) -> None:
    many = in_steps(1, 1000, *(span("aten::mm", 20 * k, 10) for k in range(40)))
    three = [(20 * k + 5, [4]) for k in (3, 9, 30)]
    assert place(of(tmp_path / "three", many, *three), "aten::mm") == "train.py:4 in main"
    assert place(of(tmp_path / "two", many, *three[1:]), "aten::mm") == "train.py:4 in main"
    assert place(of(tmp_path / "one", many, three[0]), "aten::mm") is None


def test_time_in_no_operator_has_the_place_that_its_samples_found(tmp_path: Path) -> None:
    user, torch = (
        ("user", "data.py", 7, "load.<locals>.<listcomp>"),
        ("library", "torch/a.py", 1, "a"),
    )
    samples = [(1200, [user]), (1400, [user]), (1500, [4]), (1900, [torch, 4]), (2050, [4])]
    capture = of(tmp_path, in_steps(3, 1000, span("aten::mm", 0, 100)), *samples)
    rows = no_operator(capture).select("start_ns", "duration_ns", "source").rows()
    assert rows == [
        (1_100_000, 200_000, "data.py:7 in load"),
        (1_300_000, 150_000, "data.py:7 in load"),
        (1_450_000, 250_000, "train.py:4 in main"),
        (1_700_000, 300_000, None),
        (2_100_000, 900_000, None),
    ]


def test_few_samples_show_no_place(tmp_path: Path) -> None:
    capture = of(tmp_path, in_steps(3, 1000, span("aten::mm", 0, 100)), (1200, [4]), (1300, [4]))
    assert {*no_operator(capture)["source"]} == {None}


# The views of lines.


def test_the_backward_counts_for_the_lines_of_the_forward(tmp_path: Path) -> None:
    events = in_steps(1, 1000, made("aten::mm", 10, 90, 7), made("aten::exp", 200, 90, 8))
    events += [node("ExpBackward0", 500, 100, 8), node("MmBackward0", 600, 300, 7)]
    forward = [(50, [4]), (250, [5]), (None, [5, 6])]
    backward = [(None, [BACKWARD, 9])] * 8 + [(None, [20, BACKWARD, 9])] * 2 + [(None, [9])]
    capture = of(tmp_path, events, *forward, *backward)
    found = {row.line: row for row in capture.lines}
    assert found["train.py:4"].with_backward_share == pytest.approx((1 + 8 * 3 / 4) / 14)
    assert found["train.py:5"].with_backward_share == pytest.approx((2 + 8 / 4) / 14)
    assert found["train.py:9"].with_backward_share == pytest.approx(1 / 14)
    assert found["train.py:20"].with_backward_share == pytest.approx(2 / 14)
    assert found["train.py:4"].operator == "aten::mm"
    assert found["train.py:9"].share == pytest.approx(9 / 14)
    first, *_, last = heaviest_lines(capture)
    assert not last.is_backward_included  # the call of the backward
    assert (first.line, first.operators) == ("train.py:4", ("aten::mm",))
    assert first.is_backward_included
    assert first.low < first.share < first.high


def test_what_is_not_known_of_the_backward_stays_where_it_is_called(tmp_path: Path) -> None:
    events = in_steps(1, 1000, made("aten::mm", 10, 90, 7), made("aten::exp", 200, 90, 8))
    events += [node("ExpBackward0", 500, 100, 8), node("MmBackward0", 600, 300, 7)]
    half = of(tmp_path / "half", events, (250, [5]), *[(None, [BACKWARD, 9])] * 8)
    found = {row.line: row.with_backward_share for row in half.lines}
    assert found == {"train.py:5": pytest.approx(3 / 9), "train.py:9": pytest.approx(6 / 9)}
    none = of(tmp_path / "none", events, *[(None, [BACKWARD, 9])] * 8)
    assert [row.with_backward_share for row in none.lines] == [None]
    assert not heaviest_lines(none)[0].is_backward_included


def test_without_stacks_the_flame_graph_is_that_of_the_samples(tmp_path: Path) -> None:
    capture = of(tmp_path, STEPS, (50, [4, 2]), (None, [4, 2]), (None, [3, 2]))
    stacks = {
        (("train.py(2): main", "train.py(4): main"), 20_000_000),
        (("train.py(2): main", "train.py(3): main"), 10_000_000),
    }
    assert {*capture.stacks()} == stacks
    graphs = flame_graphs(capture)
    assert graphs is not None
    first, second = graphs["graphs"]
    assert (first["name"], second["name"]) == (
        "Lines, by samples of the whole run", "Ranges and operators",
    )  # fmt: skip
    assert dict(zip((first["names"][k] for k in first["name_of"]), first["self"])) == {
        "train.py(2): main": 0, "train.py(4): main": 20_000_000, "train.py(3): main": 10_000_000,
    }  # fmt: skip
    Stacks().write(capture, tmp_path)
    assert "train.py(2):_main;train.py(4):_main 20000\n" in (tmp_path / "stacks.txt").read_text()
    with pytest.raises(CaptureError, match="recorded without with_stack"):
        capture.stacks("device")


def test_a_redacted_flame_graph_names_no_file(tmp_path: Path) -> None:
    capture = of(tmp_path, STEPS, (50, [("user", "secret folder/secret.py", 4, "main")]))
    assert "secret" in str(payload([capture]))
    assert "secret" not in str(payload([capture], redact=True))
