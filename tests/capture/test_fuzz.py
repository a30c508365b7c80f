"""Mutated traces and captures: a right answer or a clear error, never a crash, never a hang."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import (
    allocation,
    annotation,
    is_harmless,
    kernel,
    span,
    synchronous_steps,
    view_text,
    write_rank,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st

from capture.plain_loops import same
from instrument.base.errors import CaptureError, TraceError
from instrument.base.range_names import from_trace
from instrument.export.sinks.window_scalars import last_step, scalars
from instrument.read.capture import Capture
from instrument.read.ranks.run import Run
from instrument.read.show import ranks
from instrument.read.show.text import render
from instrument.read.trace import json_stream, reader
from instrument.read.trace.rewrite import rewrite
from instrument.read.views.operators import GROUPINGS
from instrument.read.views.views import VIEWS

pytestmark = pytest.mark.filterwarnings("ignore::instrument.base.errors.TraceWarning")
with_each_reader = pytest.mark.usefixtures("each_reader")
HARD_NAMES = [
    '}, {"ph": "X"', "},{", '"traceEvents": [', "]}", "\\", '"', "{[", "\u00e9\u4e2d\U0001f600", "a\nb", "", "NaN"
]  # fmt: skip
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
    monkeypatch.setattr(json_stream, "SMALLEST", 48)
    monkeypatch.setattr(json_stream, "LARGEST", 8192)  # longer than an event with its strings
    monkeypatch.setattr("instrument.read.trace.gzip_stream.CHUNK_BYTES", 97)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    made = span(
        draw(NAMES),
        draw(TIMES),
        draw(TIMES),
        cat=draw(st.sampled_from(["cpu_op", "user_annotation"])),
    )
    made["ph"] = draw(st.sampled_from("XXXXMsf"))
    made["args"] = draw(
        st.dictionaries(
            NAMES,
            st.one_of(NAMES, st.lists(st.dictionaries(NAMES, st.none(), max_size=2), max_size=2)),
            max_size=2,
        )
    )
    if draw(st.booleans()):
        made = dict(reversed(made.items()))
    return made


@with_each_reader
@example([span("op", 0, 1, direction="up")], None, (",", ":"), False, False)
@given(
    st.lists(events(), max_size=4),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\r\n", " : ")]),
    st.booleans(),
    st.booleans(),
)
def test_layouts_are_read_as_json(tmp_path, made, indent, separators, ascii_only, packed) -> None:
    document = {
        "x": {"traceEvents": [{}, {}]},
        "traceEvents": made,
        "y": [{}, {}],
        "baseTimeNanoseconds": 7,
    }
    text = json.dumps(
        document, indent=indent, separators=separators, ensure_ascii=ascii_only
    ).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text) if packed else text)
    found = reader.read(path)
    known = [event for event in made if event["ph"] == "X"]
    assert (found.recorded, found.base_ns, found.cut_short) == (len(made), 7, False)
    assert [found.names[code] for code in found.name] == [event["name"] for event in known]
    assert found.start_ns.tolist() == [round(event["ts"] * 1000) for event in known]
    assert found.duration_ns.tolist() == [max(round(event["dur"] * 1000), 0) for event in known]


def _views(path: Path) -> Iterator[object]:
    capture = Capture.load(path)
    yield from (getattr(capture, name) for name in VIEWS if not name.endswith("()"))
    yield from (capture.operators_by(what) for what in GROUPINGS)


@with_each_reader
@example(['a"}, {"b', 'c"'], 2)
@given(
    st.lists(st.text(st.sampled_from('"\\{}[],: ap1\n'), max_size=12), max_size=4),
    st.sampled_from([None, 2]),
)
def test_names_that_are_not_escaped_cost_no_other_event(tmp_path, names, indent) -> None:
    """A name can hold anything. What cannot be read is counted, and nothing is read twice."""
    made = [*(span(f"NAME{k}", 10 * k, 5) for k in range(len(names))), span("last", 99, 1)]
    text = json.dumps({"traceEvents": made, "baseTimeNanoseconds": 7}, indent=indent)
    for k, name in enumerate(names):
        text = text.replace(f'"NAME{k}"', f'"{name}"')
    path = tmp_path / "trace.json"
    path.write_text(text)
    try:
        found = reader.read(path)
    except TraceError as error:
        assume("not JSON" not in str(error))
        raise
    rewrite(path, tmp_path / "again.json.gz", {"x": 1})
    again = reader.read(tmp_path / "again.json.gz")
    assert same(found, again) or found.unreadable
    if not found.unreadable:
        json.loads(gzip.decompress((tmp_path / "again.json.gz").read_bytes()))


HARD_BYTES = [
    b"NaN", b"1e400", b"-", b"\\x", b"\\ud800", b"[" * 3000, b'"', b"}", b"null", b"9" * 30
]  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, len(BASE) - 1),
        st.integers(0, 6),
        st.one_of(st.binary(max_size=4), st.sampled_from(HARD_BYTES)),
    ),
    min_size=1,
    max_size=4,
)


@with_each_reader
@given(MUTATIONS, st.booleans())
def test_a_mutated_trace_gives_tables_or_a_sentence(tmp_path, mutations, packed) -> None:
    text = BASE
    for at, length, bytes_put in mutations:
        text = text[:at] + bytes_put + text[at + length :]
    _read_or_sentence(tmp_path, gzip.compress(text) if packed else text)


@with_each_reader
@given(st.integers(0, len(gzip.compress(BASE, mtime=0)) - 1), st.integers(0, 255))
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


@with_each_reader
@given(st.integers(0, len(BASE) - 1), st.booleans())
def test_a_cut_leaves_the_whole_events_before_it(tmp_path, length, packed) -> None:
    whole = [event for event in json.loads(BASE)["traceEvents"] if event["ph"] == "X"]
    whole_before = BASE[LIST:length].count(b"\n  }")
    path = tmp_path / "trace"
    text = gzip.compress(BASE, mtime=0) if packed else BASE
    path.write_bytes(text[: length * len(text) // len(BASE)])
    try:
        found = reader.read(path)
    except TraceError as error:
        said = str(error)
    else:
        assert found.cut_short or (packed and found.recorded == len(whole) + 1)
        assert [found.names[code] for code in found.name] == [
            event["name"] for event in whole[: len(found)]
        ]
        assert packed or len(found) == min(whole_before, len(whole))
        return
    assert "cut short" in said or "is empty" in said
    assert packed or not whole_before


# What a stranger may write in place of a number, a name, a list or a whole table.
HARD_VALUES = [
    0, -1, 1, 2**31, 2**62, 2**63, -(2**63), 2**70, 10**400, 1.5, 1e300,
    "", "..", "a/b", "\x1b[2J", "2026-01-01", "0001-01-01", "9999-12-31T23:59:59", "\u202e", "\n", "\x00",
    "(a+)+$", "(", "all",
]  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.sampled_from(HARD_VALUES), st.none(), st.booleans(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 5), VALUES), min_size=1, max_size=4
)
DESCRIBED: dict[str, Any] = {
    "activities": ["cpu"],
    "config": {
        "ranks": "all",
        "communication": ["ring"],
        "activities": None,
        "sinks": {},
        "with_flops": False,
    },
    "cost": {
        "recorded_step_ns": 9,
        "unrecorded_step_ns": 5,
        "unrecorded_steps": 50,
        "start_ns": 1,
        "stop_ns": 2,
    }
    | {"save_ns": 3, "trace_bytes": 4, "packed_bytes": 5, "export_ns": 6},
    "compiled_ranges": [{"range": "a", "region": "0/0"}],
    "modules_not_seen": ["a.b"],
    "annotations_disabled": False,
    "user_metadata": {"model": "vit"},
    "scalars": {"window/steps": 2},
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield value, key
        yield from places(inner)


def edited(text: str, edits: list[tuple[int, int, Any]]) -> bytes:
    """A JSON text with other values in some places, and where that is asked for with a byte of it changed."""
    value = json.loads(text)
    for number, how, put in edits:
        if how < 5:
            there = [*places(value)]
            container, key = there[number % len(there)]
            container[key] = copy.deepcopy(put)
    raw = bytearray(json.dumps(value).encode())
    for number, how, _ in edits:
        if how == 5:
            raw[number % len(raw)] = number % 256
    return bytes(raw)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for rank in range(2):
        write_rank(folder, rank, synchronous_steps(300 + 500 * rank, device=True), 2, **DESCRIBED)
    return folder


@given(EDITS)
def test_a_mutated_capture_gives_tables_or_a_sentence(run_folder, edits) -> None:
    folder = run_folder / "steps_000003-000004_rank0"
    path = folder / "capture.json"
    whole = path.read_text()
    try:
        path.write_bytes(edited(whole, edits))
        try:
            capture = Capture.load(folder)
        except CaptureError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert said.isprintable()
            assert said.endswith(".")
            return
        text = render(capture)
        views = [
            view_text(capture, view)
            for view in ("steps", "kernels", "breakdown", "compiled_ranges", "streams", "coverage")
        ]
        assert "cudaLaunchKernel" in text
        assert is_harmless("\n".join([text, *views, repr(capture), capture._repr_html_()]))
        assert last_step(capture) <= 2**50
        assert dict(scalars(capture))["window/steps"] == 2
        json.dumps(capture.metadata)
    finally:
        path.write_text(whole)


@given(EDITS, st.booleans(), st.booleans())
def test_a_mutated_rank_gives_tables_or_a_sentence(run_folder, edits, of_summary, twice) -> None:
    folder = run_folder / "steps_000003-000004_rank1"
    changed = [folder / ("summary.json" if of_summary else "capture.json")]
    before = {path: path.read_text() for path in (folder / "summary.json", folder / "capture.json")}
    try:
        for path in [*before] if twice else changed:
            path.write_bytes(edited(before[path], edits))
        if changed[0].name == "capture.json" and not twice:
            (folder / "summary.json").unlink()
        run = Run.load(run_folder)
        for window in run.windows:
            assert is_harmless(ranks.as_text(window))
            json.loads(ranks.as_json(window))
        assert all(sentence.isprintable() for sentence in run.unread)
        assert sum(len(window.paths) for window in run.windows) + len(run.unread) == 2
    finally:
        for path, text in before.items():
            path.write_text(text)


@with_each_reader
@given(
    st.lists(
        st.tuples(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12)),
        min_size=1,
        max_size=5,
    )
)
def test_names_of_any_characters_are_shown_harmlessly(tmp_path, names) -> None:
    # an operator within a range of its name is that range's own event on the CPU
    assume(all(of_range != f"op{of_operator}" for of_range, of_operator, _ in names))
    made = []
    for number, (of_range, of_operator, of_kernel) in enumerate(names):
        made += [
            annotation(of_range, 10 * number, 9),
            span(f"op{of_operator}", 10 * number + 1, 5, External_id=number + 1),
            kernel(of_kernel, 10 * number + 2, 3, External_id=number + 1, correlation=number + 1),
        ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": made}))
    capture = Capture.load(path)
    views = [view_text(capture, view) for view in ("kernels", "streams", "launches")]
    assert is_harmless("\n".join([render(capture, by="range"), render(capture), *views]))
    kept = {each.encode("utf-8", "replace").decode() for each, _, _ in names}
    assert {row.name for row in capture.ranges} <= kept | {from_trace(each) for each in kept}
