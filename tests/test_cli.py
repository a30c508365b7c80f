"""The commands, in this process and in one of their own."""

from __future__ import annotations

import csv
import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from io import StringIO
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from builders import (
    annotation,
    call,
    kernel,
    kernels,
    payload_of,
    span,
    steps,
    synchronous_steps,
    write_capture,
    write_rank,
    write_trace,
)
from commands import Command
from golden import Golden
from installed import need
from recording import record

from instrument import __version__
from instrument.base import presets
from instrument.cli import show
from instrument.cli.command import main
from instrument.export.sinks.table import TableSink
from instrument.read.capture import Capture
from instrument.read.facts.schema import names_of
from instrument.read.show.text import RANGE_COLUMNS, render
from instrument.read.trace import scanner
from instrument.read.views.coverage_rows import READ
from instrument.read.views.operators import GROUPINGS
from instrument.read.views.ranges import RANGES
from instrument.read.views.table_text import heading
from instrument.read.views.views import VIEWS


def bare(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a new Python."""
    command = [sys.executable, "-m", "instrument", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, encoding="utf-8"
    )


def test_show_prints_what_the_table_sink_wrote(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    TableSink().write(capture, capture.folder)
    done = warm.run_apart(["-m", "instrument", "show", str(capture.folder)], tmp_path, os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (capture.folder / "table.txt").read_text(encoding="utf-8")
    assert "\x1b" not in done.stdout, "plain text when piped"
    assert "forward          2  1.200 ms      600.0 µs   20 %    400.0 µs" in done.stdout


def test_the_options_reach_the_table(tmp_path: Path, command: Command) -> None:
    capture = write_capture(tmp_path, steps())

    def shown(*options: str) -> str:
        return command("show", capture.folder, *options).out.removesuffix("\n")

    assert shown() == render(capture)
    by_cpu = render(capture, sort="cpu_ns", rows=2)
    assert shown("--sort", "cpu_time_total", "--rows", "2") == by_cpu
    assert ("name", *GROUPINGS) == show.GROUPINGS
    for by in ("input_shapes", "thread", "step", "range"):
        assert shown("--by", by) == render(capture, by=by)
    assert shown("--columns", "calls, share") == render(capture, columns=["calls", "share"])
    assert shown("--ranges") == render(capture, operators=False)
    assert shown("--ops") == render(capture, ranges=False)
    real = record(tmp_path / "real.json", with_stack=True)
    options = ["--by", "stack", "--stack-depth", "1", "--rows", "200", "--ops"]
    text = command("show", real, *options).out
    assert "aten::mm" in text
    indented = [line.startswith("    ") for line in text.splitlines()]
    assert not any(before and after for before, after in pairwise(indented)), "one frame each"


def test_show_offers_every_table(tmp_path: Path, command: Command) -> None:
    """As text, as JSON and as CSV."""
    assert set(show.OPTIONS.values()) == {name for name in VIEWS if not name.endswith("()")}
    capture = write_capture(tmp_path, steps() + kernels())
    heading = f"steps_3-4: steps 3–4, torch 2.13.0+cpu, no device\n{capture.folder}\n"
    for option, view in show.OPTIONS.items():
        shown = ["show", capture.folder, f"--{option}"]
        assert command(*shown).out.startswith(heading)
        rows = [row._asdict() for row in attrgetter(view)(capture)]
        assert json.loads(command(*shown, "--json").out) == {
            "version": 1, "name": capture.name, view: rows
        }  # fmt: skip
        cells = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
        assert [*csv.DictReader(StringIO(command(*shown, "--csv").out))] == cells


def test_every_column_of_the_ranges_sorts_them(tmp_path: Path, command: Command) -> None:
    node = {"Sequence number": 5, "Fwd thread id": 1}
    events = [*steps(), span("aten::t", 210, 5, Sequence_number=5), annotation("late", 3000, 5)]
    capture = write_capture(tmp_path, [*events, span("TBackward0", 1700, 60, **node)])

    def paths(text: str) -> list[str]:
        part = next(part for part in text.split("\n\n") if part.startswith("Ranges"))
        names = [line.split("  ")[0] for line in part.splitlines()[3:]]
        return [name for name in names if not name.startswith("(")]

    def first(*options: str) -> list[str]:
        return paths(command("show", capture.folder, *options).out)

    assert set(RANGE_COLUMNS) <= set(names_of(RANGES))
    for column in names_of(RANGES):
        text = command("show", capture.folder, "--ranges", "--sort", column).out
        assert f", by {heading(column)}; share = " in text
        if column in RANGE_COLUMNS:
            assert paths(text) == [row.path for row in capture.ranges.sort(column)], column
    assert first("--ranges", "--sort", "backward_ns", "--rows", "1") == ["forward"]
    assert first("--sort", "min_ns") == [row.path for row in capture.ranges.sort("min_ns")]
    # the operators have that column: the tree stays
    assert first("--sort", "self_cpu_ns")[0] == "forward"


def test_json_of_several_views(tmp_path: Path, command: Command) -> None:
    capture = write_capture(tmp_path, steps() + kernels())

    def told(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(command("show", capture.folder, "--json", *options).out)
        assert found.pop("version") == 1
        assert found.pop("name") == capture.name
        return found

    assert told() == {
        "ranges": [r._asdict() for r in capture.ranges],
        "operators": [r._asdict() for r in capture.operators],
    }
    found = told("--kernels", "--ops", "--by", "step", "--sort", "calls", "--rows", "2")
    assert found.keys() == {"kernels", "operators"}
    by_step = capture.operators_by("step").sort("calls").head(2)
    assert found["operators"] == [row._asdict() for row in by_step]


def test_csv_of_chosen_rows_and_columns(tmp_path: Path, command: Command) -> None:
    capture = write_capture(tmp_path, steps() + kernels())
    options = ["--ranges", "--sort", "total_ns", "--rows", "1", "--columns", "path,total_ns"]
    (longest,) = capture.ranges.sort("total_ns").head(1)
    shown = command("show", capture.folder, "--csv", *options).out.splitlines()
    assert shown == ["path,total_ns", f"{longest.path},{longest.total_ns}"]


def test_graphs_and_their_nodes(tmp_path: Path, command: Command) -> None:
    replay = [call("cudaGraphLaunch", 0, 2, 1), kernel("gemm", 5, 3, correlation=1)]
    path = write_trace(tmp_path, replay)
    printed = command("show", path, "--cuda-graphs", "--cuda-graph-nodes").out
    assert "CUDA graphs\n" in printed
    assert "CUDA graph nodes\n" in printed


def test_the_steps_alone(tmp_path: Path, command: Command) -> None:
    events = steps()
    events[5]["dur"] = 1500
    folder = write_capture(tmp_path, events).folder

    def shown(*options: str) -> list[str]:
        columns = ["--columns", "number,start_ns,duration_ns"]
        return command("show", folder, "--steps", *columns, *options).out.splitlines()[3:]

    header = ["number     start  duration", "------  --------  --------"]
    third, fourth = "     3      0 ns  1.000 ms", "     4  1.000 ms  1.500 ms"
    assert shown() == ["Steps", *header, third, fourth]
    assert shown("--sort", "duration_ns", "--rows", "1") == ["Steps, 1 of 2", *header, fourth]
    empty = write_capture(tmp_path, [], "none").folder
    assert command("show", empty, "--steps").out.endswith("\nSteps: there are none.\n")


def test_memory_that_was_not_recorded_is_not_none(tmp_path: Path, command: Command) -> None:
    folder = write_capture(tmp_path, steps()).folder
    for view in ("memory", "memory-steps", "memory-events"):
        printed = command("show", folder, f"--{view}").out
        assert "profile_memory=true records memory" in printed, view
        assert "there are none" not in printed, view


def test_several_views_have_one_heading(tmp_path: Path, command: Command) -> None:
    folder = write_capture(tmp_path, steps() + kernels()).folder

    def parts(*options: str) -> list[str]:
        return command("show", folder, *options).out.rstrip("\n").split("\n\n")

    heading, breakdown = parts("--breakdown")
    both = parts("--breakdown", "--kernels", "--breakdown")
    assert both == [heading, breakdown, *parts("--kernels")[1:]]
    assert parts("--kernels", "--ranges") == [*parts("--ranges"), *parts("--kernels")[1:]]
    assert parts("--ops", "--ranges") == parts()
    by_name = parts("--kernels", "--ops", "--sort", "name", "--columns", "calls")
    (columns,) = {len(part.splitlines()[1].split()) for part in by_name[1:]}
    assert columns == 2, "both have the name and the calls"


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
        """`python -m`, which finds modules in its folder."""
        words = ["-m", "instrument", "export", *map(str, arguments)]
        done = warm.run_apart(words, tmp_path, os.environ)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    ran = f"The their_sink.Calls sink ran on {folder}.\n"
    assert export(folder, "--sink", "their_sink.Calls", *options) == ran
    expected = "{'a': {'b': 3}, 'to': True} [('ProfilerStep*', 2, 2000000)]"
    assert (folder / "calls.txt").read_text() == expected
    export("--sink", "their_sink.Calls", folder, *options[:2], "--to", "elsewhere", options[2])
    assert (tmp_path / "elsewhere" / "steps_3-4" / "calls.txt").read_text() == expected
    export(write_trace(tmp_path, steps()), "--sink", "their_sink.Calls")
    assert (tmp_path / "trace" / "calls.txt").read_text().startswith("{} [(")


def test_sinks_export(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = record(tmp_path / "real.json", with_stack=True, profile_memory=True)
    folder = write_capture(tmp_path / "profile", steps()).folder
    (folder / "trace.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    before = trace.read_bytes()
    # what wandb and mlflow send is read in their own tests
    for sink in set(presets.shipped("sinks")) - {"wandb", "mlflow"}:
        for path in (folder, trace):
            command("export", path, "--sink", sink)
            command("export", path, "--sink", sink, "--to", "to")
    assert trace.read_bytes() == before
    for each in (
        folder,
        tmp_path / "real",
        *(tmp_path / "to" / of for of in ("steps_3-4", "real")),
    ):
        assert {"table.txt", "stacks.txt"} <= {path.name for path in each.iterdir()}, each
    # what is before the tables says also where the trace lies, and why something was not recorded
    tables = [
        (each / "table.txt").read_text(encoding="utf-8").partition("\nRanges; ")[2].splitlines()
        for each in (folder, tmp_path / "real")
    ]
    assert tables[0][:-1] == tables[1][:-1] != []


def test_show_skips_captures_without_trace(tmp_path: Path, command: Command) -> None:
    for number in range(2):
        folder = write_capture(tmp_path, steps(), f"steps_{number}").folder
        os.utime(folder / "capture.json", (number, number))
    (folder / "trace.json.gz").unlink()
    out, err = command("show", tmp_path)
    assert "\nsteps_0: " in out
    assert err.startswith(f"Showing the most complete of 2 captures, {tmp_path / 'steps_0'}")


def test_show_prefers_whole_training_windows(tmp_path: Path, command: Command) -> None:
    """Of the folder's newest run; the page's sections show the same window."""
    windows = {"whole": {}, "cut": {"truncated": True}, "validation": {"phase": "validation"}}
    for number, (name, window) in enumerate(windows.items()):
        folder = write_capture(tmp_path, steps(), name, window=window).folder
        os.utime(folder / "capture.json", (number, number))
    out, err = command("show", tmp_path)
    assert "\nwhole: " in out
    assert err.startswith(f"Showing the most complete of 3 captures, {tmp_path / 'whole'}")
    page = json.loads(command("report", tmp_path, "--json").out)
    assert page["title"] == "whole"
    assert " in whole" in json.dumps(page["sections"]["verdict"])  # its cards are of this capture
    shutil.rmtree(tmp_path / "whole")
    assert "\ncut: " in command("show", tmp_path).out


def test_of_many_captures_that_hold_nothing_ten_are_named(tmp_path: Path, command: Command) -> None:
    for rank in range(13):
        folder = write_rank(tmp_path, rank, synchronous_steps(100), 13).folder
        if rank:
            (folder / "trace.json.gz").unlink()
            (folder / "summary.json").unlink()
    _, err = command("diagnose", tmp_path)
    first, *_, last = lines = err.splitlines()
    assert first.startswith("Left out: The capture ")
    assert len(lines) == 11
    assert last == "Left out: 2 more"


def test_ranks_without_traces_use_summaries(tmp_path: Path, command: Command) -> None:
    """As profiler.ranks=one_per_role leaves them; rank 3 is slow, and rank 3 has no trace."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    for rank in range(4):
        events = synchronous_steps(500 if rank == 3 else 100)
        folder = write_rank(run, rank, events, 4).folder
        if rank > 1:
            (folder / "trace.json.gz").unlink()
    said = "2 of 4 captures hold no trace: only their summaries are compared.\n"
    out, err = command("diagnose", run, "--json")
    late, exposed = json.loads(out)["findings"]
    assert err == said
    assert not exposed.get("saving")
    assert "(with waits for late ranks)" in exposed["title"]
    assert exposed["title"].endswith("(on ranks 0, 1)")
    assert late["title"].startswith("Rank 3 is late")
    assert command("report", run, "-o", page).err == said
    out = command("report", run, "--json").out
    assert "Rank 3 is late" in out
    assert len(json.loads(out)["sections"]["runs"]["parts"]) > 1
    out = command("ls", run).out
    assert out.count("    There is no trace to diagnose: give a capture that holds one.\n") == 2
    err = command("ranks", run, "--trace", tmp_path / "all.json").err
    assert err == (f"The traces of 2 of 4 ranks are in {tmp_path / 'all.json'}\n")
    assert Capture.load(tmp_path / "all.json").events.recorded > 0
    for path in run.glob("*/trace.json.gz"):
        path.unlink()
    assert "give a capture that holds one" in command("diagnose", run, status=2).err


def test_of_many_captures_the_newest_are_named(tmp_path: Path, command: Command) -> None:
    for number in range(14):
        folder = write_capture(tmp_path, steps(), f"steps_{number:02}").folder
        os.utime(folder / "capture.json", (number, number))
    write_capture(tmp_path, steps(), ".half.0.partial")
    out, err = command("show", tmp_path)
    assert "\nsteps_13: " in out
    first, *others, last = err.splitlines()
    assert first.startswith(f"Showing the newest of 14 captures, {tmp_path / 'steps_13'}")
    names = [f"steps_{k:02}" for k in range(12, 2, -1)]
    assert [Path(line.strip()).name for line in others] == names
    assert last == "  and 3 more"


def test_export_of_a_folder_with_one_failure(tmp_path: Path, command: Command) -> None:
    for day in ("a", "b"):
        write_capture(tmp_path / day / "profile", steps())
    write_capture(tmp_path / "a" / "profile", steps(), ".half.0.partial")
    lake = tmp_path / "lake"
    both = [tmp_path / day / "profile" / "steps_3-4" for day in ("a", "b")]
    printed = command("export", tmp_path, "--sink", "parquet", f"dir={lake}").out
    assert printed == f"The parquet sink ran on {both[0]}, {both[1]}.\n"
    assert sorted(path.name for path in lake.iterdir()) == ["run=a", "run=b"]
    command("export", tmp_path, "--sink", "table", "--to", tmp_path / "to")
    written = [
        path.relative_to(tmp_path / "to") for path in sorted((tmp_path / "to").rglob("*.txt"))
    ]
    assert written == [Path(day, "profile", "steps_3-4", "table.txt") for day in ("a", "b")]
    (both[0] / "capture.json").write_text("{")
    said = command("export", tmp_path, "--sink", "table", status=2).err
    assert (both[1] / "table.txt").exists()
    assert said.splitlines()[-1] == (
        f"instrument: The table sink failed on {both[0]}: The file {both[0] / 'capture.json'} cannot be read (Input "
        "data was truncated); record the capture again. (1 of 2 captures failed; this is the first error.)"
    )


@pytest.mark.parametrize("name", ["../../evil", "..", "", "/"])
def test_what_a_capture_at_a_url_calls_itself_leads_nowhere_else(
    tmp_path: Path, name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_capture(tmp_path / "there", steps(), "good")
    about = tmp_path / "there" / "good" / "capture.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"host": "..", "name": name}))
    home = tmp_path / "a" / "b" / "c"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    before = set(tmp_path.rglob("*"))
    url = f"file://{tmp_path}/there/good"
    for sink in ("table", "tensorboard", "parquet", "chrome_trace copy_to=copies"):
        command("export", url, "--to", "out", "--sink", *sink.split())
    written = set(tmp_path.rglob("*")) - before
    called = "evil" if "evil" in name else "good"
    assert home / "out" / called / "table.txt" in written
    assert home / "copies" / f"{called}.json.gz" in written
    assert all(home in path.parents for path in written)


def test_no_empty_folder_is_left(tmp_path: Path, command: Command) -> None:
    trace, to = write_trace(tmp_path, steps()), tmp_path / "to"
    command("export", trace, "--sink", "parquet", "--to", to, "rank=3", "run=r")
    files = sorted(path.relative_to(to) for path in to.rglob("*") if path.is_file())
    window = Path("parquet/run=r/rank=3/window=trace")
    assert files == [window / "events.parquet", window / "segments.parquet"]
    assert [path.name for path in to.iterdir()] == ["parquet"]


MISTAKES = [
    "show nowhere",
    "show empty",
    "show broken.json",
    "show runs/steps_3-4 --sort self_cup_ns",
    "show runs/steps_3-4 --ranges --sort bakward_ns",
    "show runs/steps_3-4 --steps --sort duratoin_ns",
    "show runs/steps_3-4 --json --sort cals",
    "show runs/steps_3-4 --csv",
    "show runs/steps_3-4 --csv --ops --columns cals",
    "show broken.json --columns cals",
    "show broken.json --ranges --by step",
    "show broken.json --ops --stack-depth 2",
    "show runs/steps_3-4 --by stack",
    "export nowhere --sink table",
    "export runs/steps_3-4 upload_to=s3://b",
    "export runs/steps_3-4 --sink table row=3",
    "export runs/steps_3-4 --sink table rows=[1",
    "export runs/steps_3-4 --sink tabel",
    "export runs/steps_3-4 --sink mine",
    "export runs/steps_3-4 --sink no_such.Sink",
    "export runs/steps_3-4 --sink their_sink.Cals",
    "export runs/steps_3-4 --sink stacks",
    "export runs/steps_3-4 --sink their_sink.Calls break=true",
    "report runs/steps_3-4 -o missing/file",
    "baseline runs/steps_3-4 -o missing/file",
    "ranks runs/steps_3-4 --trace missing/file",
    "report runs/steps_3-4 -o empty",
    "baseline runs/steps_3-4 -o empty",
    "ranks runs/steps_3-4 --trace empty",
    "export runs/steps_3-4 --sink table --to broken.json/below",
    "ab --output broken.json/below --a true --b true",
    # these the parser refuses
    "show x --colums calls",
    "show x --rows 0",
    "show x --rows many",
    "show x --by shape",
    "show",
    "shwo",
    "show x rows=3",
    "export x --sink table rows=3 rows --all=3",
]


def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transcript: Callable[[list[str]], str],
    golden: Golden,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    Path("their_sink.py").write_text(THEIRS)
    write_capture(Path("runs"), [span("aten::mm", 0, 10)])
    Path("broken.json").write_text('{"traceEvents": [')
    Path("empty").mkdir()
    said = transcript(MISTAKES)
    del sys.modules["their_sink"]
    for each in said.split("\n\n"):
        assert re.fullmatch(r".*\ninstrument: .*\n\(exit status 2\)\n?", each), each
    # how argparse lists the choices depends on Python's version
    golden("mistakes.txt", re.sub(r" \(choose from [^)]*\)", "", said))


def test_a_folder_with_one_capture_says_nothing_of_others(tmp_path: Path, command: Command) -> None:
    write_capture(tmp_path, steps())
    assert command("show", tmp_path).err == ""


@pytest.mark.parametrize("packed", [False, True])
def test_cut_trace_is_said_by_commands(tmp_path: Path, packed: bool, command: Command) -> None:
    text = json.dumps({"traceEvents": [*steps(), *kernels()] * 20}).encode()
    folder = write_capture(tmp_path, steps()).folder
    (folder / "trace.json.gz").unlink()
    cut = folder / ("trace.json.gz" if packed else "trace.json")
    cut.write_bytes(gzip.compress(text)[:-30] if packed else text[:-30])
    page = tmp_path / "page.html"
    for words in (
        "show", "show --json", "show --csv --kernels", "ls", "diagnose", "diagnose --json", "whatif",
        f"diff {folder} --json", f"diff {folder} --fail-on syncs>0", f"report -o {page}",
        "report --json", "baseline", f"export --sink report --to {tmp_path / 'to'}", "ranks",
        "ranks --json", "ranks --csv ranks", f"ranks --trace {tmp_path / 'merged.json'}",
    ):  # fmt: skip
        name, *options = words.split()
        out, err = command(name, folder, *options)
        said = [line for line in err.splitlines() if "is cut short" in line]
        if name != "ranks":
            assert len(said) == 1, words
            assert said[0].startswith(f"The trace file {cut} is cut short: only its first ")
        else:
            note = "The trace file of rank 0 is cut short: copy or record it again."
            assert note in (err if "--csv" in options else out), words
        if "--json" in options:
            assert json.loads(out)
            assert "cut short" in out or READ in out, words
    assert "trace cut short" in str(payload_of(page)["head"])


def test_version_and_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = "compiled" if scanner.compiled else "pure Python"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"instrument {__version__}, {reader} trace reader\n"
    monkeypatch.setitem(sys.modules, "instrument.read.trace._scanner", None)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"instrument {__version__}, pure Python trace reader\n"
    for words in (["--verbose"], ["--verbose", "ls"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "--verbose needs --version" in capsys.readouterr().err
    assert main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == without
    assert "show" in without


def test_the_verbose_version_names_packages_and_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda each: f"H{each}00\n::error::")
    assert main(["--version", "--verbose"]) == 0
    first, python, torch_, packages, missing = capsys.readouterr().out.splitlines()
    assert first.startswith(f"instrument {__version__}, ")
    assert f"Python {platform.python_version()}, " in python
    assert torch_.startswith(f"torch {torch.__version__}, ")
    assert torch_.endswith(r", H000\n::error::, H100\n::error::")
    for name in ("numpy", "hydra-core"):
        assert f"{name} {version(name)}" in packages
    assert "ruff" not in packages
    assert missing.startswith("not installed: ")

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("instrument.cli.version.requires", lambda _: ["absent>=1; extra == 'x'"])
    assert main(["--version", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("torch cannot be imported: ")
    assert lines[-1] == "not installed: absent"


def test_a_shell_completes_commands_options_and_files(tmp_path: Path) -> None:
    need("argcomplete")
    (tmp_path / "trace.json").touch()

    def completed(line: str) -> list[str]:
        asked = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": f"{tmp_path}/words",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        done = warm.run(["-m", "instrument"], tmp_path, {**os.environ, **asked})
        assert (done.returncode, done.stdout) == (0, "")
        return sorted((tmp_path / "words").read_text().split())

    assert completed("instrument wh") == ["whatif"]
    assert completed("instrument show --cov") == ["--coverage"]
    assert completed("instrument show tra") == ["trace.json"]


def test_without_argcomplete_nothing_runs_when_a_shell_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["--version"]) == 2
    assert capsys.readouterr() == ("", "")


def test_a_closed_stdout_is_one_sentence(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, steps())
    command = f'"{sys.executable}" -m instrument show "{capture.folder}" >&-'
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "instrument: The result cannot be printed, because stdout is closed.\n"


def test_memory_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setattr("instrument.read.trace.reader.read", exhausted)
    capture = write_capture(tmp_path, steps())
    assert command("show", capture.folder, status=2).err == (
        "instrument: not enough memory (Unable to allocate 3 GiB): read a trace of fewer steps, or "
        "allow more memory.\n"
    )


@pytest.mark.parametrize("exists", [True, False])
def test_a_closed_stderr_changes_neither_result_nor_status(tmp_path: Path, exists: bool) -> None:
    capture = write_capture(tmp_path, steps())
    path = capture.folder if exists else tmp_path / "nowhere"
    command = f'"{sys.executable}" -m instrument show "{path}" 2>&-'
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, encoding="utf-8")
    expected = (f"{render(capture)}\n", 0) if exists else ("", 2)
    assert (done.stdout, done.returncode) == expected


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, [span(f"operator_{i}", 10 * i, 5) for i in range(4000)])
    command = ["-m", "instrument", "show", str(capture.folder), "--rows", "4000"]
    script = warm.Script(command, tmp_path, os.environ)
    assert script.stdout.readline()
    script.stdout.close()  # long before the text ends
    assert script.stderr.read() == ""
    assert script.wait() == 0


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
    done = bare("show", capture.folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "600.0 ?s" in done.stdout


LOADED = """
import sys
from contextlib import suppress
from instrument.cli.command import main
for words in sys.argv[1:]:
    with suppress(SystemExit):
        main(words.split())
    print(*sys.modules, file=sys.stderr)
"""


def test_no_command_loads_torch_and_help_loads_next_to_nothing(tmp_path: Path) -> None:
    """One process runs the commands one after the other, and tells what it has loaded after each."""
    write_capture(tmp_path / "runs", steps())
    (tmp_path / "their_sink.py").write_text(THEIRS)
    heavy = {
        "torch", "numpy", "polars", "pydantic", "msgspec", "loguru", "hydra", "omegaconf", "rich",
    }  # fmt: skip
    of_recording = {"torch", "hydra", "omegaconf", "tensorboard"}
    allowed = dict.fromkeys(["--help", "show --help", "whatif --help", "--version", ""], heavy)
    for options in ("", "--by input_shapes", "--ranges", "--steps"):
        allowed[f"show runs {options}"] = of_recording | {"rich"}
    allowed |= dict.fromkeys(["ranks runs", "whatif runs"], of_recording)
    for sink in ("parquet", "their_sink.Calls", "tensorboard"):
        allowed[f"export runs --sink {sink}"] = {"torch", "hydra"}
    command = [sys.executable, "-c", LOADED, *allowed]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path)
    assert done.returncode == 0
    loaded = [set(line.split()) for line in done.stderr.splitlines()]
    assert len(loaded) == len(allowed)
    for (words, forbidden), modules in zip(allowed.items(), loaded):
        assert modules.isdisjoint(forbidden), words
        assert ("numpy" in modules) == ("runs" in words), "the check sees what is loaded"
