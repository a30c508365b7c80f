"""The commands, in this process and in one of their own."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from builders import (
    annotation,
    call,
    kernel,
    kernels,
    payload_of,
    span,
    steps,
    write_capture,
    write_trace,
)
from recording import record

from instrument import __version__
from instrument.analysis.coverage_rows import READ
from instrument.analysis.operator_keys import GROUPINGS
from instrument.analysis.ranges import RANGES
from instrument.analysis.schema import names_of
from instrument.analysis.views import VIEWS
from instrument.cli import show
from instrument.cli.command import main
from instrument.config import presets
from instrument.report.text import RANGE_COLUMNS, render
from instrument.sinks.table import TableSink
from instrument.trace import scanner


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instrument", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, encoding="utf-8"
    )


def test_show_prints_what_the_table_sink_wrote(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    TableSink().write(capture, capture.folder)
    done = run("show", capture.folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (capture.folder / "table.txt").read_text(encoding="utf-8")
    assert "\x1b" not in done.stdout, "plain text when piped"
    assert "forward          2    1.200 ms    600.000 µs  20.0%  400.000 µs" in done.stdout


def test_the_options_reach_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path, steps())

    def shown(*options: str) -> str:
        assert main(["show", str(capture.folder), *options]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert shown() == render(capture)
    assert shown("--sort", "cpu_time_total", "--rows", "2") == render(
        capture, sort="cpu_ns", rows=2
    )
    assert ("name", *GROUPINGS) == show.GROUPINGS
    for by in ("input_shapes", "thread", "step", "range"):
        assert shown("--by", by) == render(capture, by=by)
    assert shown("--columns", "calls, share") == render(capture, columns=["calls", "share"])
    assert shown("--ranges") == render(capture, operators=False)
    assert shown("--ops") == render(capture, ranges=False)
    real = record(tmp_path / "real.json", with_stack=True)
    assert (
        main(["show", str(real), "--by", "stack", "--stack-depth", "1", "--rows", "200", "--ops"])
        == 0
    )
    text = capsys.readouterr().out
    assert "aten::mm" in text
    indented = [line.startswith("    ") for line in text.splitlines()]
    assert not any(before and after for before, after in pairwise(indented)), "one frame each"


def test_every_view_that_is_a_table_is_offered_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(show.OPTIONS.values()) == {name for name in VIEWS if not name.endswith("()")}
    capture = write_capture(tmp_path, steps() + kernels())
    for option in show.OPTIONS:
        assert main(["show", str(capture.folder), f"--{option}"]) == 0
        assert capsys.readouterr().out.startswith(
            f"steps_3-4: steps 3–4, torch 2.13.0+cpu, no device\n{capture.folder}\n"
        )


def test_every_column_of_the_ranges_sorts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"Sequence number": 5, "Fwd thread id": 1}
    events = [
        *steps(),
        span("aten::t", 210, 5, Sequence_number=5),
        span("TBackward0", 1700, 60, **node),
    ]
    capture = write_capture(tmp_path, [*events, annotation("late", 3000, 5)])

    def first(*options: str) -> list[str]:
        assert main(["show", str(capture.folder), *options]) == 0
        text = capsys.readouterr().out
        part = next(part for part in text.split("\n\n") if part.startswith("Ranges"))
        return [line.split("  ")[0] for line in part.splitlines()[3:]]

    for column in RANGE_COLUMNS:
        order = [row.path for row in capture.ranges.sort(column)]
        assert first("--ranges", "--sort", column) == order, column
    assert first("--ranges", "--sort", "backward_ns", "--rows", "1") == ["forward"]
    assert first("--sort", "min_ns") == [row.path for row in capture.ranges.sort("min_ns")]
    assert first("--sort", "self_cpu_ns")[0] == "forward", (
        "the operators have that column: the tree stays"
    )
    assert main(["show", str(capture.folder), "--ranges", "--sort", "bakward_ns"]) == 2
    assert capsys.readouterr().err == (
        "instrument: The ranges cannot be sorted by 'bakward_ns'; did you mean 'backward_ns'?\n"
    )


def test_every_view_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path, steps() + kernels())

    def told(*options: str) -> dict[str, Any]:
        assert main(["show", str(capture.folder), "--json", *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert found.pop("name") == capture.name
        return found

    assert told() == {
        "ranges": [r._asdict() for r in capture.ranges],
        "operators": [r._asdict() for r in capture.operators],
    }
    for option, view in show.OPTIONS.items():
        table = getattr(capture, view)
        assert told(f"--{option}") == {view: [row._asdict() for row in table]}
    found = told("--kernels", "--ops", "--by", "step", "--sort", "calls", "--rows", "2")
    assert found.keys() == {"kernels", "operators"}
    assert found["operators"] == [
        row._asdict() for row in capture.operators_by("step").sort("calls").head(2)
    ]
    assert main(["show", str(capture.folder), "--json", "--sort", "cals"]) == 2
    assert "The views cannot be sorted by 'cals'; did you mean 'calls'?" in capsys.readouterr().err


def test_every_view_as_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path, steps() + kernels())

    def told(*options: str) -> list[dict[str, str]]:
        assert main(["show", str(capture.folder), "--csv", *options]) == 0
        return list(csv.DictReader(StringIO(capsys.readouterr().out)))

    for option, view in show.OPTIONS.items():
        table = attrgetter(view)(capture)
        rows = [
            {name: "" if cell is None else str(cell) for name, cell in row._asdict().items()}
            for row in table
        ]
        assert told(f"--{option}") == rows
    found = told("--ranges", "--sort", "total_ns", "--rows", "1", "--columns", "path,total_ns")
    (longest,) = capture.ranges.sort("total_ns").head(1)
    assert found == [{"path": longest.path, "total_ns": str(longest.total_ns)}]
    assert main(["show", str(capture.folder), "--csv"]) == 2
    assert "--csv prints one table" in capsys.readouterr().err
    assert main(["show", str(capture.folder), "--csv", "--ops", "--columns", "cals"]) == 2
    assert "no column 'cals'; did you mean 'calls'?" in capsys.readouterr().err


def test_the_ranges_are_sorted_by_each_of_their_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_capture(tmp_path, steps() + kernels()).folder)
    for column in names_of(RANGES):
        assert main(["show", folder, "--ranges", "--sort", column]) == 0
        assert f", by {column}; share = " in capsys.readouterr().out


def test_graphs_and_their_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = [call("cudaGraphLaunch", 0, 2, 1), kernel("gemm", 5, 3, correlation=1)]
    assert (
        main(["show", str(write_trace(tmp_path, replay)), "--cuda-graphs", "--cuda-graph-nodes"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "CUDA graphs\n" in printed
    assert "CUDA graph nodes\n" in printed


def test_the_steps_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = steps()
    events[5]["dur"] = 1500
    folder = write_capture(tmp_path, events).folder

    def shown(*options: str) -> list[str]:
        columns = ["--columns", "number,start_ns,duration_ns"]
        assert main(["show", str(folder), "--steps", *columns, *options]) == 0
        return capsys.readouterr().out.splitlines()[3:]

    header = ["number     start  duration", "------  --------  --------"]
    third, fourth = "     3      0 ns  1.000 ms", "     4  1.000 ms  1.500 ms"
    assert shown() == ["Steps", *header, third, fourth]
    assert shown("--sort", "duration_ns", "--rows", "1") == ["Steps, 1 of 2", *header, fourth]
    assert main(["show", str(folder), "--steps", "--sort", "duratoin_ns"]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == "instrument: The view steps has no column 'duratoin_ns'; did you mean 'duration_ns'?\n"
    )
    assert main(["show", str(write_capture(tmp_path, [], "none").folder), "--steps"]) == 0
    assert capsys.readouterr().out.endswith("\nSteps: there are none.\n")


def test_memory_that_was_not_recorded_is_not_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_capture(tmp_path, steps()).folder)
    for view in ("memory", "memory-steps", "memory-sizes", "memory-events"):
        assert main(["show", folder, f"--{view}"]) == 0
        printed = capsys.readouterr().out
        assert "profile_memory=true records memory" in printed, view
        assert "there are none" not in printed, view


def test_several_views_follow_each_other_below_one_heading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_capture(tmp_path, steps() + kernels()).folder

    def parts(*options: str) -> list[str]:
        assert main(["show", str(folder), *options]) == 0
        return capsys.readouterr().out.rstrip("\n").split("\n\n")

    heading, breakdown = parts("--breakdown")
    assert parts("--breakdown", "--kernels", "--breakdown") == [
        heading,
        breakdown,
        *parts("--kernels")[1:],
    ]
    assert parts("--kernels", "--ranges") == [*parts("--ranges"), *parts("--kernels")[1:]]
    assert parts("--ops", "--ranges") == parts()
    by_name = parts("--kernels", "--ops", "--sort", "name", "--columns", "calls")
    assert len({len(part.splitlines()[1].split()) for part in by_name[1:]}) == 1, (
        "both have the name and the calls"
    )


THEIRS = """
class Calls:
    def __init__(self, columns=("calls",), **more):
        self.columns, self.more = columns, more
    def write(self, capture, folder):
        if "break" in self.more:
            raise OSError(28, "No space left on device")
        table = capture.operators.select(["name", *self.columns])
        (folder / "calls.txt").write_text(f"{self.more} {[tuple(row) for row in table][:1]}")
