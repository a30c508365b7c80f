"""The operator table: equal to torch's own, and honest where torch's is not."""

from __future__ import annotations

import re

import pytest
import real_traces
import torch
from builders import Event, allocation, annotation, call, capture, frame, kernel, span
from golden import Golden, rows_as_lines
from recording import export
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import record_function
from torch_rules import torch_table

from capture.conftest import COLUMNS, EXACT_MEMORY, INEXACT_ROWS, each_body, record
from capture.sums import assert_sums
from instrument.base.errors import ConfigError
from instrument.read.capture import Capture
from instrument.read.views.operators import GROUPINGS

SEEN = {  # what each recording must hold for a comparison to mean anything
    "convolutions": {
        "ProfilerStep*",
        "aten::convolution_backward",
        "aten::native_batch_norm",
        "aten::addmm",
    },
    "transformer": {"aten::native_layer_norm_backward", "aten::bmm", "[memory]"},
    "lstm": {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "[memory]"},
    "checkpointed": {"block", "aten::embedding", "EmbeddingBackward0", "[memory]"},
    "threaded": {"waiting", "<forked function>", "[memory]"},
}
ALWAYS = {"forward", "Optimizer.step#Adam.step", "aten::add_"}


def values(table, *key: str) -> dict:
    rows = {
        tuple(getattr(row, k) for k in key): tuple(getattr(row, c) for c in COLUMNS)
        for row in table
    }
    assert len(rows) == len(table), "two rows of one key"
    rows = {k: row for k, row in rows.items() if INEXACT_ROWS.isdisjoint(k)}
    return {k[0] if len(k) == 1 else k: row for k, row in rows.items()}


@pytest.mark.parametrize("name", each_body())
def test_every_row_equals_torch_to_the_nanosecond(recordings, name) -> None:
    """By torch's rules, by name and by shapes; by ours too, where there is one thread."""
    recording = recordings(name)
    assert recording.by_name.keys() >= (SEEN[name] | ALWAYS) - INEXACT_ROWS
    assert len(recording.by_name) > 40
    found, by_shapes = recording.capture, ("name", "input_shapes")
    assert values(torch_table(found.events), "name") == recording.by_name
    assert len(recording.by_shapes) > len(recording.by_name)
    assert values(torch_table(found.events, input_shapes=True), *by_shapes) == recording.by_shapes
    if name != "threaded":
        assert values(found.operators, "name") == recording.by_name
        assert values(found.operators_by("input_shapes"), *by_shapes) == recording.by_shapes


def test_calls_of_one_name_directly_inside_each_other_are_one(recordings) -> None:
    assert recordings("checkpointed").capture.operators.where(name="block")[0].calls == 3 * 3
    events = recordings("checkpointed").capture.events
    assert sum(events.named("block".__eq__)) == 3 * 3 * 2


def test_with_threads_times_are_torchs_and_memory_is_the_threads_own(recordings) -> None:
    recording = recordings("threaded")
    ours, theirs = values(recording.capture.operators, "name"), recording.by_name
    assert {k: v[:3] for k, v in ours.items() if k != "[memory]"} == {
        k: v[:3] for k, v in theirs.items() if k != "[memory]"
    }
    waiting = recording.capture.operators.where(name="waiting")[0]
    assert not EXACT_MEMORY or theirs["waiting"][3] >= 120 * 60 * 4, (
        "torch no longer counts the other thread's memory"
    )
    assert waiting.cpu_bytes == 0
    kept = sum(row.self_cpu_bytes for row in recording.capture.operators)
    assert kept == int(recording.capture.events.memory.size_bytes.sum())


