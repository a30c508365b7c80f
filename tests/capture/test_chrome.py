"""Trace files into columns: forms, times, odd fields; and the sentence for each bad file."""

from __future__ import annotations

import gzip
import json
import re
import threading
import tracemalloc
import zlib
from collections import Counter
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from builders import (
    allocation,
    annotation,
    call,
    kernel,
    read,
    span,
    step,
    synchronisation,
    write_trace,
)

from instrument.base.errors import TraceError, TraceWarning
from instrument.read.capture import Capture
from instrument.read.show.text import render
from instrument.read.trace import json_stream, reader
from instrument.read.trace.events import Details, Device
from instrument.read.views.stacks import stacks

pytestmark = pytest.mark.usefixtures("each_reader")
EVENTS = [
    span("a", 1.5, 2.25, External_id=3),
    span("b", 2, 1, cat="user_annotation"),
    allocation(2.5, -64),
]


def columns(events):
    return [
        (events.names[n], events.categories[c], start, end)
        for n, c, start, end in zip(
            events.name, events.category, events.start_ns.tolist(), events.end_ns.tolist()
        )
    ]


EXPECTED = [("a", "cpu_op", 1500, 3750), ("b", "user_annotation", 2000, 3000)]


def test_events_are_chosen_by_any_number_of_names(tmp_path) -> None:
    names = "abcabcdefg"
    events = read(tmp_path, [span(name, k, 1) for k, name in enumerate(names)])
    for wanted in ("", "b", "xy", "ace", "abcdef"):
        assert events.named(wanted.__contains__).tolist() == [name in wanted for name in names]


@pytest.mark.parametrize(
    "form", ["object", "list", "gzip", "gzip under another name", "indented", "args first"]
)
def test_every_form_gives_the_same_columns(tmp_path, form) -> None:
    text = json.dumps(
        EVENTS if form == "list" else {"traceEvents": EVENTS}, indent=form == "indented" or None
    )
    if form == "args first":
        text = json.dumps({"traceEvents": [dict(reversed(event.items())) for event in EVENTS]})
    path = tmp_path / ("trace.json.gz" if form == "gzip" else "trace.pt")
    path.write_bytes(gzip.compress(text.encode()) if "gzip" in form else text.encode())
    events = reader.read(path)
    assert columns(events) == EXPECTED
    assert events.external_id.tolist() == [3, 0]
    assert events.recorded == 3
    memory = events.memory
    got = (memory.time_ns.tolist(), memory.size_bytes.tolist(), memory.thread.tolist())
    assert got == ([2500], [-64], [0])


def test_other_phases_are_counted_and_left_out(tmp_path) -> None:
    others = [
        {"ph": phase, "name": "x", "pid": "p", "tid": 0, "ts": 1.0, "id": 1}
        for phase in "MsftbneCNOPDI"
    ]
    events = read(tmp_path, [*others, {"ph": "i", "name": "Record Window End", "ts": 3}, *EVENTS])
    assert columns(events) == EXPECTED
    assert (events.recorded, events.counters) == (len(others) + 4, 1)


@pytest.mark.parametrize(
    "text",
    [
        "4343210073805.789",  # torch 2.13
        "4429157367530.569",  # one product with 1000 would round to 570
        "7889399999999.999",  # the end of Kineto's quarter of a year
        "8796093022207.999",  # the last that a float holds
        "8796093022208.001",
        "1740461679582920",
        "1712195495997093.201",  # a float has quarters of a microsecond here
        "1712195495997093.2",
        "1712195495997093.999",
        "-1712195495997093.201",
        "0.001",
        "12.0015",
    ],
)
def test_times_are_exact_nanoseconds(tmp_path, text) -> None:
    path = tmp_path / "trace.json"
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": %s, "dur": 3.007, "args": {}}'
    instant = '{"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": %s, "args": {"Bytes": 1}}'
    path.write_text(f'{{"traceEvents": [{event % text}, {{"ph": "M"}}, {instant % text}]}}')
    events = reader.read(path)
    start = round(Decimal(text) * 1000)
    assert events.start_ns.tolist() == events.memory.time_ns.tolist() == [start]
    assert (events.end_ns - events.start_ns).tolist() == [3007]


def test_threads_are_numbers_or_names(tmp_path) -> None:
    spans = [
        span("a", 0, 1, tid="25738"),
        span("b", 2, 1, tid=25738),
        span("c", 3, 1, tid="stream 7"),
    ]
    events = read(tmp_path, [*spans, allocation(0.5, 8, tid=25738)])
    assert events.thread.tolist() == [0, 0, 1]
    assert events.threads == ((1, 25738), (1, "stream 7"))
    assert events.memory.thread.tolist() == [0]


