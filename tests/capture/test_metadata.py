"""A capture.json of anybody's: its keys have the types that readers rely on, or there is one sentence."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from builders import steps, write_capture
from golden import Golden

from instrument.base.errors import CaptureError
from instrument.base.storage import files_of
from instrument.export.sinks.window_scalars import last_step, scalars
from instrument.read.capture import Capture
from instrument.read.ranks.rank_summary import summarize
from instrument.read.ranks.run import Run
from instrument.read.show.text import render


def described(folder: Path, metadata: Any) -> Path:
    """A capture whose capture.json is this."""
    made = write_capture(folder, steps()).folder
    (made / "capture.json").write_text(
        metadata if isinstance(metadata, str) else json.dumps(metadata)
    )
    return made


WRONG: list[dict[str, Any]] = [
    {"format": 3},
    {"window": 5},
    {"window": {"truncated": "yes"}},
    {"window": {"first_step": 2**60}},
    {"versions": 7},
    {"versions": {"torch": 2}},
    {"world_size": "a"},
    {"world_size": 10**12},
    {"rank": -1},
    {"devices": ["a", 1]},
    {"config": 5},
    {"config": {"communication": "nccl"}},
    {"config": {"ranks": [0, "x"]}},
    {"config": {"sinks": []}},
    {"cost": "x"},
    {"cost": {"start_ns": 1.5}},
    {"compiled_ranges": [1]},
    {"compiled_ranges": [{"range": "a"}]},
    {"modules_not_seen": {"a": 1}},
    {"environment": []},
    {"environment": {"threads": 4}},
    {"environment": {"threads": {"cpus": -1}}},
    {"environment": {"grad_enabled": 1}},
    {"environment": {"float32_matmul_precision": 1}},
    {"environment": {"dynamo": {"graph_breaks": {"a": "b"}}}},
    {"environment": {"dynamo": {"graphs": 0.5}}},
    {"environment": {"garbage_collection": {"total_ns": "1"}}},
    {"environment": {"loaders": {}}},
    {"environment": {"loaders": [{"workers": 0}, {"workers": "many"}]}},
    {"host": "../../box"},
    {"host": "a\x00b"},
    {"started_at": "yesterday"},
    {"started_at": "9" * 65},
    {"started_at": 5},
    {"user_metadata": []},
]


def test_a_value_of_another_type_gets_one_sentence(tmp_path: Path, golden: Golden) -> None:
    told = []
    for number, metadata in enumerate(WRONG):
        made = described(tmp_path / str(number), metadata)
        with pytest.raises(CaptureError) as raised:
            Capture.load(made)
        assert Capture.load(made / "trace.json.gz").steps.column("number") == [3, 4]
        said = str(raised.value).replace(str(made), "CAPTURE")
        told.append(f"{json.dumps(metadata)}\n  {said}")
    golden("metadata.txt", "\n".join(told))


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '{"a": 1e400}', "[" * 9999, "\ud800", '{"a": NaN}', "\x00"]
)
def test_what_is_no_json_object_gets_one_sentence(tmp_path: Path, text: str) -> None:
    made = described(tmp_path, "")
    (made / "capture.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(
        CaptureError, match=f"^The file {re.escape(str(made))}.* cannot be read .*again.$"
    ):
        Capture.load(made)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"window": {}},
        {"window": {"truncated": True}},
        {"world_size": 2},
        {"world_size": None, "rank": None, "host": None, "started_at": None, "devices": None},
        {"cost": {}},
        {"cost": {"stop_ns": 1}},
        {"cost": {"recorded_step_ns": 5, "unrecorded_step_ns": 3}},
        {"config": {}},
        {"format": "none of ours", "config": {"unknown": [1]}, "unknown": {"x": None}},
        {"name": "a/../b\x00\x1b" + "c" * 300},
    ],
)
def test_every_key_may_be_missing(tmp_path: Path, metadata: dict[str, Any]) -> None:
    capture = Capture.load(described(tmp_path, metadata))
    assert capture.metadata == metadata, "what a user finds there is what was written"
    assert capture.name == "steps_3-4"
    assert "forward" in render(capture)
    assert "Truncated after ? steps" in render(capture) or not capture.about.window.truncated
    assert summarize(capture).last_step == last_step(capture) == 4
    assert dict(scalars(capture))["window/steps"] == 2
    assert capture.place == capture.folder
    assert len(Run.load(tmp_path).windows) == 1


def test_what_lies_behind_links_is_not_read(tmp_path: Path) -> None:
    made = described(tmp_path, {})
    secret = tmp_path / "secret.json"
    secret.write_text('{"name": "secret"}')
    for name in ("capture.json", "notes.txt", "summary.json"):
        (made / name).unlink(missing_ok=True)
        (made / name).symlink_to(secret)
    (made / "more").symlink_to(tmp_path)
    (made / "readme.txt").write_text("")
    with pytest.raises(
        CaptureError,
        match=r"capture.json cannot be read: is a symbolic link, which is not followed.$",
    ):
        Capture.load(made)
    (made / "capture.json").unlink()
    (made / "capture.json").write_text("{}")
    assert files_of(made) == ["readme.txt", "trace.json.gz", "capture.json"]
    (made / "trace.json.gz").rename(tmp_path / "trace.json.gz")
    (made / "trace.json.gz").symlink_to(tmp_path / "trace.json.gz")
    with pytest.raises(CaptureError, match="holds no trace"):
        Capture.load(made).events  # noqa: B018


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    made = described(tmp_path / "run", {})
    for name, target in (
        ("run", made.parent),
        ("capture", made),
        ("trace.json.gz", made / "trace.json.gz"),
    ):
        link = tmp_path / "links" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        assert len(Run.load(link).windows) == 1
        assert name == "run" or Capture.load(link).steps.column("number") == [3, 4]


def test_captures_are_found_only_where_no_link_leads(tmp_path: Path) -> None:
    elsewhere = write_capture(tmp_path / "elsewhere", steps(), "theirs").folder
    here = tmp_path / "here"
    own = write_capture(here / "a" / "b", steps(), "own").folder
    (here / "linked").symlink_to(elsewhere.parent)
    (here / "one").mkdir()
    (here / "one" / "capture.json").symlink_to(elsewhere / "capture.json")
    assert Run.load(here).windows[0].paths == [own]
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "a.json.gz").symlink_to(own / "trace.json.gz")
    os.mkfifo(traces / "b.json")
    with pytest.raises(CaptureError, match="holds no capture"):
        Run.load(traces)
    (own / "trace.json.gz").rename(traces / "c.json.gz")
    assert Run.load(traces).windows[0].paths == [traces / "c.json.gz"]
