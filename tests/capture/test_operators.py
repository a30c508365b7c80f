"""The operator table: equal to torch's own, and honest where torch's is not."""

from __future__ import annotations

import re

import pytest
import torch
from torch.profiler import record_function

from capture.conftest import BODIES, COLUMNS, convolutions, record
from capture.traces import allocation, annotation, capture, frame, kernel, read, span
from instrument.capture.operators import operators
from instrument.errors import ConfigError

SEEN = {  # what each recording must hold for a comparison to mean anything
    "convolutions": {"ProfilerStep*", "aten::convolution_backward", "aten::native_batch_norm", "aten::addmm"},
    "transformer": {"aten::native_layer_norm_backward", "aten::bmm", "[memory]"},
    "lstm": {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "[memory]"},
    "checkpointed": {"block", "aten::embedding", "EmbeddingBackward0", "[memory]"},
    "threaded": {"waiting", "<forked function>", "[memory]"},
}
ALWAYS = {"forward", "Optimizer.step#Adam.step", "aten::add_"}


def values(table, *key: str) -> dict:
    rows = {tuple(getattr(row, k) for k in key): tuple(getattr(row, c) for c in COLUMNS) for row in table}
    assert len(rows) == len(table), "two rows of one key"
    return {k[0] if len(k) == 1 else k: row for k, row in rows.items()}


@pytest.mark.parametrize("name", BODIES)
def test_every_row_equals_torch_to_the_nanosecond(recordings, name) -> None:
    recording = recordings(name)
    assert recording.by_name.keys() >= SEEN[name] | ALWAYS
    assert len(recording.by_name) > 40
    assert values(operators(recording.capture.events, rules="torch"), "name") == recording.by_name


@pytest.mark.parametrize("name", BODIES)
def test_every_row_by_shapes_equals_torch_to_the_nanosecond(recordings, name) -> None:
    recording = recordings(name)
    assert len(recording.by_shapes) > len(recording.by_name) > 40
    table = operators(recording.capture.events, rules="torch").by("input_shapes")
    assert values(table, "name", "input_shapes") == recording.by_shapes


@pytest.mark.parametrize("name", BODIES.keys() - {"threaded"})
def test_on_one_thread_our_own_rules_say_the_same(recordings, name) -> None:
    recording = recordings(name)
    table = recording.capture.operators
    assert values(table, "name") == recording.by_name
    assert values(table.by("input_shapes"), "name", "input_shapes") == recording.by_shapes


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
    assert theirs["waiting"][3] >= 120 * 60 * 4, "torch no longer counts the other thread's memory"
    assert waiting.host_bytes == 0
    kept = sum(row.self_host_bytes for row in recording.capture.operators)
    assert kept == int(recording.capture.events.memory.size_bytes.sum())


def test_with_python_frames_torchs_rules_have_them_as_rows(tmp_path) -> None:
    recording = record(tmp_path / "trace.json", convolutions(), with_stack=True)
    events = recording.capture.events
    assert values(operators(events, rules="torch"), "name") == recording.by_name
    frames = {name for name in recording.by_name if "conftest.py" in name}
    assert frames
    assert not frames & {row.name for row in operators(events)}


def test_lists_of_tensors_have_no_shape_in_torchs_grouping(tmp_path) -> None:
    def body() -> None:
        torch._foreach_add_([torch.ones(2), torch.ones(3)], 1.0)
        torch.cat([torch.ones(2), torch.ones(3)])

    recording = record(tmp_path / "trace.json", body)
    assert ("aten::cat", "[[], []]") in recording.by_shapes
    table = operators(recording.capture.events, rules="torch").by("input_shapes")
    assert values(table, "name", "input_shapes") == recording.by_shapes


def test_an_unfinished_range_is_a_row(tmp_path) -> None:
    left_open = record_function("open")

    def body() -> None:
        left_open.__enter__()
        torch.ones(3) + 1

    recording = record(tmp_path / "trace.json", body)
    left_open.__exit__(None, None, None)
    row = recording.capture.operators.where(name="open")[0]
    assert row.calls == recording.by_name["open"][0] == 1
    assert row.host_ns > row.self_host_ns > 0


def test_utility_operators_are_left_out_and_steps_share_a_name(tmp_path) -> None:
    table = capture(
        tmp_path,
        [
            annotation("ProfilerStep#3", 0, 10),
            annotation("ProfilerStep#4", 10, 10),
            span("aten::is_leaf", 1, 1),
            span("profiler::_record_function_enter_new", 3, 1),
            span("aten::add", 5, 2),
        ],
    ).operators
    assert [(r.name, r.calls, r.self_host_ns) for r in table] == [("ProfilerStep*", 2, 18000), ("aten::add", 1, 2000)]