def test_arguments_become_columns(tmp_path) -> None:
    shapes, concrete, types = [[2, 3], [[4], [5]]], ["", "[1, 1]"], ["float", "TensorList"]
    known = {"Input_Dims": shapes, "Concrete_Inputs": concrete, "Input_type": types}
    events = read(
        tmp_path,
        [
            span(
                "a",
                0,
                9,
                External_id=4,
                Sequence_number=8,
                Fwd_thread_id=2,
                finished=False,
                **known,
            ),
            span("b", 1, 1, **known),
            span("c", 2, 1, cat="python_function", Python_id=5, Python_parent_id=None),
            kernel("k", 3, 1, correlation=6, stream=18446744073709551615),
            {"ph": "X", "cat": "cpu_op", "name": "bare", "pid": 7, "tid": 1, "ts": 4},
        ],
    )
    assert events.external_id.tolist() == [4, 0, 0, 0, 0]
    assert events.sequence.tolist() == [8, -1, -1, -1, -1]
    assert events.forward_thread.tolist() == [2, 0, 0, 0, 0]
    assert events.finished.tolist() == [False, True, True, True, True]
    assert events.python_id.tolist() == [-1, -1, 5, -1, -1]
    assert events.python_parent.tolist() == [-1] * 5
    assert events.correlation.tolist() == [0, 0, 0, 6, 0]
    for codes, value in (
        (events.shapes, shapes),
        (events.concrete, concrete),
        (events.types, types),
    ):
        assert codes[0] == codes[1] >= 0
        assert json.loads(events.texts[codes[0]]) == value
        assert codes[2:].tolist() == [-1, -1, -1]
    assert events.duration_ns.tolist()[-1] == 0