def test_with_python_frames_torchs_rules_have_them_as_rows(recordings) -> None:
    recording = recordings("convolutions", with_stack=True)
    events = recording.capture.events
    frames = {name for name in recording.by_name if "conftest.py" in name}
    if not EXACT_MEMORY and not frames:
        pytest.skip("older torch has no rows for Python's frames")
    assert frames
    assert values(torch_table(events), "name") == recording.by_name
    ours = recording.capture.operators
    assert not frames & {row.name for row in ours}
    self_cpu_ns = list(COLUMNS).index("self_cpu_ns")
    (forward,) = ours.where(name="forward")
    assert forward.self_cpu_ns > recording.by_name["forward"][self_cpu_ns]


def test_lists_of_tensors_have_no_shape_in_torchs_grouping(tmp_path) -> None:
    def body() -> None:
        torch._foreach_add_([torch.ones(2), torch.ones(3)], 1.0)
        torch.cat([torch.ones(2), torch.ones(3)])

    recording = record(tmp_path / "trace.json", body)
    assert ("aten::cat", "[[], []]") in recording.by_shapes
    table = torch_table(recording.capture.events, input_shapes=True)
    assert values(table, "name", "input_shapes") == recording.by_shapes


def test_an_unfinished_range_is_a_row(tmp_path) -> None:
    left_open = record_function("open")

    def body() -> None:
        left_open.__enter__()
        torch.ones(3) + 1

    recording = record(tmp_path / "trace.json", body)
    left_open.__exit__(None, None, None)
    row = recording.capture.operators.where(name="open")[0]
    assert row.calls == 1
    assert recording.by_name.get("open", [1])[0] == 1, "older torch leaves it out"
    assert row.cpu_ns > row.self_cpu_ns > 0


GPU = [
    annotation("forward", 0, 100, External_id=1),
    span("aten::linear", 10, 50, External_id=2),
    span("aten::addmm", 20, 30, External_id=3),
    call("cudaLaunchKernel", 30, 5, External_id=3, correlation=50),
    call("cudaLaunchKernel", 70, 5, External_id=1, correlation=51),
    kernel("gemm", 40, 8, External_id=3, correlation=50),
    kernel("split", 50, 4, External_id=3, correlation=50),
    kernel("copy", 80, 2, External_id=1, correlation=51),
    span("forward", 40, 42, cat="gpu_user_annotation", External_id=1),
]


def device_times(table):
    return {r.name: (r.device_ns, r.self_device_ns) for r in table}


def test_device_work_whose_launch_is_not_in_the_trace_has_a_row(tmp_path) -> None:
    events = [
        annotation("ProfilerStep#3", 0, 20),
        span("aten::add", 0, 10, External_id=1),
        kernel("k", 3, 5, External_id=99, correlation=4),
        kernel("k", 30, 7, External_id=99, correlation=5),
        kernel("mine", 12, 3, External_id=1, correlation=6),
    ]
    found = capture(tmp_path, events)
    table = found.operators
    assert device_times(table) == {
        "ProfilerStep*": (3000, 0),
        "aten::add": (3000, 3000),
        "[no launch]": (12000, 12000),
    }
    (row,) = table.where(name="[no launch]")
    assert row.calls == 2
    assert {row.cpu_ns, row.self_cpu_ns, row.flops, row.share} == {None}
    (add,) = table.where(name="aten::add")
    assert (add.cpu_ns, add.self_cpu_ns) == (10_000, 10_000), "they stay known"
    assert (row.device_share, add.device_share) == (5 / 8, 3 / 8)
    unlaunched = {
        by: found.operators_by(by).where(name="[no launch]")
        for by in ("step", "device", "range", "thread", "stack")
    }
    assert [(r.step, r.calls) for r in unlaunched["step"]] == [(3, 1), (None, 1)]
    assert [r.device for r in unlaunched["device"]] == ["0"]
    assert [r.range for r in unlaunched["range"]] == [None]
    assert [r.thread for r in unlaunched["thread"]] == ["0/7"]