def test_folding_needs_an_only_child_of_the_same_name(tmp_path) -> None:
    table = capture(
        tmp_path,
        [
            *(span("chain", start, 10 - 2 * start) for start in range(3)),
            *(span("pair", 20, 10), span("pair", 21, 2), span("pair", 24, 2)),
            *(span("mixed", 40, 10), span("other", 41, 8), span("mixed", 42, 6)),
        ],
    ).operators
    rows = {r.name: (r.calls, r.host_ns, r.self_host_ns) for r in table}
    assert rows["chain"] == (1, 10000, 10000)
    assert rows["pair"] == (3, 14000, 10000)
    assert rows["mixed"] == (2, 16000, 8000)
    assert rows["other"] == (1, 8000, 2000)


def test_annotations_and_operators_of_one_name_stay_apart(tmp_path) -> None:
    table = capture(tmp_path, [span("x", 0, 1), annotation("x", 5, 2), span("x", 9, 1)]).operators
    assert [(r.name, r.calls, r.host_ns) for r in table] == [("x", 2, 2000), ("x", 1, 2000)]


GPU = [
    annotation("forward", 0, 100, External_id=1),
    span("aten::linear", 10, 50, External_id=2),
    span("aten::addmm", 20, 30, External_id=3),
    span("cudaLaunchKernel", 30, 5, cat="cuda_runtime", External_id=3, correlation=50),
    span("cudaLaunchKernel", 70, 5, cat="cuda_runtime", External_id=1, correlation=51),
    kernel("gemm", 40, 8, External_id=3, correlation=50),
    kernel("split", 50, 4, External_id=3, correlation=50),
    kernel("copy", 80, 2, External_id=1, correlation=51),
    span("forward", 40, 42, cat="gpu_user_annotation", tid=100, External_id=1),
]


def device_times(table):
    return {r.name: (r.device_ns, r.self_device_ns) for r in table}


def test_kernels_belong_to_the_operator_that_launched_them(tmp_path) -> None:
    assert device_times(capture(tmp_path, GPU).operators) == {
        "forward": (14000, 2000),
        "aten::linear": (12000, 0),
        "aten::addmm": (12000, 12000),
        "cudaLaunchKernel": (0, 0),
    }


def test_torchs_rules_take_the_devices_copy_of_a_range_for_a_kernel(tmp_path) -> None:
    table = operators(read(tmp_path, GPU), rules="torch")
    assert device_times(table)["forward"] == (56000, 44000)


def test_a_launch_takes_self_time_from_its_operator(tmp_path) -> None:
    table = capture(tmp_path, GPU).operators
    assert table.where(name="aten::addmm")[0].self_host_ns == 25000
    assert table.where(name="cudaLaunchKernel")[0].calls == 2


def test_where_the_external_id_only_repeats_the_correlation_the_launch_tells(tmp_path) -> None:
    events = [
        span("aten::relu", 0, 10, External_id=9),
        span("aten::add", 20, 10, External_id=50),  # the same number as a correlation, by chance
        span("cudaLaunchKernel", 3, 2, cat="cuda_runtime", External_id=50, correlation=50),
        kernel("relu", 40, 7, External_id=50, correlation=50),
    ]
    times = device_times(capture(tmp_path, events).operators)
    assert times == {"aten::relu": (7000, 7000), "cudaLaunchKernel": (0, 0), "aten::add": (0, 0)}


def test_a_launch_counts_on_the_thread_of_its_operator(tmp_path) -> None:
    events = [
        span("aten::add", 0, 10, External_id=4),
        span("cudaLaunchKernel", 3, 2, cat="cuda_runtime", tid=-99, External_id=4, correlation=50),
        kernel("add", 40, 7, External_id=4, correlation=50),
    ]
    assert capture(tmp_path, events).operators[0].self_host_ns == 8000


def test_folded_calls_keep_their_kernels_but_not_by_torchs_rules(tmp_path) -> None:
    events = [
        span("aten::copy_", 0, 20, External_id=1),
        span("aten::copy_", 2, 10, External_id=2),
        kernel("outer", 30, 5, External_id=1, correlation=70),
        kernel("inner", 40, 3, External_id=2, correlation=71),
    ]
    assert device_times(capture(tmp_path, events).operators) == {"aten::copy_": (8000, 8000)}
    assert device_times(operators(read(tmp_path, events), rules="torch")) == {"aten::copy_": (3000, 3000)}