def test_details_are_kept_of_collectives_graphs_waits_and_launches_alone(tmp_path) -> None:
    """A trace of torch's own layout is scanned, not decoded; the fourth kernel is in no graph."""
    collective = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 6,
        "Out msg nelems": 6,
        "Group size": 2,
        "Process Group Name": "1",
        "Process Group Description": "data",
        "Process Group Ranks": "[0, 1]",
        "Seq": 4,
    }
    waits = {
        "wait_on_stream": 7,
        "wait_on_cuda_event_id": 1,
        "wait_on_cuda_event_record_corr_id": 5170,
    }
    events = [
        span("record_param_comms", 0, 9, **collective),
        span("aten::mm", 10, 2, dtype="Float"),
        kernel("ncclKernel", 20, 5, correlation=3, **collective | {"Process Group Ranks": [0, 1]}),
        kernel("gemm", 30, 5, correlation=4, **{"graph id": 3, "graph node id": 2**33 + 1}),
        kernel("gemm", 40, 5, correlation=5, **{"graph id": 0, "graph node id": 0}),
        synchronisation("Stream Wait Event", 50, 1, **waits),
        call("hipLaunchKernel", 60, 1, 6, kernel="gemm"),
        call("hipLaunchKernel", 70, 1, 7, kernel=5),
        span("aten::mm", 80, 2, kernel="gemm"),
    ]
    devices = [
        {"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 2**36, "numSms": 132},
        {"id": "x"},
    ]
    info = ["Record counts: Out-of-range = 0", 3]
    for number, copies in enumerate((1, 300)):
        file = tmp_path / str(number)
        path = write_trace(file, events * copies, deviceProperties=devices, INFO=info, ERROR="no")
        found = reader.read(path)
        rows = [found.details[k] if k >= 0 else None for k in found.detail[:9].tolist()]
        assert (
            rows[0] == rows[2] == Details("allreduce", "Float", 6, 6, "[0, 1]", 2, "1", "data", 4)
        )
        assert rows[1] is rows[4] is None
        assert rows[3] == Details(graph=3, graph_node=2**33 + 1)
        assert rows[5] == Details(
            sync_kind="Stream Wait Event",
            waits_for_stream=7,
            waits_for_event=1,
            waits_for_correlation=5170,
        )
        assert rows[6] == Details(launched_kernel="gemm")
        assert rows[7] is rows[8] is None
        assert len(found.details) == 4
        got = found.devices
        assert got == (Device(0, "NVIDIA H100", 2**36, 132), Device(None, None, None, None))


def test_the_lower_case_external_id_of_torch_1_9_is_understood(tmp_path) -> None:
    event = span("k", 0, 1, cat="Kernel")
    event["args"] = {"external id": 12, "correlation": 3}
    assert read(tmp_path, [event]).external_id.tolist() == [12]


def test_fields_of_other_types_are_understood(tmp_path) -> None:
    odd = span("odd", 0, 1, correlation=-1, Input_Dims=[[1]])
    odd["args"] |= {"External id": "17", "Fwd thread id": "x", "Sequence number": 2.0}
    listed = span("listed", 1, 1)
    listed["args"] = ["a", "list"]
    worded = span("worded", 5, 1)
    worded |= {"ts": "5.25", "dur": "2", "name": None, "pid": None}
    events = read(tmp_path, [odd, listed, worded, {"no": "phase"}, {"ph": 3}, allocation(6, 8)])
    assert [name for name, *_ in columns(events)] == ["odd", "listed", ""]
    assert events.external_id.tolist() == [17, 0, 0]
    assert events.sequence.tolist() == [2, -1, -1]
    assert events.forward_thread.tolist() == [0, 0, 0]
    assert (events.start_ns.tolist()[2], events.end_ns.tolist()[2]) == (5250, 7250)
    assert events.memory.size_bytes.tolist() == [8]
    assert events.recorded == 6


def test_large_broken_times_beside_odd_fields_stay_exact(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '[{"ph": "X", "name": "a", "ts": 1712195495997093.201, "dur": 1, "args": {"External id": "17"}},'
        ' {"ph": "M", "ts": 0}]'
    )
    events = reader.read(path)
    assert (events.start_ns.tolist(), events.external_id.tolist()) == ([1712195495997093201], [17])


def test_a_call_of_a_c_function_ends_with_its_caller_at_the_latest(tmp_path) -> None:
    """CPython 3.12.1 reports no end for some of these calls, and torch lets them last to the end."""

    def frame(name, start, end, number, caller, thread=1):
        ids = {"Python_id": number, "Python_parent_id": caller}
        return span(name, start, end - start, cat="python_function", tid=thread, **ids)

    lost = "<built-in method __exit__ of X object>"
    spans = [
        frame("train.py(1): main", 0, 100, 1, None),
        frame("train.py(9): first", 10, 40, 2, 1),
        frame(lost, 20, 100, 3, 2),
        frame("train.py(9): second", 50, 80, 4, 1),
        span("aten::item", 60, 5, tid=1),
        frame("<built-in method backward>", 70, 75, 5, 4),
        frame("hook.py(3): in_backward", 90, 95, 6, 5, thread=2),
        frame("after.py(3): its_caller_is_long_gone", 96, 98, 7, 2),
    ]
    for order in (spans, spans[::-1]):
        events = read(tmp_path, order)
        names = [events.names[k] for k in events.name]
        ends = dict(zip(names, zip((events.end_ns / 1e3).tolist(), events.finished.tolist())))
        assert ends.pop(lost) == (40, False)
        assert ends == {e["name"]: (e["ts"] + e["dur"], True) for e in spans if e["name"] != lost}
        paths = [stack.frames for stack in stacks(events)]
        (stack,) = (path for path in paths if path[-1] == "aten::item")
        assert stack == ("train.py(1): main", "train.py(9): second", "aten::item")


def test_numbers_too_large_for_64_bits_do_not_stop_reading(tmp_path) -> None:
    assert read(tmp_path, [span("a", 0, 1, correlation=2**64 - 1)]).correlation.tolist() == [-1]


@pytest.mark.parametrize(
    "document", ['{"traceEvents": []}', "[]", '{"schemaVersion": 1, "traceEvents": [{"ph": "M"}]}']
)
def test_a_trace_without_events_is_a_trace(tmp_path, document) -> None:
    path = tmp_path / "trace.json"
    path.write_text(document)
    events = reader.read(path)
    assert (len(events), len(events.memory)) == (0, 0)


GOOD = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}).encode()
BAD = {
    "empty": b"",
    "blank": b" \n",
    "empty gzip": gzip.compress(b""),
    "cut short": GOOD[:60],
    "list cut short": b'[{"ph": "M"}',
    "gzip cut short": gzip.compress(GOOD)[:20],
    "not JSON": b"hello",
    "other JSON": b'{"a": 1}',
    "a number": b"3",
    "a list of numbers": b"[1, 2]",
    "events no list": b'{"traceEvents": {"a": 1}}',
    "no event is JSON": b'[{"ph": X}, {"ph": X}]',
    "durations without an end": json.dumps([span("a", n, 9e12) for n in range(600)]).encode(),
}