def test_what_a_row_does_not_know_of_some_calls_is_left_out_of_its_sum(tmp_path) -> None:
    """Of two products one has no shapes: 2 × 2 × 3 × 4 operations are known. Of the other operators none is."""
    events = [
        span("aten::mm", 0, 5, Input_Dims=[[2, 3], [3, 4]]),
        span("aten::mm", 10, 5),
        span("aten::relu", 20, 5, Input_Dims=[[2, 4]]),
    ]
    got = [(row.name, row.calls, row.flops) for row in capture(tmp_path, events).operators]
    assert got == [("aten::mm", 2, 48), ("aten::relu", 1, None)]


def test_a_grouping_is_sorted_and_filtered_like_every_table(tmp_path) -> None:
    events = [
        span("aten::mm", 0, 10, Input_Dims=[[2]]),
        span("aten::mm", 20, 5, Input_Dims=[[3]]),
        span("aten::add", 40, 50, Input_Dims=[[2]]),
        span("aten::mul", 100, 1, Input_Dims=[[2]]),
    ]
    by_shape = capture(tmp_path, events).operators_by("input_shapes").sort("self_cpu_ns")
    assert [(r.name, r.self_cpu_ns) for r in by_shape] == [
        ("aten::add", 50_000), ("aten::mm", 10_000), ("aten::mm", 5_000), ("aten::mul", 1_000),
    ]  # fmt: skip
    chosen = by_shape.where(name="aten::mm")
    assert [(r.input_shapes, r.calls) for r in chosen] == [("[[2]]", 1), ("[[3]]", 1)]
    assert [r.share for r in chosen] == [10 / 66, 5 / 66], "of the same whole as before"


MEMORY = [
    span("aten::empty", 0, 10),
    span("aten::inner", 2, 4),
    span("aten::far", 1, 8, tid=2),
    allocation(0, 1),  # both ends of a call belong to it
    allocation(3, 64),
    allocation(5, 4096, device=0),
    allocation(6, 32),
    allocation(10, 2),
    allocation(5, 1000, tid=2),
    allocation(30, -64),
    allocation(31, 7, tid=3),
]


STACKED = [
    frame("train.py(3): main", 0, 100),
    frame("train.py(9): step", 10, 50),
    frame("<built-in method add of type object at 0x7f01>", 12, 10),
    span("aten::add", 13, 5),
    span("aten::add", 30, 5),
    span("aten::add", 80, 5),
    span("aten::add", 5, 5, tid=2),
]


def test_an_unknown_grouping_gets_one_sentence(tmp_path) -> None:
    groupings = "input_shapes, input_types, stack, overload, thread, step, device, range or layer"
    sentence = f"Operators cannot be grouped by 'shape'; choose {groupings}."
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        capture(tmp_path, [span("aten::add", 0, 5)]).operators_by("shape")


def test_an_empty_trace_gives_an_empty_table(tmp_path) -> None:
    found = capture(tmp_path, [])
    assert len(found.operators) == len(found.operators_without_flops) == 0
    assert {what: len(found.operators_by(what)) for what in GROUPINGS} == dict.fromkeys(
        GROUPINGS, 0
    )


# One name at three depths: 10 µs around 8 and, through another operator, 4 with a kernel of 6 µs and 100 bytes.
RECURSIVE = [
    span("f", 0, 10, External_id=1, Input_Dims=[[1]]),
    span("g", 1, 8, External_id=2),
    span("f", 2, 4, External_id=3, Input_Dims=[[2]]),
    call("cudaLaunchKernel", 3, 1, External_id=3, correlation=9),
    kernel("k", 20, 6, External_id=3, correlation=9),
    allocation(4, 100),
    allocation(5, 50, device=0),
    span("f", 30, 5, External_id=4, Input_Dims=[[1]]),
    span("f", 31, 2, tid=2),
]


