"""Options on the trace: its form, a copy, metadata, dropping it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import annotation, steps, write_capture
from capture.plain_loops import same
from recording import record

from instrument.base import user_metadata
from instrument.base.errors import CaptureError, ConfigError, TraceError
from instrument.export.sinks import chrome_trace
from instrument.export.sinks.chrome_trace import ChromeTrace
from instrument.read.capture import Capture
from instrument.read.trace import json_stream, reader
from instrument.read.trace import rewrite as trace_rewrite
from instrument.read.trace.rewrite import rewrite


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def loaded(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    assert (raw[:2] == b"\x1f\x8b") == (path.suffix == ".gz"), "the name tells the form"
    return dict(json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw))


def told(capture: Capture) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in Capture.load(capture.folder or "").operators]


def test_left_alone_it_does_nothing(capture: Capture) -> None:
    before = capture.trace_path.stat()
    ChromeTrace().write(capture, capture.folder)
    after = capture.trace_path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert before.st_size == after.st_size
    assert names(capture.folder) == ["capture.json", "trace.json.gz"]


def test_a_plain_trace_takes_the_place_of_the_packed_one(capture: Capture) -> None:
    plain = loaded(capture.trace_path)
    before = told(capture)
    ChromeTrace(gzip=False).write(capture, capture.folder)
    assert names(capture.folder) == ["capture.json", "trace.json"]
    assert loaded(capture.folder / "trace.json") == plain
    assert told(capture) == before
    assert [row.number for row in capture.steps] == [3, 4], "the capture in hand follows its trace"


def test_metadata_goes_to_the_top_and_loses_nothing(capture: Capture) -> None:
    before = loaded(capture.trace_path)
    rows = told(capture)
    (capture.folder / "opened.json.gz").hardlink_to(capture.trace_path)
    notes = {"run": "a7", "sweep": {"lr": 0.1, "tags": ["x", None]}, 'odd "key" é': True}
    ChromeTrace(metadata=notes).write(capture, capture.folder)
    after = loaded(capture.trace_path)
    assert after == notes | before
    assert list(after)[:3] == list(notes)
    assert told(capture) == rows
    assert loaded(capture.folder / "opened.json.gz") == before, (
        "a file that somebody reads is not written over"
    )
    assert names(capture.folder) == ["capture.json", "opened.json.gz", "trace.json.gz"]


def test_a_copy_is_named_after_the_capture(capture: Capture, tmp_path: Path) -> None:
    into = tmp_path / "far" / "away"
    packed = capture.trace_path.read_bytes()
    ChromeTrace(copy_to=str(into)).write(capture, capture.folder)
    assert (into / "steps_3-4.json.gz").read_bytes() == packed
    ChromeTrace(copy_to=str(into), gzip=False, metadata={"run": "a7"}).write(
        capture, capture.folder
    )
    assert names(into) == ["steps_3-4.json", "steps_3-4.json.gz"]
    assert loaded(into / "steps_3-4.json")["run"] == "a7"
    assert (into / "steps_3-4.json").read_bytes() == (capture.folder / "trace.json").read_bytes()


def test_dropping_the_trace_leaves_the_copy(capture: Capture, tmp_path: Path) -> None:
    before = told(capture)
    sink = ChromeTrace(keep=False, copy_to=str(tmp_path / "copies"))
    sink.write(capture, capture.folder)
    assert names(capture.folder) == ["capture.json"]
    assert [
        tuple(row) for row in Capture.load(tmp_path / "copies" / "steps_3-4.json.gz").operators
    ] == before
    with pytest.raises(
        CaptureError, match=r"/steps_3-4 holds no trace: .* without chrome_trace.keep=false"
    ):
        sink.write(Capture.load(capture.folder), capture.folder)


def test_dropping_rewrites_nothing_first(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chrome_trace, "rewrite", lambda *_: pytest.fail("a trace that goes needs no new form")
    )
    ChromeTrace(keep=False, gzip=False, metadata={"run": 1}).write(capture, capture.folder)
    assert names(capture.folder) == ["capture.json"]


def test_a_bare_trace_elsewhere_is_never_touched(tmp_path: Path) -> None:
    trace = record(tmp_path / "mine.json")
    before, folder = trace.read_bytes(), tmp_path / "out"
    folder.mkdir()
    ChromeTrace(metadata={"run": 1}).write(Capture.load(trace), folder)
    assert trace.read_bytes() == before
    assert loaded(folder / "trace.json.gz") == {"run": 1} | json.loads(before)
    ChromeTrace(keep=False).write(Capture.load(trace), folder)
    assert trace.read_bytes() == before


def test_failure_leaves_the_trace_whole(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    before = capture.trace_path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_rewrite, "_checked", full)
    for sink in (ChromeTrace(gzip=False), ChromeTrace(metadata={"run": 1})):
        with pytest.raises(OSError, match="No space left"):
            sink.write(capture, capture.folder)
        assert names(capture.folder) == ["capture.json", "trace.json.gz"]
        assert capture.trace_path.read_bytes() == before


def test_metadata_needs_an_object_to_go_into(tmp_path: Path) -> None:
    listed, target = tmp_path / "list.json", tmp_path / "new.json"
    listed.write_text(json.dumps(steps()))
    with pytest.raises(TraceError) as error:
        rewrite(listed, target, {"run": 1})
    assert str(error.value) == (
        f"{listed} does not begin with '{{', so metadata cannot be added: give a Chrome trace."
    )
    assert names(tmp_path) == ["list.json"]


def test_metadata_into_an_empty_object(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{ }")
    rewrite(empty, empty, {"run": 1})
    assert json.loads(empty.read_text()) == {"run": 1}


def test_a_trace_larger_than_a_chunk(write: Callable[..., Capture]) -> None:
    events = [{**event, "ts": event["ts"] + 5000 * i} for i in range(2000) for event in steps()]
    capture = write(events)
    plain = gzip.decompress(capture.trace_path.read_bytes())
    assert len(plain) > 2 * trace_rewrite._CHUNK
    ChromeTrace(metadata={"run": 1}).write(capture, capture.folder)
    assert loaded(capture.trace_path) == {"run": 1} | json.loads(plain)


def test_its_metadata_is_checked_as_the_sessions_is() -> None:
    with pytest.raises(ConfigError) as error:
        ChromeTrace(metadata={"loss": float("nan")})
    assert str(error.value) == (
        "The chrome_trace sink's metadata 'loss' is nan, which JSON cannot hold; give it as text."
    )


def test_torch_writes_no_key_that_metadata_may_hold(tmp_path: Path) -> None:
    written = json.loads(record(tmp_path / "real.json", with_stack=True).read_text())
    assert set(written) <= user_metadata._RESERVED


@pytest.mark.parametrize("looked_at", [48, 1 << 13])
@pytest.mark.parametrize("metadata", [{}, {"model": "vit"}])
def test_negative_times_become_json(
    tmp_path: Path, looked_at: int, metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kineto writes them if the clock is set back while it records; similar text stays."""
    monkeypatch.setattr(json_stream, "SMALLEST", looked_at)
    times = ['"ts": 5.000, "dur": -1918637.-566', '"ts": -7.-05, "dur": 0.-001']
    times.append('"ts":-1.500,"dur" : 2.25')
    name = r'"name": "-1.-5 a.-b \"dur\": -1.-5"'
    events = ",".join(f'{{{name}, {each}, "args": {{"x": -1}}}}' for each in times * 20)
    source, target = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    source.write_text(f'{{"traceEvents": [{events}]}}')
    rewrite(source, target, metadata)
    found = loaded(target)
    assert {event["name"] for event in found["traceEvents"]} == {'-1.-5 a.-b "dur": -1.-5'}
    assert [(event["ts"], event["dur"]) for event in found.pop("traceEvents")] == [
        (5, -1918637.566), (-7.005, -0.001), (-1.5, 2.25),
    ] * 20  # fmt: skip
    assert found == metadata
    assert [Capture.load(each).events.negative_durations for each in (target, source)] == [0, 0]


