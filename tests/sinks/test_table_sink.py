"""The tables as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from builders import allocation, annotation, call, kernels, made, node, span, steps, view_text
from collected import Log
from golden import Golden
from recording import record

from instrument.base.errors import CaptureError, ConfigError
from instrument.export.sinks.table import TableSink
from instrument.read.capture import Capture
from instrument.read.show import verdict as of_one
from instrument.read.show.text import (
    OPERATOR_COLUMNS,
    RANGE_COLUMNS,
    By,
    check_sort,
    log_block,
    render,
)
from instrument.read.views.operators import GROUPINGS
from instrument.read.views.table import TORCH_NAMES

Write = Callable[..., Capture]
MIB = 1024**2


def block(text: str, title: str) -> list[str]:
    """The lines of the part that begins with `title`, without it, the headings and the rule."""
    part = next(part for part in text.split("\n\n") if part.startswith(title))
    return part.splitlines()[3:]


def cells(text: str, title: str = "Operators") -> list[list[str]]:
    """The cells of the rows of the part that begins with `title`."""
    return [re.split(r"  +", line.strip()) for line in block(text, title)]


def names(text: str, title: str = "Operators") -> list[str]:
    return [row[0] for row in cells(text, title)]


def headings(text: str, title: str = "Operators") -> list[str]:
    part = next(part for part in text.split("\n\n") if part.startswith(title))
    return re.split(r"  +", part.splitlines()[title != "name"].strip())


def test_the_whole_text(capture: Capture, golden: Golden) -> None:
    golden("table_of_the_sink.txt", render(capture).replace(str(capture.folder), "FOLDER"))


def test_it_is_logged_once_and_written(capture: Capture, log: Log) -> None:
    TableSink().write(capture, capture.folder)
    assert log == [f"\n{log_block(capture, capture.folder / 'table.txt', 80)}"]
    assert (capture.folder / "table.txt").read_text(encoding="utf-8") == render(capture) + "\n"


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("findings", [0, 7])
def test_the_log_has_forty_lines_that_fit_and_names_the_file_of_the_rest(
    write: Write, monkeypatch: pytest.MonkeyPatch, width: int, findings: int
) -> None:
    """However long the findings are."""
    many = [annotation(f"range {k} of many", 2000 + 10 * k, 5) for k in range(50)]
    many += [span(f"aten::operator_{k}", 2001 + 10 * k, 2) for k in range(50)]
    first = [[f"finding {k}" for k in range(findings * k)] for k in (1, 2)]
    monkeypatch.setattr("instrument.read.show.text.first_parts", lambda capture: first)
    capture = write([*steps(), *many], window={"truncated": True, "steps": 2, "reason": "a signal"})
    lines = log_block(capture, Path("table.txt"), width).split("\n")
    assert lines[:findings] == first[0]
    assert 33 <= len(lines) <= 40
    assert lines[-2:] == ["", "All of it: table.txt"]
    assert max(map(len, lines)) <= width if width >= 80 else 80
    assert "Truncated after 2 steps: a signal." in lines
    tables = [line for line in lines if line.startswith(("Ranges", "Operators"))]
    assert len(tables) == (1 if findings else 2), "a table without room is left out"
    assert not [line for line in lines if "left out" in line or str(capture.folder) in line]


def test_diagnosed_once(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    count, diagnose = [0], of_one.diagnose

    def counted(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        return diagnose(*arguments, **options)

    monkeypatch.setattr(of_one, "diagnose", counted)
    TableSink().write(capture, capture.folder)
    assert count == [1]


def test_sentences_have_at_most_eighty_columns(write: Write) -> None:
    text = render(write(steps() + kernels(), modules_not_seen=[f"module{k}" for k in range(20)]))
    sentences = [part for part in text.split("\n\n") if "---" not in part and "/" not in part]
    assert len(sentences) >= 3
    assert max(len(line) for part in sentences for line in part.split("\n")) <= 80


def test_the_log_has_no_more_rows_and_tables_than_the_sink(write: Write) -> None:
    block = log_block(write(steps()), Path("table.txt"), 80, ranges=False, rows=1)
    assert block.startswith("steps_3-4: "), "one table alone has no verdict"
    assert "Operators, 1 of 2" in block


@pytest.mark.parametrize(
    ("ranks", "rank", "lowest"),
    [
        ("all", 0, 0),
        ("all", 3, 0),
        ("first_per_node", 8, 0),
        ([2, 5], 2, 2),
        ([5, 2], 5, 2),
        (None, 1, 0),
    ],
)
def test_of_several_ranks_the_lowest_logs_it(
    write: Write, tmp_path: Path, log: Log, ranks: Any, rank: int, lowest: int
) -> None:
    capture = write(steps(), rank=rank, config={"ranks": ranks})
    TableSink().write(capture, tmp_path)
    text = (tmp_path / "table.txt").read_text().rstrip("\n")
    assert text == render(capture)
    one_line = (
        f"The table of {capture.name} is in its file table.txt; only rank {lowest} logs its table."
    )
    block = log_block(capture, tmp_path / "table.txt", 80)
    assert log == [f"\n{block}" if rank == lowest else f"INFO {one_line}"]


def test_braces_and_tags_in_names_do_not_disturb_the_log(write: Write, log: Log) -> None:
    capture = write([annotation("{loss} <red>x</red>", 0, 10)])
    TableSink().write(capture, capture.folder)
    assert "{loss} <red>x</red>" in log[0]


def test_device_columns_where_a_device_was_recorded(write: Write) -> None:
    text = render(
        write(steps() + kernels(), devices=["NVIDIA H200", "NVIDIA H200"], rank=1, world_size=4)
    )
    heading = "steps_3-4: steps 3–4, torch 2.13.0+cpu, NVIDIA H200, rank 1 of 4"
    assert heading in text.splitlines()
    assert headings(text, "Ranges")[-1] == "device"
    assert [row[-1] for row in cells(text, "Ranges")] == ["100.0 µs", "100.0 µs", "-"]
    assert [row[5] for row in cells(text, "Ranges")] == ["0 %", "100 %", "0 %"]
    assert {"self device", "device", "device share"} <= set(headings(text))
    by_device = render(write(steps() + kernels(), "again"), sort="self_cuda_time_total", rows=1)
    assert names(by_device) == ["aten::mm", "(2 other operators)", "(in no operator)"]
    assert "Operators, 1 of 3, by self device" in by_device


def test_device_work_without_a_launch_is_told_unless_it_is_a_trifle(write: Write) -> None:
    def shown(folder: str, duration: int) -> str:
        stray = {**kernels()[-1], "ts": 5000, "dur": duration, "args": {"correlation": 987}}
        return render(write([*steps(), *kernels(), stray], folder))

    # 100 of 500 µs have a launch in a step; the stray 400 µs run after the last step.
    assert shown("much", 400).split("\n\n")[-1] == (
        "Coverage below 95 %: device time with a launch 20.0 %. `instrument show\n"
        "--coverage` says why."
    )
    assert "(no launch)" in shown("again", 400), "among the ranges"
    assert "Coverage" not in shown("little", 5)
    assert "Coverage" not in render(write(steps(), "none"))


def test_operators_include_runtime_calls_and_waits(write: Write) -> None:
    events = [
        *steps(),
        annotation("enumerate(DataLoader)#_Iter.__next__", 150, 20),
        annotation("a moment (mark)", 180, 1),
        call("cudaDeviceSynchronize", 2500, 300),
        call("hipMemcpyWithStream", 2900, 200),
        call("cudaLaunchKernel", 3200, 50),
    ]
    capture = write(events)
    assert names(render(capture)) == [
        "aten::mm", "cudaDeviceSynchronize (waiting)", "hipMemcpyWithStream (waiting)",
        "aten::relu", "cudaLaunchKernel", "(in no operator)",
    ]  # fmt: skip
    kinds = {row.name: row.kind for row in capture.operators}
    assert kinds == {
        "ProfilerStep*": "step",
        "forward": "range",
        "attention": "range",
        "aten::mm": "operator",
        "aten::relu": "operator",
        "enumerate(DataLoader)#_Iter.__next__": "loader",
        "a moment (mark)": "mark",
        "cudaDeviceSynchronize": "wait",
        "hipMemcpyWithStream": "wait",
        "cudaLaunchKernel": "runtime",
    }


def test_backward_is_shown_where_there_was_any(write: Write) -> None:
    node = {"Sequence number": 5, "Fwd thread id": 1}
    events = [
        *steps(),
        span("aten::t", 210, 5, Sequence_number=5),
        span("TBackward0", 1700, 60, **node),
    ]
    unknown = span("AddBackward0", 1770, 7, Sequence_number=99, Fwd_thread_id=1)
    text = render(write([*events, unknown]))
    assert headings(text, "Ranges")[-5:] == ["share", "self total", "total", "forward", "backward"]
    assert [row[-5:] for row in cells(text, "Ranges")] == [
        ["20 %", "400.0 µs", "1.260 ms", "1.200 ms", "60.00 µs"],
        ["46 %", "860.0 µs", "860.0 µs", "800.0 µs", "60.00 µs"],
        ["0.7 %", "7.000 µs", "-", "-", "-"],
        ["33 %", "733.0 µs", "-", "-", "-"],
    ]
    assert names(text, "Ranges")[2:] == ["(backward of no range)", "(no range)"]
    assert "backward" not in headings(render(write(steps(), "without")), "Ranges")


def test_a_window_cut_short_says_so(write: Write) -> None:
    window = {"steps": 2, "truncated": True, "reason": "exception ValueError"}
    for planned, of in ((5, " of 5"), (None, "")):
        capture = write(steps(), f"of {planned}", window=window | {"planned_steps": planned})
        heading = next(part for part in render(capture).split("\n\n") if part.startswith("of "))
        assert heading.split("\n")[1] == f"Truncated after 2{of} steps: exception ValueError."


def test_options_that_leave_out(capture: Capture) -> None:
    without = render(capture, ranges=False)
    assert "Ranges" not in without
    assert "Operators" in without
    alone = render(capture, operators=False)
    assert "Operators" not in alone
    assert "Not recorded" not in alone
    assert alone.endswith("\n(no range)       -         -             -   40 %    800.0 µs")


def test_rows_and_sort(capture: Capture) -> None:
    one, rest = ["aten::mm", "(1 other operator)"], ["(in no operator)"]
    assert names(render(capture, rows=1)) == [*one, *rest]
    both = ["aten::mm", "aten::relu", *rest]
    assert names(render(capture, sort="cpu_ns", rows=3)) == both
    assert names(render(capture, sort="cpu_time", rows=1)) == [*one, *rest]
    assert names(render(capture, sort="name")) == both


def test_of_many_ranges_those_with_the_largest_shares_come_first(write: Write) -> None:
    """Five outermost ranges have almost no own time; a deep one has nine tenths."""
    events = [annotation(f"phase{k}", 100 * k, 10) for k in range(4)]
    events += [annotation("step", 1000, 1000), annotation("forward", 1001, 998)]
    events += [annotation("model", 1002, 996), annotation("attention", 1003, 994)]
    events += [annotation("tiny", 3000, 20)]
    text = render(write(events), rows=3)
    assert "Ranges, 3 of 9, by share; share = self total" in text
    shown = names(text, "Ranges")
    assert shown == ["step/forward/model/attention", "tiny", "phase0", "(6 other ranges)"]
    assert cells(text, "Ranges")[3][-2:] == ["3.4 %", "36.00 µs"]
    tree = render(write(events, "all"), rows=9)
    assert "      attention" in tree


def test_of_a_long_path_its_inner_end_is_shown(write: Write) -> None:
    names = ["outer" * 5, "middle" * 4, "deep" * 3]
    events = [annotation(name, k, 1000 - 2 * k) for k, name in enumerate(names)]
    text = render(write([*events, annotation("m" * 70, 2000, 900)]), rows=2)
    shown = [row[0] for row in cells(text, "Ranges")[:2]]
    assert shown == [f"…/{names[1]}/{names[2]}", f"{'m' * 44}…{'m' * 15}"]


def test_a_step_of_the_optimizer_that_runs_the_training_step_says_so(write: Write) -> None:
    events = [
        annotation("Optimizer.step#Adam.step", 0, 100),
        annotation("training_step", 10, 60),
        made("aten::mul", 20, 40, 1),
        node("MulBackward0", 72, 10, 1),
        annotation("Optimizer.step#SGD.step", 200, 100),
        span("aten::add_", 210, 80),
    ]
    assert names(render(write(events)), "Ranges")[:3] == [
        "Optimizer.step#Adam.step (with closure)",
        "training_step",
        "Optimizer.step#SGD.step",
    ]


def test_columns_asked_for(capture: Capture) -> None:
    text = render(capture, columns=["calls", "cpu_time", "self_cuda_time_total", "cpu_ns_per_step"])
    assert headings(text) == ["name", "calls", "CPU per call", "self device"]
    assert headings(text, "Ranges") == ["name", "calls", "self device", "CPU per step"]
    assert all(line.endswith("  -") for line in block(text, "Operators")), "unknown is never 0"
    assert "Not recorded" not in text


def test_a_sort_key_that_was_not_recorded(capture: Capture) -> None:
    text = render(capture, sort="self_device_ns")
    assert "Operators, 2 of 2, by self CPU; self device was not recorded" in text
    assert names(text)[0] == "aten::mm"


def test_by_input_shapes(write: Write) -> None:
    other = span("aten::mm", 2000, 750, Input_Dims=[[2, 2], [2, 2]])
    text = render(write([*steps(), other]), by="input_shapes", sort="self_cpu_ns", rows=3)
    assert [row[:3] for row in cells(text)] == [
        ["aten::mm", "1", "750.0 µs"],
        ["[[2, 2], [2, 2]]"],
        ["aten::mm", "2", "600.0 µs"],
        ["[[8, 3], [3, 4]]"],
        ["aten::relu", "2", "100.0 µs"],
        ["[[8, 4]]"],
        ["(in no operator)", "-", "1.300 ms"],
    ]


def test_by_stack_shows_the_innermost_frames(tmp_path: Path) -> None:
    capture = Capture.load(record(tmp_path / "real.json", with_stack=True))
    lines = block(render(capture, by="stack", stack_depth=2, rows=50), "Operators")
    at = next(i for i, line in enumerate(lines) if line.startswith("aten::mm"))
    assert (
        lines[at + 1].startswith("    <built-in method matmul") or "inner_function" in lines[at + 1]
    )
    frames = [line for line in lines[at + 1 : at + 4] if line.startswith("    ")]
    assert len(frames) <= 2
    assert any("inner_function" in line for line in frames)
    assert not any(";" in line for line in lines)


def test_what_is_short_has_a_column_and_a_path_a_line_of_its_own(write: Write) -> None:
    capture = write([*steps(), *kernels(), span("aten::add.Tensor", 450, 50)])

    def shown(by: By) -> list[list[str]]:
        return cells(render(capture, by=by, sort="name", columns=["calls"], rows=50))

    products = {
        "step": [["aten::mm", "3", "1"], ["aten::mm", "4", "1"]],
        "thread": [["aten::mm", "1/1", "2"]],
        "device": [["aten::mm", "0", "2"]],
    }
    for by, rows in products.items():
        assert [row for row in shown(by) if row[0] == "aten::mm"] == rows
        assert headings(render(capture, by=by))[:3] == ["name", by, "calls"]
    assert ["aten::add", "Tensor", "1"] in shown("overload")
    by_range = shown("range")
    at = by_range.index(["aten::mm", "2"])
    assert by_range[at + 1] == ["forward/attention"]
    at = by_range.index(["aten::relu", "2"])
    assert len(by_range) == at + 1 or len(by_range[at + 1]) == 2, "outside of all"


OVERLOADS = "profiler.experimental_config={capture_overload_names: true}"


def test_every_grouping_of_the_capture_is_an_option() -> None:
    assert get_args(By) == ("name", *GROUPINGS)
    needs = {by: TableSink(by=by).needs for by in get_args(By)}
    assert {by: flags for by, flags in needs.items() if flags} == {
        "input_shapes": ("record_shapes",),
        "input_types": ("record_shapes",),
        "stack": ("with_stack",),
    }


@pytest.mark.parametrize(
    ("by", "what", "remedy"),
    [
        ("input_shapes", "input shapes", "record it with profiler.record_shapes=true"),
        ("input_types", "input types", "record it with profiler.record_shapes=true"),
        ("stack", "stacks", "record it with profiler.with_stack=true"),
        ("overload", "overloads", f"record it with {OVERLOADS}"),
        ("step", "steps", "call session.step() after each step"),
        ("device", "device work", "record it with a device among profiler.activities"),
        ("range", "ranges", "mark code with @profiled"),
    ],
)
def test_grouping_by_what_was_not_recorded(write: Write, by: By, what: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as error:
        render(write([span("aten::mm", 0, 10)]), by=by)
    assert str(error.value) == f"steps_3-4 holds no {what} to group operators by: {remedy}."


def test_a_bare_trace_tells_what_it_can(tmp_path: Path) -> None:
    trace = record(tmp_path / "real.json")
    verdict, *others = render(Capture.load(trace)).split("\n\n")
    assert verdict.startswith("The recording takes ")
    lines = "\n\n".join(others).splitlines()
    assert lines[:2] == ["real: no steps marked", str(trace)]
    assert lines[-1] == "Not recorded: device times, memory."
    assert any(line.startswith("block ") for line in lines)
    assert "CPU per step" not in lines[4]


def test_nothing_to_show(write: Write) -> None:
    text = render(write([]))
    assert "No ranges: mark code with @profiled, or give the session a model." in text
    assert "No operators." in text


def test_lines_stay_narrow_whatever_the_names(write: Write) -> None:
    long = "torch::autograd::very::long::" + "x" * 200
    events = [*steps(), *kernels(), span(long, 3000, 400), annotation(long, 4000, 400)]
    text = render(write(events))
    assert max(map(len, text.splitlines()[2:])) <= 140
    assert text.count("…") == 2


def test_what_is_least_missed_goes_where_device_and_memory_make_it_too_wide(write: Write) -> None:
    used = [allocation(300, 4096, 1, 4096), allocation(310, 3 * MIB, 1, 3 * MIB, device=0)]
    capture = write([*steps(), *kernels(), *used])
    text = render(capture)
    assert max(map(len, text.splitlines()[2:])) <= 140
    assert headings(text)[-4:] == ["device", "self CPU memory", "self device memory", "flops"]
    said = "\n3 columns left out: share, CPU memory, device memory; --columns all shows them."
    assert text.endswith(said), "the share of the device decides, so it stays"
    assert "Not recorded" not in text
    assert "CPU memory" in headings(render(capture, sort="cpu_bytes")), "what decides is shown"
    asked = [
        "cpu_bytes", "device_bytes", "self_cpu_bytes", "self_device_bytes", "cpu_ns", "device_ns",
        "flops",
    ]  # fmt: skip
    asked += ["self_cpu_ns", "self_device_ns", "share", "calls"]
    text = render(capture, columns=asked, ranges=False)
    assert len(headings(text)) + len(headings(text, "name")) == 13, "what was asked for is shown"
    assert max(map(len, text.splitlines()[2:])) <= 140
    assert "Too wide" not in text
    product = next(line for line in block(text, "Operators") if line.startswith("aten::mm"))
    assert re.split(r"  +", product)[1:5] == ["4.00 KiB", "3.00 MiB", "4.00 KiB", "3.00 MiB"]


def test_what_is_least_missed_of_kernels_goes_where_it_makes_them_too_wide(write: Write) -> None:
    shape = {"grid": [100000, 20000, 30000], "block": [1024, 1024, 1024], "blocks per SM": 3.25}
    events = [*steps(), *kernels()]
    for event in events:
        if event["cat"] == "kernel":
            event["name"] = "void at::native::" + "x" * 60
            event["args"] |= {**shape, "est. achieved occupancy %": 37}
    text = view_text(write(events), "kernels")
    assert max(map(len, text.splitlines()[:-1])) <= 140
    said = "3 columns left out: grid, block, occupancy covered; --columns all shows them."
    assert text.splitlines()[-1] == said
    assert "grid" in headings(
        view_text(write(events, "again"), "kernels", columns=["grid"]), "Kernels"
    )


def test_a_column_sorted_by_is_shown(write: Write) -> None:
    capture = write(steps() + kernels())
    assert "device per call" not in headings(render(capture))
    assert "device per call" in headings(render(capture, sort="cuda_time"))


def test_no_zero_stands_for_what_is_unknown(capture: Capture) -> None:
    assert not re.search(r"\b0 (ns|B)\b|\s0\s", render(capture))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rows": 0}, " sink's option 'rows' should be a positive number, or -1 for all, not 0."),
        ({"by": "shapes"}, " sink's option 'by' cannot be 'shapes'; did you mean 'input_shapes'?"),
        ({"sort": "cup_ns"}, " cannot be sorted by 'cup_ns'; did you mean 'cpu_ns'?"),
        ({"columns": ["calls", "cup_ns"]}, " has no column 'cup_ns'; did you mean 'cpu_ns'?"),
    ],
)
def test_wrong_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        TableSink(**options)
    assert str(error.value) == f"The table{sentence}"


def test_a_word_far_from_all_gets_the_whole_list(capture: Capture) -> None:
    with pytest.raises(ConfigError) as error:
        render(capture, sort="zzz")
    assert str(error.value).startswith(
        "The table cannot be sorted by 'zzz'; choose from 'name', 'calls', 'self_cpu_ns',"
    )


def test_every_column_of_the_capture_can_be_shown_and_sorted_by(capture: Capture) -> None:
    assert set(capture.operators.columns) - {"kind"} <= set(OPERATOR_COLUMNS)
    assert {*TORCH_NAMES.values()} <= set(OPERATOR_COLUMNS)
    assert set(capture.ranges.columns) - {"path", "depth"} == set(RANGE_COLUMNS)
    for column in OPERATOR_COLUMNS:
        assert names(render(capture, sort=column, columns=[column])), column
    for torch_name in TORCH_NAMES:
        assert TableSink(sort=torch_name, columns=[torch_name]).columns == [TORCH_NAMES[torch_name]]


def test_torch_calls_a_device_by_its_kind() -> None:
    for key in (
        "{}_time",
        "{}_time_total",
        "self_{}_time_total",
        "{}_memory_usage",
        "self_{}_memory_usage",
    ):
        for kind in ("xpu", "mtia", "hpu", "privateuse1", "device"):
            assert check_sort(key.format(kind)) == check_sort(key.format("cuda"))


def test_rows_of_minus_one_are_all(capture: Capture) -> None:
    assert render(capture, rows=-1) == render(capture, rows=1000)
    assert "Operators, 2 of 2" in render(capture, rows=-1)
    assert len(names(view_text(capture, "operators", rows=-1), "Operators")) == 5
    assert TableSink(rows=-1).rows == -1