def test_device_work_launched_before_the_window_counts_nowhere(tmp_path) -> None:
    table = capture(tmp_path, [span("aten::add", 0, 10), kernel("k", 3, 5, External_id=99, correlation=4)]).operators
    assert device_times(table) == {"aten::add": (0, 0)}


def test_what_was_not_recorded_is_none_and_never_zero(tmp_path) -> None:
    row = capture(tmp_path, [span("aten::mm", 0, 10)]).operators[0]
    assert (row.host_ns, row.self_host_ns) == (10000, 10000)
    unknown = ("device_ns", "self_device_ns", "host_bytes", "self_host_bytes", "device_bytes", "self_device_bytes")
    assert {name: getattr(row, name) for name in (*unknown, "flops")} == dict.fromkeys((*unknown, "flops"))


def test_the_columns_are_those_agreed(tmp_path) -> None:
    table = capture(tmp_path, [span("aten::mm", 0, 10)]).operators
    times = ("host_ns", "self_host_ns", "device_ns", "self_device_ns")
    sizes = ("host_bytes", "self_host_bytes", "device_bytes", "self_device_bytes")
    assert table.columns == ("name", "calls", *times, *sizes, "flops")
    assert table.by("input_shapes").columns[:3] == ("name", "input_shapes", "calls")


MEMORY = [
    span("aten::empty", 0, 10),
    span("aten::inner", 2, 4),
    span("aten::far", 1, 8, tid=2),
    allocation(0, 1),  # both ends of a call belong to it
    allocation(3, 64),
    allocation(5, 4096, device_type=1),
    allocation(6, 32),
    allocation(10, 2),
    allocation(5, 1000, tid=2),
    allocation(30, -64),
    allocation(31, 7, tid=3),
]


def sizes(table):
    return {r.name: (r.calls, r.host_bytes, r.self_host_bytes, r.device_bytes, r.self_device_bytes) for r in table}


def test_memory_counts_on_its_own_thread(tmp_path) -> None:
    assert sizes(capture(tmp_path, MEMORY).operators) == {
        "aten::empty": (1, 99, 3, 4096, 0),
        "aten::far": (1, 1000, 1000, 0, 0),
        "aten::inner": (1, 96, 96, 4096, 4096),
        "[memory]": (2, -57, -57, 0, 0),
    }


def test_by_torchs_rules_memory_of_every_thread_counts(tmp_path) -> None:
    assert sizes(operators(read(tmp_path, MEMORY), rules="torch")) == {
        "aten::empty": (1, 1099, 3, 4096, 0),
        "aten::far": (1, 1096, 1096, 4096, 4096),
        "aten::inner": (1, 1096, 1096, 4096, 4096),
        "[memory]": (2, -57, -57, 0, 0),
    }


STACKED = [
    frame("train.py(3): main", 0, 100),
    frame("train.py(9): step", 10, 50),
    frame("<built-in method add of type object at 0x7f01>", 12, 10),
    span("aten::add", 13, 5),
    span("aten::add", 30, 5),
    span("aten::add", 80, 5),
    span("aten::add", 5, 5, tid=2),
]


def test_calls_group_by_their_innermost_frames(tmp_path) -> None:
    table = capture(tmp_path, STACKED).operators.by("stack", depth=2)
    assert {(r.stack, r.calls) for r in table} == {
        ("<built-in method add of type object>;train.py(9): step", 1),
        ("train.py(9): step;train.py(3): main", 1),
        ("train.py(3): main", 1),
        (None, 1),
    }
    assert sum(r.calls for r in capture(tmp_path, STACKED).operators.by("stack", depth=1)) == 4


def test_grouping_by_what_was_not_recorded_gives_none(tmp_path) -> None:
    table = capture(tmp_path, [span("aten::add", 0, 5)]).operators
    assert [r.input_shapes for r in table.by("input_shapes")] == [None]
    assert [r.stack for r in table.by("stack")] == [None]


def test_an_unknown_grouping_gets_one_sentence(tmp_path) -> None:
    sentence = "Operators cannot be grouped by 'shape'; choose input_shapes or stack."
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        capture(tmp_path, [span("aten::add", 0, 5)]).operators.by("shape")


def test_an_empty_trace_gives_an_empty_table(tmp_path) -> None:
    table = capture(tmp_path, []).operators
    assert len(table) == len(table.by("input_shapes")) == len(table.by("stack")) == 0
