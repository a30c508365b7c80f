"""Folded stacks, checked against the functions that ran and the time they took."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builders import frame, kernels, steps, write_capture

from instrument.base.errors import CaptureError, ConfigError
from instrument.export.sinks.stacks import Stacks
from instrument.read.capture import Capture


def by_hand(output: Path, events: list[dict[str, object]], name: str = "stacked") -> Capture:
    return write_capture(output, [frame("train.py(1): main", 0, 2500, Python_id=1), *events], name)


def lines(folder: Path) -> dict[str, int]:
    """Path -> value, as flamegraph.pl reads a line: the last word is the value."""
    read = {}
    for line in (folder / "stacks.txt").read_text(encoding="utf-8").splitlines():
        path, value = re.fullmatch(r"(\S+) (\d+)", line).groups()
        assert path not in read, "each path has one line"
        read[path] = int(value)
    return read


def test_cpu_time_by_hand(tmp_path: Path) -> None:
    capture = by_hand(tmp_path, steps())
    Stacks().write(capture, capture.folder)
    step = "train.py(1):_main;ProfilerStep*"
    each = {
        "": 700,
        ";forward": 400,
        ";forward;attention": 200,
        ";forward;attention;aten::mm": 600,
        ";aten::relu": 100,
    }
    expected = {step + path: value for path, value in each.items()}
    assert lines(capture.folder) == {"train.py(1):_main": 500} | expected
    assert sum(lines(capture.folder).values()) == 2500


@pytest.mark.parametrize("metric", ["device", "self_cuda_time_total", "self_device_time_total"])
def test_device_time_by_hand(tmp_path: Path, metric: str) -> None:
    capture = by_hand(tmp_path, steps() + kernels())
    Stacks(metric=metric).write(capture, capture.folder)
    found = lines(capture.folder)
    assert sum(found.values()) == 100
    assert {path.split(";", 1)[1]: value for path, value in found.items()} == {
        "ProfilerStep*;forward;attention;aten::mm": 100
    }


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    bare = write_capture(tmp_path, steps(), "bare")
    with pytest.raises(
        CaptureError,
        match=r"^The trace was recorded without with_stack and holds no Python frames; ",
    ):
        Stacks().write(bare, bare.folder)
    cpu = by_hand(tmp_path, steps(), "cpu")
    with pytest.raises(
        CaptureError, match=r"^The trace holds no device activity, so it has no device stacks; "
    ):
        Stacks(metric="device").write(cpu, cpu.folder)
    short = write_capture(tmp_path, [frame("train.py(1): main", 0, 0, Python_id=1)], "short")
    with pytest.raises(CaptureError) as error:
        Stacks().write(short, short.folder)
    assert (
        str(error.value) == "No call path of short has CPU time, so there are no stacks to write."
    )
    for capture in (bare, cpu, short):
        assert not (capture.folder / "stacks.txt").exists()


def test_a_wrong_metric() -> None:
    with pytest.raises(ConfigError) as error:
        Stacks(metric="devcie")
    found = str(error.value)
    assert found == "The stacks sink's option 'metric' cannot be 'devcie'; did you mean 'device'?"