"""


def test_any_sink_runs_afterwards(tmp_path: Path) -> None:
    (tmp_path / "their_sink.py").write_text(THEIRS)
    folder = write_capture(tmp_path / "profile", steps()).folder
    options = ["columns=[calls, cpu_ns]", "a.b=3", "to=yes"]

    def export(*arguments: object) -> str:
        command = [sys.executable, "-m", "instrument", "export", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8"
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert (
        export(folder, "--sink", "their_sink.Calls", *options)
        == f"The their_sink.Calls sink ran on {folder}.\n"
    )
    expected = "{'a': {'b': 3}, 'to': True} [('ProfilerStep*', 2, 2000000)]"
    assert (folder / "calls.txt").read_text() == expected
    export("--sink", "their_sink.Calls", folder, *options[:2], "--to", "elsewhere", options[2])
    assert (tmp_path / "elsewhere" / "steps_3-4" / "calls.txt").read_text() == expected
    trace = record(tmp_path / "theirs.json")
    export(trace, "--sink", "their_sink.Calls")
    assert (tmp_path / "theirs" / "calls.txt").read_text().startswith("{} [(")


def test_every_sink_that_ships_runs_on_captures_and_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = record(tmp_path / "real.json", with_stack=True, profile_memory=True)
    folder = write_capture(tmp_path / "profile", steps()).folder
    (folder / "trace.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    before = trace.read_bytes()
    for sink in set(presets.shipped("sinks")) - {
        "wandb",
        "mlflow",
    }:  # what these send is read in their own tests
        for path in (folder, trace):
            assert main(["export", str(path), "--sink", sink]) == 0, sink
            assert main(["export", str(path), "--sink", sink, "--to", "to"]) == 0, sink
    capsys.readouterr()
    assert trace.read_bytes() == before
    for each in (
        folder,
        tmp_path / "real",
        tmp_path / "to" / "steps_3-4",
        tmp_path / "to" / "real",
    ):
        assert {"table.txt", "stacks.txt"} <= {path.name for path in each.iterdir()}, each
    tables = [
        (each / "table.txt").read_text(encoding="utf-8").splitlines()
        for each in (folder, tmp_path / "real")
    ]
    assert tables[0][2:-1] == tables[1][2:-1], (
        "but for where it lies and why something was not recorded"
    )


def test_of_many_captures_the_newest_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(14):
        folder = write_capture(tmp_path, steps(), f"steps_{number:02}").folder
        assert folder
        os.utime(folder / "capture.json", (number, number))
    write_capture(tmp_path, steps(), ".half.0.partial")
    assert main(["show", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("steps_13: ")
    first, *others, last = err.splitlines()
    assert first.startswith(f"Showing the newest of 14 captures, {tmp_path / 'steps_13'}")
    assert [Path(line.strip()).name for line in others] == [
        f"steps_{k:02}" for k in range(12, 2, -1)
    ]
    assert last == "  and 3 more"


def test_a_folder_of_captures_is_exported_whole_and_one_failure_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in ("a", "b"):
        write_capture(tmp_path / day / "profile", steps())
    write_capture(tmp_path / "a" / "profile", steps(), ".half.0.partial")
    lake = tmp_path / "lake"
    assert main(["export", str(tmp_path), "--sink", "parquet", f"dir={lake}"]) == 0
    both = [tmp_path / day / "profile" / "steps_3-4" for day in ("a", "b")]
    assert capsys.readouterr().out == f"The parquet sink ran on {both[0]}, {both[1]}.\n"
    assert sorted(path.name for path in lake.iterdir()) == ["run=a", "run=b"]
    assert main(["export", str(tmp_path), "--sink", "table", "--to", str(tmp_path / "to")]) == 0
    written = [
        path.relative_to(tmp_path / "to") for path in sorted((tmp_path / "to").rglob("*.txt"))
    ]
    assert written == [Path(day, "profile", "steps_3-4", "table.txt") for day in ("a", "b")]
    (both[0] / "capture.json").write_text("{")
    capsys.readouterr()
    assert main(["export", str(tmp_path), "--sink", "table"]) == 2
    assert (both[1] / "table.txt").exists()
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"instrument: The table sink failed on {both[0]}: The file {both[0] / 'capture.json'} cannot be read (Input "
        "data was truncated); record the capture again. (1 of 2 captures failed; this is the first error.)"
    )


@pytest.mark.parametrize("name", ["../../evil", "..", "", "/"])
def test_what_a_capture_at_a_url_calls_itself_leads_nowhere_else(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_capture(tmp_path / "there", steps(), "good")
    about = tmp_path / "there" / "good" / "capture.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"host": "..", "name": name}))
    home = tmp_path / "a" / "b" / "c"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    before = set(tmp_path.rglob("*"))
    for sink, *options in (
        ["table"],
        ["tensorboard"],
        ["parquet"],
        ["chrome_trace", "copy_to=copies"],
    ):
        assert (
            main(
                ["export", f"file://{tmp_path}/there/good", "--sink", sink, "--to", "out", *options]
            )
            == 0
        )
    written = set(tmp_path.rglob("*")) - before
    called = "evil" if "evil" in name else "good"
    assert home / "out" / called / "table.txt" in written
    assert home / "copies" / f"{called}.json.gz" in written
    assert all(home in path.parents for path in written)


def test_a_sink_that_writes_elsewhere_leaves_no_empty_folder(tmp_path: Path) -> None:
    trace = record(tmp_path / "theirs.json")
    options = f"--sink parquet --to {tmp_path / 'to'} rank=3 run=r"
    assert main(["export", str(trace), *options.split()]) == 0
    files = [
        path.relative_to(tmp_path / "to") for path in (tmp_path / "to").rglob("*") if path.is_file()
    ]
    assert files == [Path("parquet/run=r/rank=3/window=theirs/events.parquet")]
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["parquet"]


def test_an_export_that_cannot_work_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "their_sink.py").write_text(THEIRS)
    folder = write_capture(tmp_path / "runs", steps()).folder
    for arguments, sentence in (
        (
            ["nowhere", "--sink", "table"],
            "There is no capture at nowhere; give a capture folder or a trace file.",
        ),
        (
            [folder, "upload_to=s3://b"],
            "upload_to=s3://b is an option of a sink: add --sink NAME, or remove the option.",
        ),
        (
            [folder, "--sink", "table", "row=3"],
            "The table sink has no option 'row'; did you mean 'rows'?",
        ),
        (
            [folder, "--sink", "table", "rows=[1"],
            "The option 'rows=[1' cannot be read; write key=value, as in rows=30.",
        ),
        (
            [folder, "--sink", "tabel"],
            f"'tabel' is none of the built-in sinks ({', '.join(presets.shipped('sinks'))}); did you mean table?",
        ),
        (
            [folder, "--sink", "mine"],
            f"'mine' is none of the built-in sinks ({', '.join(presets.shipped('sinks'))}); give one of these, "
            "or the import path of a class.",
        ),
        (
            [folder, "--sink", "no_such.Sink"],
            "The sink no_such.Sink cannot be built: No module named 'no_such'",
        ),
        (
            [folder, "--sink", "their_sink.Cals"],
            "The sink their_sink.Cals cannot be built: module 'their_sink' has no attribute 'Cals'",
        ),
        (
            [folder, "--sink", "stacks"],
            "The trace was recorded without with_stack and holds no Python frames; record it with with_stack=true.",
        ),
        (
            [folder, "--sink", "their_sink.Calls", "break=true"],
            f"The their_sink.Calls sink failed on {folder}: [Errno 28] No space left on device",
        ),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        assert capsys.readouterr() == ("", f"instrument: {sentence}\n")
    del sys.modules["their_sink"]


def test_a_folder_with_one_capture_says_nothing_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_capture(tmp_path, steps())
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = write_capture(tmp_path / "runs", [span("aten::mm", 0, 10)])
    broken, empty = tmp_path / "broken.json", tmp_path / "empty"
    broken.write_text('{"traceEvents": [')
    empty.mkdir()
    for arguments, sentence in (
        (
            [tmp_path / "nowhere"],
            f"There is no capture at {tmp_path / 'nowhere'}; give a capture folder or a trace file.",
        ),
        (
            [empty],
            f"{empty} holds no capture: give the folder of a capture, a folder above it, or a "
            "trace file.",
        ),
        (
            [broken],
            f"The trace file {broken} is cut short: its JSON does not end; copy or record it again.",
        ),
        (
            [capture.folder, "--sort", "self_cup_ns"],
            "The table cannot be sorted by 'self_cup_ns'; did you mean 'self_cpu_ns'?",
        ),
        ([broken, "--columns", "cals"], "The table has no column 'cals'; did you mean 'calls'?"),
        (
            [broken, "--ranges", "--by", "step"],
            "--by step groups the table of operators, which is not shown: add --ops, "
            "or remove --by.",
        ),
        (
            [broken, "--ops", "--stack-depth", "2"],
            "--stack-depth is the number of frames by which --by stack groups: add --by stack, or "
            "remove --stack-depth.",
        ),
        (
            [capture.folder, "--by", "stack"],
            "steps_3-4 holds no stacks to group operators by: record it with profiler.with_stack=true.",
        ),
    ):
        assert main(["show", *map(str, arguments)]) == 2
        assert capsys.readouterr() == ("", f"instrument: {sentence}\n")


@pytest.mark.parametrize("packed", [False, True])
def test_every_command_says_that_a_trace_is_cut_short(
    tmp_path: Path, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps({"traceEvents": [*steps(), *kernels()] * 20}).encode()
    folder = write_capture(tmp_path, steps()).folder
    (folder / "trace.json.gz").unlink()
    cut = folder / ("trace.json.gz" if packed else "trace.json")
    cut.write_bytes(gzip.compress(text)[:-30] if packed else text[:-30])
    page = tmp_path / "page.html"
    for command in (
        "show", "show --json", "show --csv --kernels", "ls", "diagnose", "diagnose --json", "whatif",
        f"diff {folder} --json", f"diff {folder} --fail-on syncs>0", f"report -o {page}",
        "report --json", "baseline", f"export --sink report --to {tmp_path / 'to'}", "ranks",
        "ranks --json", "ranks --csv ranks", f"ranks --trace {tmp_path / 'merged.json'}",
    ):  # fmt: skip
        name, *options = command.split()
        assert main([name, str(folder), *options]) == 0, command
        out, err = capsys.readouterr()
        said = [line for line in err.splitlines() if "is cut short" in line]
        if name != "ranks":
            assert len(said) == 1, command
            assert said[0].startswith(f"The trace file {cut} is cut short: only its first ")
        else:
            note = "The trace file of rank 0 is cut short: copy or record it again."
            assert note in (err if "--csv" in options else out), command
        if "--json" in options:
            assert json.loads(out)
            assert "cut short" in out or READ in out, command
    assert "trace cut short" in str(payload_of(page)["head"])


def test_a_file_or_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture, missing = write_capture(tmp_path / "runs", steps()), tmp_path / "missing" / "file"
    file = tmp_path / "file"
    file.touch()
    for command in (["report", "-o"], ["baseline", "-o"], ["ranks", "--trace"]):
        for target, why in ((missing, "No such file or directory"), (tmp_path, "Is a directory")):
            assert main([command[0], str(capture.folder), command[1], str(target)]) == 2
            assert capsys.readouterr().err == (
                f"instrument: {target} cannot be written ({why}): name a file in an existing "
                "folder that you may write to.\n"
            )
    below = file / "below"
    assert main(["export", str(capture.folder), "--sink", "table", "--to", str(below)]) == 2
    assert capsys.readouterr().err == (
        f"instrument: The folder {below / capture.name} cannot be created (Not a directory): name "
        "another one with --to.\n"
    )
    assert main(["ab", "--output", str(below), "--a", "true", "--b", "true"]) == 2
    assert capsys.readouterr().err == (
        f"instrument: --output is '{below}', which cannot be created (Not a directory): give "
        "another folder.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["show", "x", "--colums", "calls"], "unrecognized arguments: --colums calls"),
        (["show", "x", "--rows", "0"], "argument --rows: must be 1 or more, or -1 for all, not 0"),
        (
            ["show", "x", "--rows", "many"],
            "argument --rows: must be 1 or more, or -1 for all, not many",
        ),
        (["show", "x", "--by", "shape"], "argument --by: invalid choice: 'shape'"),
        (["show"], "the following arguments are required: PATH"),
        (["shwo"], "invalid choice: 'shwo'"),
        (["show", "x", "rows=3"], "unrecognized arguments: rows=3"),
        (
            ["export", "x", "--sink", "table", "rows=3", "rows", "--all=3"],
            "unrecognized arguments: rows --all=3",
        ),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("instrument: ")
    assert part in line
    command = "" if arguments == ["shwo"] else f" {arguments[0]}"
    assert line.endswith(f"; instrument{command} --help lists the arguments.")


def test_version_and_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = "compiled" if scanner.compiled else "pure Python"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"instrument {__version__}, {reader} trace reader\n"
    monkeypatch.setitem(sys.modules, "instrument.trace._scanner", None)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"instrument {__version__}, pure Python trace reader\n"
    assert main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == without
    assert "show" in without


def test_a_closed_stdout_is_one_sentence(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    for options in ("", "--json"):
        command = f'"{sys.executable}" -m instrument show "{capture.folder}" {options} >&-'
        done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == (
            "instrument: The result cannot be printed, because stdout is closed.\n"
        )


def test_too_little_memory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setattr("instrument.trace.reader.read", exhausted)
    capture = write_capture(tmp_path, steps())
    assert main(["show", str(capture.folder)]) == 2
    assert capsys.readouterr().err == (
        "instrument: not enough memory (Unable to allocate 3 GiB): read a trace of fewer steps, or "
        "allow more memory.\n"
    )


def test_a_closed_stderr_changes_neither_result_nor_status(tmp_path: Path) -> None:
    folder = write_capture(tmp_path, steps()).folder
    for path, printed, status in ((folder, run("show", folder).stdout, 0), (tmp_path / "x", "", 2)):
        command = f'"{sys.executable}" -m instrument show "{path}" 2>&-'
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False)
        assert (done.stdout, done.returncode) == (printed, status)


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
from instrument.cli.command import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""


def loaded(*arguments: object, cwd: Path | None = None) -> set[str]:
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=cwd)
    assert done.returncode == 0
    assert done.stdout
    return set(done.stderr.split())


def test_no_command_loads_torch_and_help_loads_next_to_nothing(tmp_path: Path) -> None:
    heavy = {"torch", "numpy", "pydantic", "msgspec", "loguru", "hydra", "omegaconf", "rich"}
    for arguments in (["--help"], ["show", "--help"], ["whatif", "--help"], ["--version"], []):
        assert heavy.isdisjoint(loaded(*arguments)), arguments
    folder = write_capture(tmp_path, steps()).folder
    for options in ([], ["--by", "input_shapes"], ["--ranges"], ["--steps"]):
        modules = loaded("show", folder, *options)
        assert "numpy" in modules, "the check sees what is loaded"
        assert modules.isdisjoint({"torch", "hydra", "omegaconf", "tensorboard", "rich"})
    for command in ("ranks", "whatif"):
        modules = loaded(command, folder)
        assert modules.isdisjoint({"torch", "hydra", "omegaconf", "tensorboard"}), command
    (tmp_path / "their_sink.py").write_text(THEIRS)
    for sink in ("parquet", "tensorboard", "their_sink.Calls"):
        modules = loaded("export", folder, "--sink", sink, cwd=tmp_path)
        assert modules.isdisjoint({"torch", "hydra"}), sink
