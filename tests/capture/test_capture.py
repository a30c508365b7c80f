"""Opening capture folders and bare traces."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from builders import annotation, span, write_trace

from instrument.base.errors import CaptureError, TraceError
from instrument.read.capture import Capture
from instrument.read.facts import links

METADATA = {
    "format": 1,
    "name": "run-000003-rank0",
    "window": {"first_step": 3, "last_step": 5},
    "rank": 0,
}


def folder(tmp_path: Path, *, trace: str | None = "trace.json.gz") -> Path:
    made = tmp_path / "window"
    made.mkdir()
    (made / "capture.json").write_text(json.dumps(METADATA))
    plain = write_trace(tmp_path, [annotation("forward", 0, 10), span("aten::mm", 1, 5)])
    if trace:
        text = plain.read_bytes()
        (made / trace).write_bytes(gzip.compress(text) if trace.endswith(".gz") else text)
    return made


@pytest.mark.parametrize("trace", ["trace.json.gz", "trace.json"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_gives_its_metadata_and_views(tmp_path, trace, kind) -> None:
    path = folder(tmp_path, trace=trace)
    capture = Capture.load(kind(path))
    got = (capture.name, capture.folder, capture.trace_path)
    assert got == (METADATA["name"], path, path / trace)
    assert capture.metadata == METADATA
    assert [row.name for row in capture.operators] == ["forward", "aten::mm"]
    assert [row.path for row in capture.ranges] == ["forward"]
    assert len(capture.steps) == 0
    assert repr(capture) == f"<Capture 'run-000003-rank0' at {path}>"


def test_a_bare_trace_has_no_folder_and_no_metadata(tmp_path) -> None:
    path = write_trace(tmp_path, [span("aten::mm", 1, 5)])
    capture = Capture.load(path)
    got = (capture.name, capture.folder, capture.trace_path, capture.metadata)
    assert got == ("trace", None, path, {})
    assert [row.name for row in capture.operators] == ["aten::mm"]


def test_the_views_share_what_is_dear(tmp_path, monkeypatch) -> None:
    made = []

    def counting(name):
        real = getattr(links, name)
        monkeypatch.setattr(links, name, lambda *given: made.append(name) or real(*given))

    for name in ("nest", "node_flops", "named_operators", "find_scopes"):
        counting(name)
    capture = Capture.load(
        write_trace(
            tmp_path, [annotation("a", 0, 9), span("aten::mm", 1, 5, Input_Dims=[[2, 3], [3, 4]])]
        )
    )
    assert (capture.operators[1].flops, capture.ranges[0].flops) == (48, 48)
    assert [row.range for row in capture.operators_by("range")] == [None, "a"]
    assert len(capture.operators_without_flops) == 0
    assert sorted(made) == ["find_scopes", "named_operators", "nest", "node_flops"]


def test_a_view_is_made_once_and_the_trace_is_read_at_the_first(tmp_path) -> None:
    path = write_trace(tmp_path, [span("aten::mm", 1, 5)])
    capture = Capture.load(path)
    operators = capture.operators
    path.unlink()
    assert capture.operators is operators
    assert len(capture.ranges) == 0
    with pytest.raises(CaptureError):
        Capture.load(path)


def test_loading_reads_no_events(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("no trace")
    capture = Capture.load(path)
    with pytest.raises(TraceError, match="is not JSON"):
        capture.events  # noqa: B018


def sentence(text: str) -> str:
    return f"^{re.escape(text)}$"


def test_a_folder_without_metadata_gets_one_sentence(tmp_path) -> None:
    with pytest.raises(
        CaptureError,
        match=sentence(f"The folder {tmp_path} is no capture: it has no capture.json."),
    ):
        Capture.load(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "capture.json").write_text("{}")
    with pytest.raises(CaptureError) as raised:
        Capture.load(tmp_path)
    assert str(raised.value).endswith(
        f". It contains captures: give one of them, such as {tmp_path / 'one'}."
    )
    for name in ("trace.json", "trace.json.gz"):
        (tmp_path / name).touch()
        with pytest.raises(CaptureError) as raised:
            Capture.load(tmp_path)
        assert str(raised.value).endswith(f". To read its trace, give the file {tmp_path / name}.")


def test_a_folder_whose_trace_was_dropped_gets_one_sentence_from_every_view(tmp_path) -> None:
    capture = Capture.load(folder(tmp_path, trace=None))
    assert capture.metadata == METADATA
    text = (
        f"The capture {capture.folder} holds no trace: there is no trace.json.gz in it. Record again "
        "without chrome_trace.keep=false. With profiler.ranks=one_per_role, give the capture of a rank that keeps its "
        "trace, such as rank 0."
    )
    for view in ("events", "operators", "ranges", "steps"):
        with pytest.raises(CaptureError, match=sentence(text)):
            getattr(capture, view)
    with pytest.raises(CaptureError, match=sentence(text)):
        capture.stacks()
