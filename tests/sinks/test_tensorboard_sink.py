"""Traces and scalars for TensorBoard, asked of a real one over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import struct
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from builders import kernels, steps
from recording import record
from waits import until

from instrument.export.sinks.tensorboard import TensorBoard, run_name
from instrument.export.sinks.window_scalars import scalars
from instrument.read.advise.verdict import verdict
from instrument.read.capture import Capture
from instrument.read.show.step_split import COLOURS, bar_png, step_split

Write = Callable[..., Capture]
STARTED_NS = 1767323045678901000


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), from the event files of a folder in TensorBoard's order."""
    from tensorboard.compat.proto.event_pb2 import Event

    read: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                read.setdefault(value.tag, []).append((event.step, round(value.simple_value, 6)))
    return read


def logs(tmp_path: Path) -> Path:
    """The folder of the run whose captures are in the folder `profile`."""
    name = "_".join(tmp_path.parts[-2:])
    return tmp_path / "profile" / "tensorboard" / name


def test_the_scalars_of_a_window(write: Write) -> None:
    assert dict(scalars(write(steps()))) == {
        "window/steps": 2, "window/step_ms": 1.0, "window/cpu_ms": 2.0, "ranges/forward/calls": 2,
        "ranges/forward/cpu_ms": 0.6, "ranges/forward/attention/calls": 2,
        "ranges/forward/attention/cpu_ms": 0.4,
    }  # fmt: skip
    with_device = dict(scalars(write(steps() + kernels(), "device")))
    assert with_device["window/device_ms"] == 0.1
    assert with_device["ranges/forward/device_ms"] == 0.03


def test_a_recording_without_steps_counts_as_a_whole(tmp_path: Path) -> None:
    capture = Capture.load(record(tmp_path / "real.json"))
    found = dict(scalars(capture))
    assert found["window/steps"] == 0
    assert "window/step_ms" not in found
    assert found["ranges/block/calls"] == 2
    assert found["ranges/block/cpu_ms"] == capture.ranges[0].cpu_ns / 1e6
    TensorBoard(dir=str(tmp_path / "tb"), run="r").write(capture, tmp_path)
    assert points(tmp_path / "tb" / "r")["ranges/block/calls"] == [(0, 2.0)]
    (trace,) = (tmp_path / "tb" / "r").glob("*.json")
    assert trace.name.startswith(f"{socket.gethostname()}_{os.getpid()}.")


def test_traces_lie_where_torchs_handler_puts_them(capture: Capture, tmp_path: Path) -> None:
    TensorBoard().write(capture, capture.folder)
    beside = logs(tmp_path)
    (trace,) = beside.glob("*.json*")
    assert trace.name == f"box_77.{STARTED_NS}.pt.trace.json"
    recorded = json.loads(gzip.decompress(capture.trace_path.read_bytes()))
    assert json.loads(trace.read_bytes()) == recorded
    TensorBoard(dir=str(tmp_path / "tb"), run="r", worker_name="w0", use_gzip=True).write(
        capture, capture.folder
    )
    (packed,) = (tmp_path / "tb" / "r").glob("*.json*")
    assert packed.name == f"w0.{STARTED_NS}.pt.trace.json.gz"
    assert packed.read_bytes() == capture.trace_path.read_bytes()
    # the plugin's own pattern for a worker, a time and its two endings
    assert all(
        re.match(r"^(.*?)(?:\.(\d+))?\.pt\.trace\.json(?:\.gz)?$", path.name)
        for path in (trace, packed)
    )


def test_only_traces_or_only_scalars(capture: Capture, tmp_path: Path) -> None:
    TensorBoard(dir=str(tmp_path / "t"), run="r", scalars=False).write(capture, capture.folder)
    assert [p.suffixes[-3:] for p in (tmp_path / "t" / "r").iterdir()] == [
        [".pt", ".trace", ".json"]
    ]
    TensorBoard(dir=str(tmp_path / "s"), run="r", trace=False).write(capture, capture.folder)
    assert [p.name for p in (tmp_path / "s" / "r").iterdir()] == [
        "events.out.tfevents.1767323045.box.77.steps_3-4"
    ]


def of_step(write: Write, last: int, second: int, events: Any) -> Capture:
    """A capture of two steps, written in that second."""
    window = {"first_step": last - 1, "last_step": last, "truncated": False}
    started_at = f"2026-01-02T03:04:{second:02}+00:00"
    return write(events, f"steps_{last}", window=window, started_at=started_at)


def test_windows_are_points_of_one_curve(write: Write, tmp_path: Path) -> None:
    longer = [{**event, "dur": event["dur"] * 2, "ts": event["ts"] * 2} for event in steps()]
    written = ((4, 9, steps()), (9, 10, longer), (14, 10, steps()))
    captures = [of_step(write, *each) for each in written]
    for _ in range(2):
        for each in captures:
            TensorBoard(trace=False).write(each, each.folder)
    found = points(logs(tmp_path))
    assert sorted(found["ranges/forward/cpu_ms"]) == [(4, 0.6), (9, 1.2), (14, 0.6)]
    assert sorted(found["window/step_ms"]) == [(4, 1.0), (9, 2.0), (14, 1.0)]


