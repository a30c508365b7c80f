"""Trace files into columns: forms, times, odd fields; and the sentence for each bad file."""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal

import pytest

from capture.traces import allocation, read, span, write
from instrument.capture import chrome
from instrument.errors import TraceError

EVENTS = [span("a", 1.5, 2.25, External_id=3), span("b", 2, 1, cat="user_annotation"), allocation(2.5, -64)]


def columns(events):
    return [
        (events.names[n], events.categories[c], start, end)
        for n, c, start, end in zip(events.name, events.category, events.start_ns.tolist(), events.end_ns.tolist())
    ]


EXPECTED = [("a", "cpu_op", 1500, 3750), ("b", "user_annotation", 2000, 3000)]


@pytest.mark.parametrize("form", ["object", "list", "gzip", "gzip under another name", "indented", "args first"])
def test_every_form_gives_the_same_columns(tmp_path, form) -> None:
    text = json.dumps(EVENTS if form == "list" else {"traceEvents": EVENTS}, indent=form == "indented" or None)
    if form == "args first":
        text = json.dumps({"traceEvents": [dict(reversed(event.items())) for event in EVENTS]})
    path = tmp_path / ("trace.json.gz" if form == "gzip" else "trace.pt")
    path.write_bytes(gzip.compress(text.encode()) if "gzip" in form else text.encode())
    events = chrome.read(path)
    assert columns(events) == EXPECTED
    assert events.external_id.tolist() == [3, 0]
    assert events.recorded == 3
    memory = events.memory
    assert (memory.time_ns.tolist(), memory.size_bytes.tolist(), memory.thread.tolist()) == ([2500], [-64], [0])


def test_other_phases_are_counted_and_left_out(tmp_path) -> None:
    others = [{"ph": phase, "name": "x", "pid": "p", "tid": 0, "ts": 1.0, "id": 1} for phase in "MsftbneCNOPDI"]
    events = read(tmp_path, [*others, {"ph": "i", "name": "Record Window End", "ts": 3}, *EVENTS])
    assert columns(events) == EXPECTED
    assert events.recorded == len(others) + 4


def test_the_base_time_is_kept(tmp_path) -> None:
    assert read(tmp_path, EVENTS, baseTimeNanoseconds=1790857026000000000).base_ns == 1790857026000000000


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
        "0.001",
        "12.0015",
    ],
)
def test_times_are_exact_nanoseconds(tmp_path, text) -> None:
    path = tmp_path / "trace.json"
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": %s, "dur": 3.007, "args": {}}'
    instant = '{"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": %s, "args": {"Bytes": 1}}'
    path.write_text(f'{{"traceEvents": [{event % text}, {{"ph": "M"}}, {instant % text}]}}')
    events = chrome.read(path)
    start = round(Decimal(text) * 1000)
    assert events.start_ns.tolist() == events.memory.time_ns.tolist() == [start]
    assert (events.end_ns - events.start_ns).tolist() == [3007]


def test_whole_and_broken_times_mix(tmp_path) -> None:
    events = read(tmp_path, [span("a", 1712195495997093, 1), span("b", 1712195495997093.5, 2.5)])
    assert events.start_ns.tolist() == [1712195495997093000, 1712195495997093500]
    assert events.duration_ns.tolist() == [1000, 2500]


def test_threads_are_numbers_or_names(tmp_path) -> None:
    spans = [span("a", 0, 1, tid="25738"), span("b", 2, 1, tid=25738), span("c", 3, 1, tid="stream 7")]
    events = read(tmp_path, [*spans, allocation(0.5, 8, tid=25738)])
    assert events.thread.tolist() == [0, 0, 1]
    assert events.threads == ((7, 25738), (7, "stream 7"))
    assert events.memory.thread.tolist() == [0]


