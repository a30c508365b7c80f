"""Where captures are found, and which of them are of the newest run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from builders import span, step, write_capture

from instrument.base.errors import CaptureError
from instrument.read.views.find_captures import (
    captures_at,
    captures_below,
    of_newest_run,
    windows,
    with_parts,
)

EVENTS = [step(1, 0, 100), span("aten::mm", 10, 20)]


def made(folder: Path, name: str, **about: object) -> Path:
    found: Path = write_capture(folder, EVENTS, name, **about).folder
    return found


def test_hidden_folders_links_and_deep_folders_are_left_out(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    found = made(run / "a" / "b", "steps")
    made(run / ".queued", "hidden")
    made(run / "1" / "2" / "3" / "4" / "5", "deep")
    (run / "link").symlink_to(made(elsewhere, "other"), target_is_directory=True)
    (run / "forged").mkdir()
    (run / "forged" / "capture.json").symlink_to(elsewhere / "other" / "capture.json")
    assert [*captures_below(run)] == [found]
    assert captures_at(run) == [found]


def test_the_newest_capture_is_the_last(tmp_path: Path) -> None:
    folders = [made(tmp_path, name) for name in ("b", "c", "a")]
    for second, folder in enumerate(folders):
        os.utime(folder / "capture.json", (second, second))
    assert captures_at(tmp_path) == folders


def test_a_folder_of_traces_is_a_run_only_where_it_may_be(tmp_path: Path) -> None:
    traces = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    for trace in traces:
        trace.write_text(json.dumps({"traceEvents": EVENTS}))
    (tmp_path / ".hidden.json").write_text("{}")
    assert sorted(captures_at(tmp_path, or_traces=True)) == traces
    with pytest.raises(CaptureError, match="holds no capture: give the folder"):
        captures_at(tmp_path)


def test_timings_alone_are_named(tmp_path: Path) -> None:
    (tmp_path / "timings_rank0.jsonl").write_text("")
    with pytest.raises(
        CaptureError, match=r"holds timings and no capture: `instrument show .* --t"
    ):
        captures_at(tmp_path)


def test_all_ranks_of_the_newest_run_and_no_older_run(tmp_path: Path) -> None:
    def rank(name: str, minute: int, rank: int, pid: int) -> Path:
        about = {"started_at": f"2026-01-01T00:{minute:02}:00Z", "run": f"r{pid}", "pid": pid}
        return made(tmp_path, name, rank=rank, world_size=2, host="node", **about)

    older = [rank("old0", 0, 0, 10), rank("old1", 1, 1, 11)]
    newer = [rank("new0", 30, 0, 20), rank("new1", 29, 1, 21), rank("again0", 40, 0, 20)]
    found = of_newest_run([*older, *newer])
    assert (found.captures, found.older) == (newer, older)
    assert found.left_out == (
        "Only the newest run counts; 2 captures of older runs are left out: old0, old1."
    )
    assert of_newest_run(newer).left_out == ""


def test_the_parts_of_a_window_belong_together_and_the_longest_stands_for_them(tmp_path) -> None:
    def part(name: str, **window: object) -> Path:
        return made(tmp_path, name, run="r", rank=0, window={"phase": "train", **window})

    whole = part("whole", first_step=0, steps=9)
    parts = [
        part(f"part{number}", part=number, part_of_step=10, steps=steps)
        for number, steps in enumerate((1, 4, 2))
    ]
    other = part("other", part=0, part_of_step=30, steps=1)
    assert windows([whole, *reversed(parts), other]) == [[whole], parts, [other]]
    assert with_parts(parts[0]) == parts
    assert [with_parts(each) for each in (parts[1], whole, other)] == [
        [parts[1]], [whole], [other],
    ]  # fmt: skip
    assert of_newest_run([whole, *parts]).captures == [whole, parts[0], parts[2], parts[1]]
    assert of_newest_run([*parts, whole]).captures == [*parts, whole]
