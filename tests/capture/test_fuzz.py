"""Mutated traces: a right answer or a clear error, never a crash, never a hang."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.traces import allocation, annotation, kernel, span
from instrument.capture import Capture, chrome, pieces
from instrument.capture.groupings import GROUPINGS
from instrument.errors import TraceError

QUIET = settings(
    max_examples=50, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
HARD_NAMES = [
    '}, {"ph": "X"',
    "},{",
    '"traceEvents": [',
    "]}",
    "\\",
    '"',
    "{[",
    "\u00e9\u4e2d\U0001f600",
    "a\nb",
    "",
    "NaN",
]
NAMES = st.one_of(st.sampled_from(HARD_NAMES), st.text(max_size=12))
TIMES = st.integers(-5_000, 10_000_000).map(lambda ns: ns / 1000)
BASE = json.dumps(
    {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0}, {"id": 1}],
        "traceEvents": [
            annotation("forward", 0, 50),
            *(span(f"aten::{n}", n, 2.5, External_id=n, Input_Dims=[[n, 2]]) for n in range(1, 40)),
            kernel("void f<{lambda()#1}, {lambda()#2}>()", 60, 5, correlation=3, stream=7),
            allocation(2, 64),
        ],
        "baseTimeNanoseconds": 5,
    },
    indent=1,
).encode()
LIST = BASE.index(b'"traceEvents"')


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the events, so that every seam between pieces is tried."""
    monkeypatch.setattr(pieces, "SMALLEST", 48)
    monkeypatch.setattr(pieces, "LARGEST", 512)
    monkeypatch.setattr("instrument.capture.inflate.CHUNK_BYTES", 97)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    made = span(draw(NAMES), draw(TIMES), draw(TIMES), cat=draw(st.sampled_from(["cpu_op", "user_annotation"])))
    made["ph"] = draw(st.sampled_from("XXXXMsf"))
    made["args"] = draw(st.dictionaries(NAMES, st.one_of(NAMES, st.lists(st.dictionaries(NAMES, st.none())))))
    if draw(st.booleans()):
        made = dict(reversed(made.items()))
    return made


@given(
    st.lists(events(), max_size=10),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\r\n", " : ")]),
    st.booleans(),
    st.booleans(),
)
@QUIET
def test_any_trace_in_any_layout_is_read_as_json_reads_it(
    tmp_path, made, indent, separators, ascii_only, packed
) -> None:
    document = {"x": {"traceEvents": [{}, {}]}, "traceEvents": made, "y": [{}, {}], "baseTimeNanoseconds": 7}
    text = json.dumps(document, indent=indent, separators=separators, ensure_ascii=ascii_only).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text) if packed else text)
    found = chrome.read(path)
    known = [event for event in made if event["ph"] == "X"]
    assert (found.recorded, found.base_ns, found.cut_short) == (len(made), 7, False)
    assert [found.names[code] for code in found.name] == [event["name"] for event in known]
    assert found.start_ns.tolist() == [round(event["ts"] * 1000) for event in known]
    assert found.duration_ns.tolist() == [max(round(event["dur"] * 1000), 0) for event in known]


def _views(path: Path) -> Iterator[object]:
    capture = Capture.load(path)
    yield from (getattr(capture, name) for name, view in vars(Capture).items() if isinstance(view, cached_property))
    yield from (capture.operators.by(what) for what in GROUPINGS)
    yield from (capture.operators.uncounted, capture.ranges.by("name"), capture.ranges.parts)
    yield from (capture.memory.devices, capture.memory.steps, capture.memory.sizes, capture.memory.events)


MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, len(BASE) - 1),
        st.integers(0, 6),
        st.one_of(
            st.binary(max_size=4),
            st.sampled_from([b"NaN", b"1e400", b"-", b"\\x", b"\\ud800", b"[" * 3000, b'"', b"}", b"null", b"9" * 30]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(MUTATIONS, st.booleans())
@QUIET
def test_a_mutated_trace_gives_tables_or_a_sentence(tmp_path, mutations, packed) -> None:
    text = BASE
    for at, length, bytes_put in mutations:
        text = text[:at] + bytes_put + text[at + length :]
    _read_or_sentence(tmp_path, gzip.compress(text) if packed else text)


@given(st.integers(0, len(gzip.compress(BASE, mtime=0)) - 1), st.integers(0, 255))
@QUIET
def test_mutated_gzip_gives_tables_or_a_sentence(tmp_path, at, value) -> None:
    packed = bytearray(gzip.compress(BASE, mtime=0))
    packed[at] = value
    _read_or_sentence(tmp_path, bytes(packed))


def _read_or_sentence(folder: Path, content: bytes) -> None:
    path = folder / "trace"
    path.write_bytes(content)
    try:
        found = [repr(view) for view in _views(path)]
    except TraceError as error:
        said = str(error)
    else:
        assert len(found) > 20
        try:
            recorded = len(json.loads(content, strict=False)["traceEvents"])
        except (ValueError, RecursionError, KeyError, TypeError):
            return
        assert Capture.load(path).events.recorded == recorded
        return
    assert str(path) in said
    assert said.endswith(".")


@given(st.integers(0, len(BASE) - 1), st.booleans())
@QUIET
def test_a_cut_leaves_the_whole_events_before_it(tmp_path, length, packed) -> None:
    whole = [event for event in json.loads(BASE)["traceEvents"] if event["ph"] == "X"]
    whole_before = BASE[LIST:length].count(b"\n  }")
    path = tmp_path / "trace"
    text = gzip.compress(BASE, mtime=0) if packed else BASE
    path.write_bytes(text[: length * len(text) // len(BASE)])
    try:
        found = chrome.read(path)
    except TraceError as error:
        said = str(error)
    else:
        assert found.cut_short or (packed and found.recorded == len(whole) + 1)
        assert [found.names[code] for code in found.name] == [event["name"] for event in whole[: len(found)]]
        assert packed or len(found) == min(whole_before, len(whole))
        return
    assert "cut short" in said or "is empty" in said
    assert packed or not whole_before