def test_a_bad_file_gets_one_sentence(tmp_path, monkeypatch, golden) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = bytearray(gzip.compress(GOOD))
    damaged[len(damaged) // 2] ^= 0xFF
    Path("folder").mkdir()
    for name, content in {**BAD, "damaged gzip": damaged}.items():
        Path(name).write_bytes(content)
    told = []
    for name in ("missing", "folder", *BAD, "damaged gzip"):
        with pytest.raises(TraceError) as raised:
            reader.read(Path(name))
        told.append(str(raised.value))
    # what zlib says of damaged bytes depends on its version
    told[-1] = re.sub(r"\(.*\)", "(…)", told[-1])
    golden("bad_traces.txt", "\n".join(told))


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_short_is_read_up_to_the_cut_and_says_so(tmp_path, packed) -> None:
    many = [span(f"a{n}", n, 1) for n in range(2000)]
    text = json.dumps({"traceEvents": many}).encode()
    path = written(tmp_path, gzip.compress(text)[:-200] if packed else text[:-200])
    events = reader.read(path)
    assert events.cut_short
    assert 1000 < len(events) == events.recorded < 2000
    assert events.names == tuple(f"a{n}" for n in range(len(events)))
    assert events.start_ns.tolist() == [1000 * n for n in range(len(events))]
    read = f"is cut short: only its first {len(events)} events could be read."
    with pytest.warns(TraceWarning) as warned:
        text = render(Capture.load(path))
    assert [str(each.message) for each in warned] == [
        f"The trace file {path} {read} Copy or record it again."
    ]
    assert f"The trace file {read}" in text
    assert not reader.read(written(tmp_path, json.dumps(many))).cut_short


def test_what_kineto_has_written_wrongly_is_read(tmp_path) -> None:
    at = "1712195495997093.20"
    shape = '{"ph": "X", "cat": "cpu_op", "name": %s, "pid": 7, "tid": 1, "ts": %s, "dur": 1, "args": {%s}}'
    odd = [
        shape % ('"nan"', f"{at}1", '"bandwidth": NaN, "External id": 5'),
        shape % ('"inf"', f"{at}2", '"bandwidth": -Infinity'),
        shape % (r'"C:\x\path \u12"', f"{at}3", ""),
        shape % ('"raw\ttab\x01"', f"{at}4", ""),
        shape % (r'"half \ud83d"', f"{at}5", '"a": NaN'),
    ]
    text = ('{"head": NaN, "traceEvents": [' + ", ".join(odd)).encode()
    text += (", " + shape % ('"bytes ?"', f"{at}6", "")).encode().replace(b"?", b"\xff") + b"]}"
    events = reader.read(written(tmp_path, text))
    assert events.names[:4] == ("nan", "inf", r"C:\x\path \u12", "raw\ttab\x01")
    assert events.names[4:] == ("half \ufffd", "bytes \ufffd")
    assert events.external_id.tolist()[0] == 5
    assert events.start_ns.tolist() == [1712195495997093201 + k for k in range(6)]


def test_no_text_holds_half_of_a_character(tmp_path) -> None:
    text = {"x": ["\ud800", {"\udfff": "\ud800"}]}
    args = dict.fromkeys(("Input Dims", "Concrete Inputs", "Input type", "Call stack"), text)
    args |= {"Collective name": "\ud800", "Process Group Ranks": ["\ud800"], "graph node id": 3}
    args |= {"str": "\ud800", "kernel": "\ud800", "grid": text, "bytes": "\ud800"}
    span = {"ph": "X", "name": "n\ud800", "pid": "p\ud800", "tid": "\udc00", "ts": 1, "args": args}
    found = reader.read(
        written(
            tmp_path,
            json.dumps(
                {
                    "deviceProperties": [{"id": 0, "name": "\ud83d\ude00\ud83d"}],
                    "traceEvents": [span | {"cat": cat} for cat in ("kernel", "cpu_op", "c\ud800")],
                    "distributedInfo": {"rank": 3, "backend": "\ud800"},
                }
            ),
        )
    )
    assert (found.names, found.rank) == (("n\ufffd",), 3)
    assert found.devices[0].name == "\U0001f600\ufffd"
    decoded = [*map(json.loads, (*found.texts, *found.grids))]
    assert len(decoded) > 1
    assert r"\ud" not in repr([found.categories, found.threads, found.details, decoded])


IMPOSSIBLE = [
    "1e400",
    "-1e400",
    "1e300",
    "1e19",
    "-1e19",
    "9" * 25,
    "9007199254740993",
    "-9007199254740993",
    "5e15",
]


@pytest.mark.parametrize("time", IMPOSSIBLE)
def test_an_event_at_a_time_that_no_recording_has_is_left_out(tmp_path, time) -> None:
    odd = (
        f'{{"ph": "X", "cat": "kernel", "name": "odd", "pid": 7, "tid": 1, "ts": {time}, "dur": 1}}'
    )
    if not time.startswith("-"):
        odd += f', {{"ph": "X", "cat": "cpu_op", "name": "endless", "ts": 3, "dur": {time}}}'
    odd += f', {{"ph": "i", "name": "[memory]", "ts": {time}, "args": {{"Bytes": 9}}}}'
    whole = ", ".join(map(json.dumps, EVENTS))
    path = written(tmp_path, f"[{odd}, {whole}]")
    events = reader.read(path)
    assert columns(events) == EXPECTED
    assert events.memory.time_ns.tolist() == [2500]
    got = (events.recorded, events.left_out, events.negative_durations)
    assert got == (odd.count("ph") + 3, odd.count("ph"), 0)
    capture = Capture.load(path)
    text = render(capture)
    number = odd.count("ph")
    said = f"\n{number} of {number + 3} events are left out because they are at impossible times.\n"
    assert said in text
    for view in (
        capture.ranges,
        capture.operators,
        capture.steps,
        capture.breakdown,
        capture.kernels,
    ):
        assert all(
            cell >= 0
            for name in view.columns
            if name.endswith("_ns")
            for cell in view.column(name)
            if cell
        )


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("written_as", "starts_ns", "lasts_ns"),
    [
        ('"ts": 5.000, "dur": -1918637.-566', 5000, None),
        ('"ts": 5.000, "dur": 0.-05', 5000, None),
        ('"ts": 5.000, "dur": -3.500', 5000, None),
        ('"ts": -7.-05, "dur": 2.000', -7005, 2000),
        ('"ts": 0.-566, "dur": 2.000', -566, 2000),
    ],
)
def test_a_time_with_two_signs_is_read(tmp_path, written_as, starts_ns, lasts_ns, indent) -> None:
    """As Kineto writes it where the clock is set back while it records."""
    events = [span(f"aten::op{n % 7}", 10 + n, 0.5, External_id=n) for n in range(500)]
    events[250] = annotation("odd", "TIMES", 0)
    text = json.dumps({"traceEvents": events}, indent=indent)
    path = written(tmp_path, re.sub(r'"ts": "TIMES",\s*"dur": 0', written_as, text))
    found = reader.read(path)
    assert (found.recorded, len(found), found.left_out) == (500, 500, 0)
    (odd,) = [k for k, code in enumerate(found.name) if found.names[code] == "odd"]
    assert (found.start_ns[odd], found.duration_ns[odd]) == (starts_ns, lasts_ns or 0)
    got = (found.negative_durations, bool(found.finished[odd]))
    assert got == (int(lasts_ns is None), lasts_ns is not None)
    assert found.finished.sum() == 499 + (lasts_ns is not None)
    said = "1 of 500 events end before they begin and are shown without a duration: the clock was"
    assert (said in render(Capture.load(path))) == (lasts_ns is None)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("stack", [b'a\xfe"b', b'"', b'a"}, {"b', b"a\\"])
