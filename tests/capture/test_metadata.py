"""A capture.json of anybody's: its keys have the types that readers rely on, or there is one sentence."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from builders import steps, write_capture

from instrument.base.errors import CaptureError
from instrument.base.storage import files_of
from instrument.capture import Capture
from instrument.report.text import render
from instrument.runs.rank_summary import summarize
from instrument.runs.run import Run
from instrument.sinks.window_scalars import last_step, scalars


def described(folder: Path, metadata: Any) -> Path:
    """A capture whose capture.json is this."""
    made = write_capture(folder, steps()).folder
    (made / "capture.json").write_text(
        metadata if isinstance(metadata, str) else json.dumps(metadata)
    )
    return made


def test_a_newer_format_is_refused_in_one_sentence(tmp_path: Path) -> None:
    made = described(tmp_path, {"format": 3})
    with pytest.raises(
        CaptureError, match=r"has format 3, but this version .* reads formats up to 2: upgrade"
    ):
        Capture.load(made)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"window": 5}, "Expected `object`, got `int` - at `$.window`"),
        (
            {"window": {"truncated": "yes"}},
            "Expected `bool | null`, got `str` - at `$.window.truncated`",
        ),
        ({"window": {"first_step": 2**60}}, "- at `$.window.first_step`"),
        ({"versions": 7}, "Expected `object`, got `int` - at `$.versions`"),
        ({"versions": {"torch": 2}}, "- at `$.versions[...]`"),
        ({"world_size": "a"}, "Expected `int | null`, got `str` - at `$.world_size`"),
        ({"world_size": 10**12}, "- at `$.world_size`"),
        ({"rank": -1}, "- at `$.rank`"),
        ({"devices": ["a", 1]}, "- at `$.devices[1]`"),
        ({"config": 5}, "Expected `object`, got `int` - at `$.config`"),
        ({"config": {"communication": "nccl"}}, "- at `$.config.communication`"),
        ({"config": {"ranks": [0, "x"]}}, "- at `$.config.ranks[1]`"),
        ({"config": {"sinks": []}}, "- at `$.config.sinks`"),
        ({"cost": "x"}, "Expected `object`, got `str` - at `$.cost`"),
        ({"cost": {"start_ns": 1.5}}, "- at `$.cost.start_ns`"),
        ({"compiled_ranges": [1]}, "Expected `object`, got `int` - at `$.compiled_ranges[0]`"),
        (
            {"compiled_ranges": [{"range": "a"}]},
            "missing required field `region` - at `$.compiled_ranges[0]`",
        ),
        ({"modules_not_seen": {"a": 1}}, "- at `$.modules_not_seen`"),
        ({"environment": []}, "Expected `object | null`, got `array` - at `$.environment`"),
        ({"environment": {"threads": 4}}, "- at `$.environment.threads`"),
        ({"environment": {"threads": {"cpus": -1}}}, "- at `$.environment.threads.cpus`"),
        ({"environment": {"grad_enabled": 1}}, "- at `$.environment.grad_enabled`"),
        ({"environment": {"float32_matmul_precision": 1}}, "float32_matmul_precision`"),
        (
            {"environment": {"dynamo": {"graph_breaks": {"a": "b"}}}},
            "Expected `int`, got `str` - at `$.environment.dynamo.graph_breaks[...]`",
        ),
        ({"environment": {"dynamo": {"graphs": 0.5}}}, "- at `$.environment.dynamo.graphs`"),
        (
            {"environment": {"garbage_collection": {"total_ns": "1"}}},
            "- at `$.environment.garbage_collection.total_ns`",
        ),
        ({"environment": {"loaders": {}}}, "- at `$.environment.loaders`"),
        (
            {"environment": {"loaders": [{"workers": 0}, {"workers": "many"}]}},
            "- at `$.environment.loaders[1].workers`",
        ),
        ({"host": "../../box"}, "- at `$.host`"),
        ({"host": "a\x00b"}, "- at `$.host`"),
        ({"started_at": "yesterday"}, "'yesterday' is not a time"),
        ({"started_at": "9" * 65}, "`str` of length <= 64 - at `$.started_at`"),
        ({"started_at": 5}, "- at `$.started_at`"),
        ({"user_metadata": []}, "- at `$.user_metadata`"),
        ({"scalars": {"a": "b"}}, "- at `$.scalars[...]`"),
    ],
)
def test_a_value_of_another_type_gets_one_sentence(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    made = described(tmp_path, metadata)
    with pytest.raises(CaptureError) as raised:
        Capture.load(made)
    said = str(raised.value)
    assert said.startswith(f"The file {made / 'capture.json'} cannot be understood (")
    assert reason in said
    assert said.endswith("): correct it, or give the path of the trace file.")
    assert Capture.load(made / "trace.json.gz").steps.column("number") == [3, 4]


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