CASES = {
    # Of the steps' 20 µs, 2 are of aten::add. Shares are of the second step, since the first one does not count.
    "utility operators are left out and steps share a name": [
        annotation("ProfilerStep#3", 0, 10),
        annotation("ProfilerStep#4", 10, 10),
        span("aten::is_leaf", 1, 1),
        span("profiler::_record_function_enter_new", 3, 1),
        span("aten::add", 5, 2),
    ],
    # `chain` is one call, and so is `range`. Of `mixed`, 10 - 8 + 6 µs are its own, and 8 - 6 of `other`.
    "folding needs an only child of the same name": [
        *(span("chain", start, 10 - 2 * start) for start in range(3)),
        *(span("pair", 20, 10), span("pair", 21, 2), span("pair", 24, 2)),
        *(span("mixed", 40, 10), span("other", 41, 8), span("mixed", 42, 6)),
        *(annotation("range", 60, 10), span("range", 61, 8)),
    ],
    "annotations and operators of one name stay apart": [
        span("x", 0, 1),
        annotation("x", 5, 2),
        span("x", 9, 1),
    ],
    # Of their own: forward 100 - 50 - 5 µs, linear 50 - 30, addmm 30 - 5. addmm launched 8 + 4 of 14 µs, and forward 2.
    "kernels belong to the operator that launched them": GPU,
    "where the external id only repeats the correlation the launch tells": [
        span("aten::relu", 0, 10, External_id=9),
        span("aten::add", 20, 10, External_id=50),  # the same number as a correlation, by chance
        call("cudaLaunchKernel", 3, 2, External_id=50, correlation=50),
        kernel("relu", 40, 7, External_id=50, correlation=50),
    ],
    # 10 µs, of which 2 are of the launch, although it is on another thread.
    "a launch counts on the thread of its operator": [
        span("aten::add", 0, 10, External_id=4),
        call("cudaLaunchKernel", 3, 2, tid=-99, External_id=4, correlation=50),
        kernel("add", 40, 7, External_id=4, correlation=50),
    ],
    # Of their own: fused 100 - 80 µs, mine 80 - 5 - 5. `mine` launched 60 + 7 of 70 µs; the id tells of the other 3.
    "a launch belongs to what is around it and not to the operator further out that its id names": [
        span("mylib::fused", 0, 100, External_id=1),
        annotation("mine", 10, 80, External_id=2),
        span("cuLaunchKernel", 20, 5, cat="cuda_driver", External_id=1, correlation=7),
        kernel("triton", 30, 60, External_id=1, correlation=7),
        span("elsewhere", 0, 50, tid=2, External_id=9),
        span(
            "cuLaunchKernel", 40, 5, cat="cuda_driver", External_id=9, correlation=8
        ),  # around it on thread 1: "mine"
        kernel("second", 90, 7, External_id=9, correlation=8),
        kernel("no call", 120, 3, External_id=9, correlation=10),
    ],
    # 5 + 3 µs in one call.
    "folded calls keep their kernels": [
        span("aten::copy_", 0, 20, External_id=1),
        span("aten::copy_", 2, 10, External_id=2),
        kernel("outer", 30, 5, External_id=1, correlation=70),
        kernel("inner", 40, 3, External_id=2, correlation=71),
    ],
    "what was not recorded is none and never zero": [span("aten::mm", 0, 10)],
    "rows are in the order of their first calls": [
        span("b", 10, 1),
        span("a", 20, 1),
        span("c", 5, 1),
        span("a", 0, 1),
    ],
    # CPU bytes: inner 64 + 32, empty 1 + 2 more, far 1000, and in no operator 7 - 64.
    "memory counts on its own thread": MEMORY,
    # `f` lasts 10 + 5 + 2 µs, of which 8 - 4 are of `g` and 1 of the launch.
    "recursion counts once": RECURSIVE,
    "a launch is a runtime call and a synchronisation a wait": [
        call("cudaLaunchKernel", 0, 5, 1),
        call("cudaDeviceSynchronize", 10, 5, 2),
        span("aten::synchronize", 20, 5),
    ],
    # 3 of 3 + 9 µs.
    "the first operator of a trace has its device share": [
        span("aten::add", 0, 10, External_id=1),
        kernel("mine", 12, 3, External_id=1, correlation=6),
        kernel("k", 30, 9, External_id=99, correlation=5),
    ],
}