@pytest.mark.parametrize("at", [0, 299])
def test_an_event_with_garbage_in_its_arguments_keeps_the_rest(tmp_path, stack, indent, at) -> None:
    written = [span(f"aten::op{k}", 10 * k, 5, External_id=k + 1) for k in range(300)]
    written[at]["args"] = {"External id": 7, "Call stack": "GARBAGE", "Ev Idx": 3}
    document = {"traceEvents": [*written, span("last", 5000, 1)], "baseTimeNanoseconds": 9}
    text = json.dumps(document, indent=indent).encode().replace(b"GARBAGE", stack)
    (tmp_path / "trace.json").write_bytes(text)
    events = reader.read(tmp_path / "trace.json")
    assert columns(events) == [
        *((f"aten::op{k}", "cpu_op", 10_000 * k, 10_000 * k + 5_000) for k in range(300)),
        ("last", "cpu_op", 5_000_000, 5_001_000),
    ]
    others = [k for k in range(300) if k != at]
    assert events.external_id[others].tolist() == [k + 1 for k in others]
    assert events.base_ns == 9
    assert not events.cut_short


def _valid(folder: Path) -> tuple[float, str]:
    name = "events with possible times"
    (row,) = Capture.load(folder / "trace.json").coverage.where(name=name)
    return row.share, row.why


