"""The file of a baseline: what it holds, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import annotation, capture, in_steps, span

from instrument.base.errors import CaptureError
from instrument.cli.command import main
from instrument.read.compare.baseline import as_text, is_baseline, read
from instrument.read.compare.counters import counters


def trace(folder: Path, extra: int = 0) -> Path:
    """Three steps; each has one operator in a range, and the last `extra` more outside of it."""
    product = span("aten::mm", 5, 50, Input_Dims=[[8, 3], [3, 4]])
    events = in_steps(3, 1000, annotation('mo"del', 0, 100), product)
    events += [span("aten::mul", 2500 + 10 * k, 5) for k in range(extra)]
    path: Path = capture(folder, events).trace_path
    return path


def test_the_file_has_sorted_counters_one_on_each_line(tmp_path: Path) -> None:
    counted = counters(capture(tmp_path, json.loads(trace(tmp_path).read_text())["traceEvents"]))
    lines = as_text(counted).splitlines()
    assert lines[:8] == [
        "{",
        '  "torch_instrument_baseline": 1,',
        '  "steps": 2,',
        '  "counters": {',
        '    "collectives": 0,',
        '    "flops": 192,',
        '    "operators": 1,',
        '    "syncs": 0',
    ]
    content = json.loads(as_text(counted))
    assert content["ranges"] == {'mo"del': {"flops": 192, "operators": 1}}
    assert content["calls"] == {'mo"del': {"aten::mm": 1}}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for extra in (0, 2):
        folder = tmp_path / str(extra)
        found = counters(
            capture(folder, json.loads(trace(folder, extra).read_text())["traceEvents"])
        )
        (tmp_path / "perf.json").write_text(as_text(found))
        assert read(tmp_path / "perf.json") == found
        varies = found.counts["operators"]
        assert varies is not None
        assert (varies.per_step is None) == (extra > 0)


def test_the_command_writes_the_same_file_each_time(tmp_path, capsys) -> None:
    path, target = trace(tmp_path), tmp_path / "perf.json"
    assert main(["baseline", str(path), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"Wrote 4 counters of 2 steps to {target}.\n"
    assert main(["baseline", str(path)]) == 0
    assert capsys.readouterr().out == target.read_text()
    assert is_baseline(target)
    assert not is_baseline(path)
    assert not is_baseline(tmp_path)
    assert main(["baseline", str(path), "-o", str(tmp_path / "missing" / "perf.json")]) == 2
    assert "cannot be written (No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "is no baseline"),
        ("{", "is no baseline"),
        ('{"torch_instrument_baseline": 1}', "is no baseline"),
        ("-1", "is no baseline"),
        ("[1, 2]", "is no baseline"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "perf.json").write_text(content)
    with pytest.raises(CaptureError, match=sentence):
        read(tmp_path / "perf.json")


def test_a_newer_format_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "perf.json"
    parts = {"steps": 1, "counters": {"syncs": 1}, "ranges": {}, "calls": {}}
    for newer in (parts, {"other": "keys"}):
        path.write_text(json.dumps({"torch_instrument_baseline": 2, **newer}))
        with pytest.raises(CaptureError, match="is no baseline of this version"):
            read(path)
    for wrong in (-1, 1.5, [1, 2], "1", None):
        counts = {"torch_instrument_baseline": 1, **parts, "counters": {"syncs": wrong}}
        path.write_text(json.dumps(counts))
        with pytest.raises(CaptureError, match="is no baseline"):
            read(path)
    with pytest.raises(CaptureError, match="cannot be read: No such file"):
        read(tmp_path / "missing.json")