def test_operators_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for name, events in CASES.items():
        found = capture(tmp_path, events)
        assert_sums(found)
        told.append(f"---- {name}\n{rows_as_lines({'operator': found.operators})}")
    golden("operators.txt", "\n".join(told))


TYPED = [
    span("aten::mm", 0, 5, Input_type=["double", "double"]),
    span("aten::mm", 10, 5, Input_type=["float", "float"]),
    span("aten::cat", 20, 5, Input_type=[["float", "double"], "Scalar"]),
    span("aten::empty", 30, 5),
]
# `f` is five times inside itself, with an operator in each so that nothing folds.
ALTERNATING = [span("f", k, 20 - 2 * k, Input_Dims=[[k % 2]]) for k in range(5)]
ALTERNATING += [span("g", k + 0.2, 0.5) for k in range(4)]
UNKNOWN = [span("aten::add", 0, 5), allocation(9, 8)]
ONLY = [span("aten::add", 0, 5, External_id=1), kernel("k", 10, 5, External_id=1, correlation=9)]
OUTSIDE = [allocation(20, 8), span("aten::add.out", 0, 5, Input_Dims=[[2]])]
GROUPED = [
    annotation("ProfilerStep#7", 0, 50),
    annotation("ProfilerStep#8", 50, 50),
    annotation("forward", 5, 40),
    annotation("block", 10, 30),
    span("aten::add.Tensor", 12, 4, External_id=1),
    span("aten::add.Scalar", 20, 4, External_id=2),
    span("aten::add.Tensor", 45, 10, tid=2, External_id=3),  # begins in step 7 and ends in step 8
    span("aten::mm", 60, 9, External_id=4),
    span("aten::mm", 120, 9),
    *(
        {**kernel("k", 200 + 10 * n, 5, External_id=op, correlation=n), "pid": device}
        for n, (op, device) in enumerate([(1, 0), (4, 0), (4, 1)], start=50)
    ),
    allocation(80, 8),
    allocation(130, 8, tid=2),
]
# The events, by what they are grouped, and how.
GROUPINGS_BY_HAND: list[tuple[list[Event], str, dict[str, int]]] = [
    *((GROUPED, by, {}) for by in ("overload", "thread", "step", "device", "range")),
    (TYPED, "input_types", {}),
    *((STACKED, "stack", {"depth": depth}) for depth in (1, 2)),
    *((events, "input_shapes", {}) for events in (RECURSIVE, ALTERNATING, OUTSIDE)),
    *((OUTSIDE, "overload", {}), (ONLY, "device", {})),
    *((UNKNOWN, by, {}) for by in ("input_shapes", "input_types", "stack", "overload", "step", "device", "range")),
]  # fmt: skip