@pytest.mark.parametrize("start_us", [1615207264505000, 3_600_000_000])
@pytest.mark.parametrize("duration_us", [0, 5])
@pytest.mark.parametrize("category", ["kernel", "cpu_op", "cuda_runtime", "user_annotation"])
def test_an_event_with_lost_times_is_left_out(tmp_path, start_us, duration_us, category) -> None:
    """Some drivers write 0; `start_us` is Unix time, or the time since the machine started."""
    kernels = [kernel("k", start_us + 20 * k, 10, correlation=k + 1) for k in range(19)]
    events = read(tmp_path, [*kernels, span("lost", 0, duration_us, cat=category)])
    assert (len(events), events.left_out) == (19, 1)
    assert events.begin_ns == start_us * 1000
    assert _valid(tmp_path) == (
        0.95, "1 of 20 events are left out because they are at impossible times."
    )  # fmt: skip


def test_the_first_event_of_a_file_whose_times_begin_at_0_stays(tmp_path) -> None:
    spans = [span("a", 1_000_000 * k, 5) for k in range(200)]
    assert len(read(tmp_path, spans)) == 200


def test_a_kernel_at_0_stays_where_others_are_near(tmp_path) -> None:
    assert len(read(tmp_path, [kernel("k", 0, 5), kernel("k", 10, 5)])) == 2


def test_an_event_without_a_duration_is_counted(tmp_path) -> None:
    whole, lost = kernel("k", 10, 5, correlation=1), kernel("lost", 30, 5, correlation=2)
    del lost["dur"]
    events = read(tmp_path, [whole, lost])
    assert events.duration_ns.tolist() == [5000, 0]
    assert events.no_duration == 1
    assert _valid(tmp_path) == (0.5, "1 of 2 events have no duration (`dur`).")


def test_work_of_one_stream_ends_before_the_next_begins(tmp_path) -> None:
    """As in some traces of ROCm: 4.8 s of kernels in 3 ms."""
    kernels = [kernel("k", 1000 + 10 * k, 4800, correlation=k + 1) for k in range(300)]
    other = kernel("k", 1000, 9000, correlation=999, tid=8)
    events = read(tmp_path, [*kernels[::-1], other])
    assert events.overlapping == 300
    assert events.duration_ns.tolist() == [10_000] * 300 + [9_000_000]
    share, why = _valid(tmp_path)
    assert share == 1 / 301
    assert why == (
        "300 of 301 events are device work that ends after the next work of its stream begins, which "
        "cannot be: they end where it begins."
    )


def test_kernels_of_a_graph_and_a_little_overlap_stay(tmp_path) -> None:
    """Branches of a CUDA graph run at the same time; launches may begin early by a microsecond."""
    graph = [kernel("k", 1000 + k, 50, correlation=5) for k in range(20)]
    early = [kernel("k", 2000 + 99.5 * k, 100, correlation=6 + k, tid=9) for k in range(20)]
    events = read(tmp_path, [*graph, *early])
    assert events.overlapping == 0
    assert events.duration_ns.tolist() == [50_000] * 20 + [100_000] * 20
    assert _valid(tmp_path) == (1.0, None)


def test_an_event_without_a_category_has_that_of_its_name_or_thread(tmp_path) -> None:
    named = {
        "aten::addmm": "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0": "cpu_op",
        "AddmmBackward0": "cpu_op", "c10d::allreduce_": "cpu_op", "cudaLaunchKernel": "cuda_runtime",
        "hipMemcpyAsync": "cuda_runtime", "cuLaunchKernelEx": "cuda_runtime", "[MEMCPY] HtoD": "gpu_memcpy",
        "Memcpy DtoH (Device -> Pageable)": "gpu_memcpy", "Memset (Device)": "gpu_memset",
        "void at::native::vectorized_elementwise_kernel<4>(int)": "kernel", "triton_poi_fused_0": "kernel",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "kernel",
        "ampere_sgemm_128x64_tn": "kernel", "ProfilerStep#3": "user_annotation",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "user_annotation",
        "Optimizer.step#SGD.step": "user_annotation", "train.py(12): step": "python_function",
        "<built-in method add>": "python_function", "nn.Module: Linear_0": "python_function",
        "forward": "", "step 3": "",
    }  # fmt: skip
    events = [span(name, 10 * k, 5, tid=f"row {k}") for k, name in enumerate(named)]
    events += [span("aten::add", 900, 9, tid=7), span("my range", 901, 2, tid=7)]
    events += [span("void k<int>(int)", 900, 9, tid=8), span("my kernel", 901, 2, tid=8)]
    events += [span("forward", 950, 9, pid="CPU functions", tid=1)]
    for event in events:
        del event["cat"]
    found = read(tmp_path, [*events, span("kept", 999, 1, cat="cpu_op")])
    assert [found.categories[code] for code in found.category] == [
        *named.values(), "cpu_op", "cpu_op", "kernel", "kernel", "cpu_op", "cpu_op",
    ]  # fmt: skip
    assert found.no_category == 2
    (row,) = Capture.load(tmp_path / "trace.json").coverage.where(
        name="events of the file that were read"
    )
    assert row.share == (len(found) - 2) / len(found)
    assert row.why.startswith(
        "2 of 28 events of the trace file could not be read: 2 have no category (`cat`)"
    )