def test_ranks_have_runs_of_their_own(write: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        each = write(steps(), f"rank{rank}", rank=rank, world_size=2, pid=70 + rank)
        TensorBoard().write(each, each.folder)
    beside = logs(tmp_path)
    assert len(list(beside.glob("*.pt.trace.json"))) == 2
    found = [len([*folder.glob("*tfevents*")]) for folder in (beside, beside / "rank1")]
    assert found == [1, 1]


def test_a_window_without_a_whole_step_stands_at_its_first(write: Write, tmp_path: Path) -> None:
    cut = {"first_step": 7, "last_step": None, "steps": 0, "truncated": True, "reason": "failed"}
    capture = write(steps()[1:3], window=cut)
    TensorBoard(trace=False).write(capture, capture.folder)
    assert points(logs(tmp_path))["ranges/forward/cpu_ms"] == [(7, 0.6)]


def test_traces_alone_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.base.errors.find_spec", lambda name: None)
    TensorBoard(scalars=False)


@contextmanager
def served(logdir: Path, output: Path) -> Iterator[str]:
    """A TensorBoard on a free port of this machine, as its address; ended in any case."""
    where = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-m", "tensorboard.main", *where]
    with output.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield until(lambda: re.search(r"http://127\.0\.0\.1:\d+", output.read_text())).group()
    finally:
        process.kill()
        process.wait()


def test_a_real_tensorboard_shows_our_scalars_and_report(write: Write, tmp_path: Path) -> None:
    for last, second in ((4, 9), (9, 10)):
        each = of_step(write, last, second, steps())
        TensorBoard().write(each, each.folder)
    output, run = tmp_path / "tensorboard.log", quote(logs(tmp_path).name)
    with served(logs(tmp_path).parent, output) as address:

        def ask(path: str) -> Any:
            with urllib.request.urlopen(f"{address}/data/plugin/{path}", timeout=600) as answer:
                found = answer.read()
            return found if path.startswith("images/individualImage") else json.loads(found)

        def curve() -> Any:
            if run not in ask("scalars/tags"):
                return None
            tag = "ranges%2Fforward%2Fattention%2Fcpu_ms"
            found = ask(f"scalars/scalars?run={run}&tag={tag}")
            return found if len(found) == 2 else None

        found = until(curve)
        assert [(when, step, round(value, 6)) for when, step, value in found] == [
            (1767323049.0, 4, 0.4),
            (1767323050.0, 9, 0.4),
        ]
        assert set(ask("scalars/tags")[run]) == {tag for tag, _ in scalars(each)}
        verdicts = until(lambda: ask(f"text/text?run={run}&tag=window%2Fverdict"))
        assert f"<strong>{verdict(each.diagnose())}</strong>" in verdicts[-1]["text"]
        (table, _) = ask(f"text/text?run={run}&tag=window%2Franges")
        assert "<code>" in table["text"]
        assert "forward" in table["text"]
        images = ask(f"images/images?run={run}&tag=window%2Fstep_split_bar&sample=0")
        assert [image["step"] for image in images] == [4, 9]
        shown = ask(f"images/individualImage?{images[-1]['query']}")
        assert shown == bar_png([share for _, share in step_split(each)])


def test_the_bar_has_the_pixels_of_the_shares(write: Write) -> None:
    image = pytest.importorskip("PIL.Image").open(BytesIO(bar_png([0.25, 0.5])))
    assert (image.mode, image.size) == ("RGB", (800, 40))
    blue, orange, *_ = COLOURS.values()
    counted = Counter(image.get_flattened_data())
    assert counted == {blue: 200 * 40, orange: 400 * 40, (255, 255, 255): 200 * 40}
    assert image.getpixel((199, 39)) == blue
    assert image.getpixel((200, 0)) == orange


def test_the_parts_of_a_step_add_up_to_the_whole(write: Write) -> None:
    """Step 4 by hand; step 3 does not count."""
    on_cpu = {"CPU operators": 0.35, "Python": 0.3, "idle": 0.35}
    assert dict(step_split(write(steps()))) == pytest.approx(on_cpu)
    # The call takes 10 µs, and the kernel begins 30 µs after it.
    on_device = {
        "compute": 0.03, "launch": 0.04, "CPU operators": 0.28, "Python": 0.3, "idle": 0.35,
    }  # fmt: skip
    assert dict(step_split(write(steps() + kernels(), "device"))) == pytest.approx(on_device)


def test_the_run_is_named_after_its_folder() -> None:
    assert run_name(Path("/x/outputs/2026-01-02/03-04-05/profile")) == "2026-01-02_03-04-05"
    assert run_name(Path("/x/resnet")) == "resnet"
    assert run_name(Path("/profile")) == "profile"
    assert run_name(Path("/")) == "run"