def test_what_the_session_wrote_is_not_written_twice(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps(), user_metadata={"run": 1})
    ChromeTrace(gzip=False, metadata={"run": 2, "mine": 3}).write(capture, capture.folder)
    text = (capture.folder / "trace.json").read_text()
    assert json.loads(text)["mine"] == 3
    assert '"run"' not in text, (
        "it is already there in a real one, put in when the window was delivered"
    )


@pytest.mark.parametrize("metadata", [{}, {"model": "vit"}])
def test_what_torch_does_not_escape_becomes_json(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """In names of ranges, and in the document's own keys."""
    names = ['blocks["enc"].forward', 'a"}, {"b', "C:\\dir\\", "a\nb\x07", "\xff", '"']
    events = [annotation(f"NAME{k % 60}", 1773534654823498 + k, 0.5) for k in range(600)]
    document = {"user": "QUOTED", "x": "NAN", "traceEvents": events, "traceName": "QUOTED"}
    text = json.dumps(document, indent=2).replace("QUOTED", 'say "hi"').replace('"NAN"', "NaN")
    for k, name in enumerate(names):
        text = text.replace(f'"NAME{k}"', f'"{name}"')
    source, target = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    source.write_bytes(text.replace(".5,", ".125,").encode("latin-1"))
    rewrite(source, target, metadata)
    found = loaded(target)
    names[4] = "\ufffd"
    assert [event["name"] for event in found.pop("traceEvents")] == [
        [*names, *(f"NAME{k}" for k in range(6, 60))][k % 60] for k in range(600)
    ]
    assert found == {**metadata, "user": 'say "hi"', "x": None, "traceName": 'say "hi"'}
    assert same(reader.read(source), reader.read(target))


def test_a_trace_that_cannot_be_repaired_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    source.write_text('{"traceEvents": [{"ph": "X", "ts": 1}, {"ph": X}]}')
    rewrite(source, target, {})
    assert gzip.decompress(target.read_bytes()) == source.read_bytes()