def test_an_event_of_an_unknown_category_is_counted(tmp_path) -> None:
    known = ["cpu_op", "cuda_runtime", "privateuse1_driver", "overhead", "gpu_user_annotation"]
    events = [span("k", 10 * k, 5, cat=cat) for k, cat in enumerate([*known, "odd", "Kernel"])]
    assert read(tmp_path, events).unknown_category == 1
    capture = Capture.load(tmp_path / "trace.json")
    (row,) = capture.coverage.where(name="events of the file that were read")
    assert (row.share, row.why) == (
        6 / 7,
        "1 of 7 events of the trace file could not be read: 1 have a category (`cat`) that torch "
        "does not write.",
    )


# Names as torch writes them: it does not escape them. Backslashes are of older versions.
UNESCAPED = [
    'blocks["enc"].forward', 'say "hi", you', 'a", "b', 'a"}, {"b', 'x", "y": {', 'say "hi", "x": 1', '"', 'end"',
    '"start', '{"name": "x", "pid": 3}', '{"cat": "x", "name": "y"}', '}, {"ph": "X"', 'f"{a["b"]}"', '["a"], "b"]',
    "C:\\dir\\", '\\"', 'a\\"b', "a\nb", 'tab\t"x"\x07', '"args": {', "}]", '"}]', '"', '""', '", ', '"name": "x"',
]  # fmt: skip


@pytest.mark.parametrize(
    ("is_list", "indent", "at"),
    [(False, 2, 0), (True, None, 150), (False, None, 299), (True, 2, 299)],
)
def test_a_name_with_quotation_marks_is_read(tmp_path, is_list, indent, at) -> None:
    for name in UNESCAPED:
        events = [span(f"aten::op{k}", 10 * k, 5, External_id=k + 1) for k in range(300)]
        events[at] |= {"name": "HERE", "cat": "user_annotation"}
        if is_list:  # as `events().export_chrome_trace` writes it
            events = [{"name": event.pop("name"), **event} for event in events]
        document = events if is_list else {"traceEvents": events, "baseTimeNanoseconds": 9}
        text = json.dumps(document, indent=indent)
        found = reader.read(written(tmp_path, text.replace("HERE", name)))
        expected = [f"aten::op{k}" for k in range(300)]
        expected[at] = name.replace('\\"', '"')
        assert [found.names[code] for code in found.name] == expected
        assert found.external_id.tolist() == [*range(1, 301)]
        assert found.start_ns.tolist() == [10_000 * k for k in range(300)]
        assert found.categories[found.category[at]] == "user_annotation"
        assert (found.recorded, found.unreadable, found.cut_short) == (300, 0, False)


def test_a_name_that_looks_like_a_time_with_two_signs_stays(tmp_path) -> None:
    name = 'a "dur": -1.-5'
    assert (
        reader.read(
            write_trace(tmp_path, [span(name, 1, 1, x="NaN"), span("b", 2, float("nan"))])
        ).names[0]
        == name
    )


def test_a_step_in_which_the_clock_is_set_back_counts_in_no_mean(tmp_path) -> None:
    steps = [step(n, 1000 * n, -900 if n == 2 else 1000) for n in range(4)]
    found = Capture.load(write_trace(tmp_path, steps)).steps
    assert found.column("number") == [0, 1, 3]
    assert found.column("duration_ns") == [1_000_000] * 3


@pytest.mark.parametrize(
    "name", ["ProfilerStep#" + "9" * 5000, "ProfilerStep#" + "9" * 16, "ProfilerStep#²"]
)
def test_a_number_that_no_step_has_makes_none(tmp_path, name) -> None:
    capture = Capture.load(write_trace(tmp_path, [annotation(name, 0, 9), step(7, 9, 9)]))
    assert capture.steps.column("number") == [7]
    assert capture.operators_by("step").column("step") == [None, 7]