def test_groupings_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand: what is known of the calls of each group. What a trace cannot tell is unknown throughout."""
    told = []
    for events, by, options in GROUPINGS_BY_HAND:
        found = capture(tmp_path, events)
        grouped = found.operators_by(by, **options)
        assert grouped.columns == ("name", by, *found.operators.columns[1:])
        for column in ("calls", "self_cpu_ns", "self_device_ns", "self_cpu_bytes"):
            of_all = [
                sum(x or 0 for x in each.column(column)) for each in (grouped, found.operators)
            ]
            assert of_all[0] == of_all[1]
        told.append(f"---- by {by} {options or ''}".rstrip())
        columns = ("calls", "cpu_ns", "self_cpu_ns", "device_ns")
        told += [
            f"{row.name} | {getattr(row, by)}: {', '.join(f'{c} {getattr(row, c)}' for c in columns)}"
            for row in grouped
        ]
    golden("groupings.txt", "\n".join(told))


def test_shares_are_of_what_ran_in_steps(tmp_path) -> None:
    events = [annotation("ProfilerStep#3", 0, 20)]
    events += [span("aten::add", 0, 5), span("aten::add", 30, 10)]
    (row,) = capture(tmp_path, events).operators.where(name="aten::add")
    assert (row.self_cpu_ns, row.share) == (15_000, 5 / 20)


def test_overloads_equal_torchs_own(tmp_path) -> None:
    def body() -> None:
        torch.empty(2).fill_(1.0).add(1).add(torch.ones(2)).sum().sum(dim=0)

    config = _ExperimentalConfig(capture_overload_names=True)
    profiler = export(tmp_path / "trace.json", body, experimental_config=config)
    theirs = {
        (r.key, r.overload_name): (r.count, round(r.self_cpu_time_total * 1000))
        for r in profiler.key_averages(group_by_overload_name=True)
    }
    assert {
        ("aten::sum", ""),
        ("aten::sum", "dim_IntList"),
        ("aten::fill_", "Scalar"),
    } <= theirs.keys()
    found = Capture.load(tmp_path / "trace.json")
    ours = {(r.name, r.overload): (r.calls, r.self_cpu_ns) for r in found.operators_by("overload")}
    assert ours == theirs
    assert {r.name for r in found.operators} == {r.key for r in profiler.key_averages()}


def test_operators_that_no_rule_counted_are_named(tmp_path) -> None:
    table = capture(
        tmp_path,
        [
            annotation("forward", 0, 100, Input_Dims=[[1]]),
            span("aten::linear", 1, 10, Input_Dims=[[2, 3], [4, 3]]),
            span("aten::t", 2, 1, Input_Dims=[[4, 3]]),
            span("aten::addmm", 4, 4, Input_Dims=[[4], [2, 3], [3, 4]]),
            span("aten::copy_", 5, 1, Input_Dims=[[4]]),  # in one that counts
            span("aten::gelu", 20, 6, External_id=1, Input_Dims=[[2, 4]]),
            span("aten::gelu", 30, 3, Input_Dims=[[2, 4]]),
            span("aten::conv2d", 40, 9, Input_Dims=[[1, 1, 3], [1, 1, 3]]),
            span("aten::convolution", 41, 7, Input_Dims=[[1, 1, 3], [1, 1, 3]]),  # no arguments
            kernel("k", 60, 5, External_id=1, correlation=3),
        ],
    ).operators_without_flops
    assert table.columns == ("name", "has_rule", "calls", "cpu_ns", "device_ns")
    assert [tuple(row) for row in table] == [
        ("aten::gelu", False, 2, 9000, 5000),
        ("aten::t", False, 1, 1000, 0),
        ("aten::conv2d", True, 1, 9000, 0),
    ]
    nested = [span("aten::gelu", 0, 10), span("aten::copy_", 1, 2)]
    names = capture(tmp_path, nested).operators_without_flops.column("name")
    assert names == ["aten::gelu"], "the outermost alone, also where it is the first of the trace"
    without_device = capture(
        tmp_path, [span("aten::a", 0, 1), span("aten::b", 2, 5)]
    ).operators_without_flops
    got = [(row.name, row.device_ns) for row in without_device]
    assert got == [("aten::b", None), ("aten::a", None)]


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each())
def test_on_real_traces_every_grouping_holds_every_call_once(name) -> None:
    whole = real_traces.load(name)
    table = whole.operators
    for what in GROUPINGS:
        grouped = whole.operators_by(what)
        for column in ("calls", "self_cpu_ns", "self_device_ns", "self_cpu_bytes", "flops"):
            totals = [sum(value or 0 for value in each.column(column)) for each in (grouped, table)]
            assert totals[0] == totals[1], (what, column)
        assert all(row.self_cpu_ns <= row.cpu_ns for row in grouped if row.cpu_ns is not None)
