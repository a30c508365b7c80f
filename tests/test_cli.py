"""The commands, in this process and in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from made_captures import record, span, steps, write_capture

from instrument.cli import main
from instrument.sinks.table import TableSink, render


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instrument", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, encoding="utf-8")


def test_show_prints_what_the_table_sink_wrote(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    TableSink().write(capture, capture.folder)
    done = run("show", capture.folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (capture.folder / "table.txt").read_text(encoding="utf-8")
    assert "\x1b" not in done.stdout, "plain text when piped"
    assert "forward          2    1.200 ms     600.000 µs  60.0%  400.000 µs" in done.stdout


def test_show_takes_any_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = record(tmp_path / "theirs.json")
    assert main(["show", str(trace)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"theirs: no steps marked\n{trace}\n")
    assert "aten::mm" in out


def test_the_options_reach_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path, steps())

    def shown(*options: str) -> str:
        assert main(["show", str(capture.folder), *options]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert shown() == render(capture)
    assert shown("--sort", "cpu_time_total", "--rows", "2") == render(capture, sort="host_ns", rows=2)
    assert shown("--by", "input_shapes") == render(capture, by="input_shapes")
    assert shown("--columns", "calls, share") == render(capture, columns=["calls", "share"])
    assert shown("--ranges") == render(capture, operators=False)
    assert shown("--ops") == render(capture, ranges=False)
    real = record(tmp_path / "real.json", with_stack=True)
    assert main(["show", str(real), "--by", "stack", "--stack-depth", "1", "--rows", "200", "--ops"]) == 0
    text = capsys.readouterr().out
    assert "aten::mm" in text
    indented = [line.startswith("    ") for line in text.splitlines()]
    assert not any(before and after for before, after in pairwise(indented)), "one frame each"


def test_a_folder_of_captures_shows_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = tmp_path / "day" / "profile"
    names = ["old", "newest", "middle"]
    folders = [write_capture(inner, steps(), name).folder for name in names]
    write_capture(inner, steps(), ".half.0.partial")
    for folder, when in zip(folders, (100, 300, 200)):
        os.utime(folder / "capture.json", (when, when))
    assert main(["show", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("newest: ")
    assert told.err == (
        f"Showing the newest of 3 captures, {inner / 'newest'}; the others are:\n"
        f"  {inner / 'middle'}\n  {inner / 'old'}\n"
    )


def test_a_folder_with_one_capture_says_nothing_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capture(tmp_path, steps())
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_mistakes_are_one_line_and_status_2(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "runs", [span("aten::mm", 0, 10)])
    broken, empty = tmp_path / "broken.json", tmp_path / "empty"
    broken.write_text('{"traceEvents": [')
    empty.mkdir()
    for arguments, sentence in (
        (
            [tmp_path / "nowhere"],
            f"There is no capture at {tmp_path / 'nowhere'}; give a capture folder or a trace file.",
        ),
        ([empty], f"{empty} holds no capture: give a capture's folder, a folder above it, or a trace file."),
        ([broken], f"The trace file {broken} is cut short: its JSON does not end; copy or record it again."),
        (
            [capture.folder, "--sort", "self_hots_ns"],
            "The table cannot be sorted by 'self_hots_ns'; did you mean 'self_host_ns'?",
        ),
        ([broken, "--columns", "cals"], "The table has no column 'cals'; did you mean 'calls'?"),
        (
            [capture.folder, "--by", "stack"],
            "steps_3-4 holds no stacks to group operators by: record it with profiler.with_stack=true.",
        ),
    ):
        done = run("show", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"instrument: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["show", "x", "--rows", "0"], "argument --rows: must be 1 or more, not 0"),
        (["show", "x", "--by", "shape"], "argument --by: invalid choice: 'shape'"),
        (["show", "x", "--ranges", "--ops"], "not allowed with argument"),
        (["show"], "the following arguments are required: PATH"),
        (["shwo"], "invalid choice: 'shwo'"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert part in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"instrument {version('torch-instrument')}\n"
    assert main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == without
    assert "show" in without


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, [span(f"operator_{i}", 10 * i, 5) for i in range(4000)])
    command = [sys.executable, "-m", "instrument", "show", str(capture.folder), "--rows", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"steps_3-4")
        process.stdout.close()  # long before the text ends
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_reader_that_is_gone_is_no_error(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "instrument", "show", str(capture.folder)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_output_that_knows_only_ascii(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    done = run("show", capture.folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "600.000 ?s" in done.stdout


LOADED = """
import sys
from instrument.cli import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""


def loaded(*arguments: object) -> set[str]:
    command = [sys.executable, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0
    assert done.stdout
    return set(done.stderr.split())


def test_no_command_loads_torch_and_help_loads_next_to_nothing(tmp_path: Path) -> None:
    heavy = {"torch", "numpy", "pydantic", "msgspec", "loguru", "hydra", "omegaconf"}
    for arguments in (["--help"], ["show", "--help"], ["--version"], []):
        assert heavy.isdisjoint(loaded(*arguments)), arguments
    folder = write_capture(tmp_path, steps()).folder
    for options in ([], ["--by", "input_shapes"], ["--ranges"]):
        modules = loaded("show", folder, *options)
        assert "numpy" in modules, "the check sees what is loaded"
        assert modules.isdisjoint({"torch", "hydra", "omegaconf", "tensorboard"})