def test_a_bomb_is_refused_with_its_size_and_without_growing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [')
        file.write(b'{"ph": "M"},' * (1 << 17))
    monkeypatch.setattr("instrument.read.trace.gzip_stream.RATIO_COUNTS_FROM_BYTES", 1 << 20)
    with pytest.raises(
        TraceError,
        match=r"The first \d{1,4} bytes of .* decompress to \d{7} bytes, over 200 times as many",
    ):
        reader.read(path)


BLANKS = b" \t\r\n" * (1 << 19)
HOLLOW = {
    "before the document": (BLANKS + b"{", "is cut short"),
    "before the events": (b"{" + BLANKS, "the text before its traceEvents takes more than 1 MiB"),
    "among the events": (b'{"traceEvents": [{"ph": "M"},' + BLANKS + b'{"ph": "M"}]}', ""),
    "between commas": (b"[" + b'{"ph": "M"}            ,            ' * 60_000 + b"{}]", ""),
    "in an event": (
        b'{"traceEvents": [{"name": "' + BLANKS + b'"}]}',
        "an event takes more than 1 MiB",
    ),
    "brackets": (b'{"traceEvents": [' + b"[{" * (1 << 20), "is JSON, but not a trace"),
    "behind the events": (b'{"traceEvents": []' + BLANKS + b"}", ""),
    "behind all": (
        b'{"traceEvents": []}' + BLANKS,
        "the text after its events takes more than 1 MiB",
    ),
}


@pytest.fixture
def looked_at(monkeypatch) -> Counter[str]:
    """The bytes of the text that the functions which search it have passed."""
    count: Counter[str] = Counter()

    def counting(name, bytes_passed) -> None:
        search = getattr(json_stream, name)

        def counted(text, *positions):
            found = search(text, *positions)
            count[name] += bytes_passed(len(text), found, *positions)
            return found

        monkeypatch.setattr(json_stream, name, counted)

    for name in ("_skip", "_skip_back"):
        counting(name, lambda _, found, at, *__: abs(found - at))
    for name in ("_object_end", "_piece_end"):
        counting(name, lambda length, _, begin, end: min(end, length) - begin)
    return count


@pytest.mark.parametrize("kind", HOLLOW)
def test_a_large_file_of_little_costs_little(tmp_path, kind, looked_at, monkeypatch) -> None:
    """Each byte is looked at about once, and few are in memory at a time."""
    monkeypatch.setattr(json_stream, "LONGEST", 1 << 20)
    monkeypatch.setattr(json_stream, "LARGEST", 1 << 16)
    content, sentence = HOLLOW[kind]
    path = written(tmp_path, content)
    tracemalloc.start()
    try:
        if sentence:
            with pytest.raises(TraceError, match=sentence):
                reader.read(path)
        else:
            assert len(reader.read(path)) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert looked_at.total() < 1.5 * len(content)
    assert peak < 6 << 20


def test_paths_in_a_trace_are_not_opened(tmp_path, monkeypatch) -> None:
    path = write_trace(
        tmp_path, [span(str(tmp_path / "secret"), 0, 1, Trace_name=str(tmp_path / "secret"))]
    )
    opened: list[str] = []
    keep = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: opened.append(str(self)) or keep(self, *a, **k)
    )
    reader.read(path)
    assert opened == [str(path)]


def test_gzip_in_members_with_padding_is_one_file(tmp_path) -> None:
    text = json.dumps(EVENTS).encode()
    path = written(tmp_path, gzip.compress(text[:90]) + gzip.compress(text[90:]) + b"\0" * 512)
    assert columns(reader.read(path)) == EXPECTED


def test_the_standard_librarys_gunzip_gives_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("instrument.read.trace.gzip_stream.CHUNK_BYTES", 1 << 12)
    many = [span(f"a{n}", n, 1) for n in range(3000)]
    path = written(tmp_path, gzip.compress(json.dumps(many).encode()))
    fast = reader.read(path)
    monkeypatch.setattr("instrument.read.trace.gzip_stream._fastest", lambda: zlib)
    assert columns(reader.read(path)) == columns(fast)
    assert len(fast) == 3000


@pytest.mark.parametrize(
    "text", ['{"traceEvents": []}', '{"traceEvents": [5]}', '{"traceEvents": [{"ph": "X"']
)
def test_no_thread_outlives_the_reading(tmp_path, text) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    before = threading.active_count()
    with suppress(TraceError):
        reader.read(path)
    assert threading.active_count() == before