def test_arguments_become_columns(tmp_path) -> None:
    shapes, concrete, types = [[2, 3], [[4], [5]]], ["", "[1, 1]"], ["float", "TensorList"]
    known = {"Input_Dims": shapes, "Concrete_Inputs": concrete, "Input_type": types}
    events = read(
        tmp_path,
        [
            span("a", 0, 9, External_id=4, Sequence_number=8, Fwd_thread_id=2, finished=False, **known),
            span("b", 1, 1, **known),
            span("c", 2, 1, cat="python_function", Python_id=5, Python_parent_id=None),
            span("k", 3, 1, cat="kernel", correlation=6, stream=18446744073709551615),
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
    for codes, value in ((events.shapes, shapes), (events.concrete, concrete), (events.types, types)):
        assert codes[0] == codes[1] >= 0
        assert json.loads(events.texts[codes[0]]) == value
        assert codes[2:].tolist() == [-1, -1, -1]
    assert events.duration_ns.tolist()[-1] == 0


def test_the_lower_case_external_id_of_old_traces_is_understood(tmp_path) -> None:
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
    events = chrome.read(path)
    assert (events.start_ns.tolist(), events.external_id.tolist()) == ([1712195495997093201], [17])


def test_a_negative_duration_counts_as_none(tmp_path) -> None:
    assert read(tmp_path, [span("a", 5, -3)]).duration_ns.tolist() == [0]


def test_numbers_too_large_for_64_bits_do_not_stop_reading(tmp_path) -> None:
    assert read(tmp_path, [span("a", 0, 1, correlation=2**64 - 1)]).correlation.tolist() == [-1]


@pytest.mark.parametrize(
    "document", ['{"traceEvents": []}', "[]", '{"schemaVersion": 1, "traceEvents": [{"ph": "M"}]}']
)
def test_a_trace_without_events_is_a_trace(tmp_path, document) -> None:
    path = tmp_path / "trace.json"
    path.write_text(document)
    events = chrome.read(path)
    assert (len(events), len(events.memory)) == (0, 0)


GOOD = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}).encode()
BAD = {
    "empty": (b"", "The trace file {path} is empty; copy or record it again."),
    "blank": (b" \n", "The trace file {path} is empty; copy or record it again."),
    "empty gzip": (gzip.compress(b""), "The trace file {path} is empty; copy or record it again."),
    "cut short": (GOOD[:60], "The trace file {path} is cut short: its JSON does not end; copy or record it again."),
    "list cut short": (
        b'[{"ph": "M"}',
        "The trace file {path} is cut short: its JSON does not end; copy or record it again.",
    ),
    "gzip cut short": (
        gzip.compress(GOOD)[:20],
        "The trace file {path} is gzip cut short; copy or record it again.",
    ),
    "not JSON": (
        b"hello",
        "The trace file {path} is not JSON (JSON is malformed: invalid character (byte 0)); give a Chrome trace.",
    ),
    "other JSON": (
        b'{"a": 1}',
        "The file {path} is JSON, but not a trace: it has no list of traceEvents.",
    ),
    "a number": (b"3", "The file {path} is JSON, but not a trace: it has no list of traceEvents."),
    "a list of numbers": (b"[1, 2]", "The file {path} is JSON, but not a trace: it has no list of traceEvents."),
    "events no list": (
        b'{"traceEvents": {"a": 1}}',
        "The file {path} is JSON, but not a trace: it has no list of traceEvents.",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_gets_one_sentence(tmp_path, kind) -> None:
    path = tmp_path / "trace.json.gz"
    content, sentence = BAD[kind]
    path.write_bytes(content)
    with pytest.raises(TraceError, match=f"^{re.escape(sentence.format(path=path))}$"):
        chrome.read(path)


def test_a_missing_file_gets_one_sentence(tmp_path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(TraceError, match=re.escape(f"The trace file {path} does not exist; check the path.")):
        chrome.read(path)


def test_a_folder_is_no_trace_file(tmp_path) -> None:
    with pytest.raises(TraceError, match=re.escape(f"The trace file {tmp_path} cannot be read: Is a directory.")):
        chrome.read(tmp_path)


def test_damaged_gzip_gets_one_sentence(tmp_path) -> None:
    path = write(tmp_path, EVENTS)
    damaged = bytearray(gzip.compress(path.read_bytes()))
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(TraceError, match=f"^The trace file {re.escape(str(path))} is damaged gzip .*record it again.$"):
        chrome.read(path)
