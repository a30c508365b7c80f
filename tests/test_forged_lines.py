"""No command prints, logs or writes a line that a stranger has made up: every command and option is tried.

The commands and their options come from the parser, so that a new one is tried without a word here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from builders import (
    MEMORY,
    REDUCES,
    WORKERS,
    annotation,
    copy,
    frame,
    is_harmless,
    kernels,
    launched,
    made,
    node,
    span,
    step,
    synchronisation,
    synchronous_steps,
    write_capture,
)
from collected import Log, logged
from test_untrusted_text import evil_events

import instrument
from instrument.cli import command
from instrument.cli import open as opening
from instrument.cli.command import main
from instrument.export.sinks import tensorboard
from instrument.read.advise.diagnose import diagnose
from instrument.read.capture import Capture
from instrument.read.compare.diff import diff
from instrument.read.ranks.rank_summary import write
from instrument.read.ranks.run import Run
from instrument.read.show import perfetto
from instrument.read.views.table import Table
from instrument.read.views.views import VIEWS

FORGED = "FORGED"
# A command of GitHub's at the start, whole lines by each character that some program takes for a line's end, control
# sequences, text turned round, characters without a width or a picture, and a command that counts anywhere in a line.
EVIL = (
    f"::error::{FORGED}\n{FORGED}\r{FORGED}\x85{FORGED}\u2028{FORGED}\u2029{FORGED}\x0b{FORGED}\x0c{FORGED}"
    f"\n  ::warning::{FORGED}\x1b[2J\x1b]0;{FORGED}\x07\x9b31m\u202e\u2066\u200b\u00ad\ufeff\u3164\ufe0f\U000e0041"
    f"##[error]{FORGED} ##vso[task.complete]{FORGED}"
)
# What steers how a file is read: with another value, nothing of the file would be shown.
STRUCTURE = {"ph", "cat", "started_at", "activities", "s", "cuda_sync_kind", "host", "pg_name"}
FOLDER = EVIL.replace("/", "")[:100]
SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def poisoned(value: Any, key: str = "") -> Any:
    """A JSON value with the evil text in every text and beside every key."""
    if isinstance(value, dict):
        good = {name: poisoned(inner, name) for name, inner in value.items()}
        return good | {f"{name}{EVIL}": inner for name, inner in good.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return f"{value}{EVIL}" if isinstance(value, str) and key not in STRUCTURE else value


def leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON value, the containers too."""
    if where:
        yield where
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from leaves(value[key], (*where, key))


def with_evil_at(value: Any, where: tuple[Any, ...], put: Any) -> Any:
    changed = json.loads(json.dumps(value))
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = put
    return changed


ABOUT: dict[str, Any] = {
    "name": "steps_3-4",
    "window": {
        "first_step": 3,
        "last_step": 4,
        "steps": 2,
        "planned_steps": 9,
        "truncated": True,
        "reason": "exception",
        "phase": "train",
        "trigger_reason": "slow",
    },
    "host": f"::error::{FORGED}\u2028{FORGED}\u202e",  # a host with control characters is refused
    "devices": ["H100"],
    "versions": {"torch": "2.13.0", "cuda": "12"},
    "compiled_ranges": [{"range": "a", "region": "0/0"}],
    "modules_not_seen": ["a.b"],
    "module_types": {"forward": "Block"},
    "git": {"commit": "abc", "branch": "main"},
    "command": ["train.py"],
    "user_metadata": {"model": "vit"},
    "sinks_run": ["mine"],
    "config": {
        "ranks": "all",
        "communication": ["ring"],
        "activities": None,
        "sinks": {"mine": {"_target_": "a.B"}},
        "upload_to": "s3://x",
        "with_flops": False,
        "profile_memory": False,
    },
    "environment": {
        "float32_matmul_precision": "highest",
        "anomaly_mode": True,
        "dynamo": {
            "graphs": 3,
            "graph_breaks": {"print": 3},
            "recompilations": 4,
            "failed_guards": {"size": 9},
        },
        "loaders": [{"phase": "train", "workers": 0, "batch_size": 8, "pin_memory": False}],
    },
}


def document(rank: int) -> dict[str, Any]:
    """A trace with something of everything that is read."""
    process_group = {
        "pg_name": "0",
        "pg_desc": "default_pg",
        "backend_config": "cuda:nccl",
        "ranks": [0, 1, 2],
    }
    events: list[Any] = [
        *evil_events(800 if rank == 1 else 500),
        *synchronous_steps(500, device=True, later_us=3000),
        *MEMORY,
        *kernels(),
        copy(35, 15, bytes=64, correlation=77),
        synchronisation("Stream Sync", 2100, 30, wait_on_stream=7),
        made("aten::mm", 2200, 20, 5, Call_stack="train.py(3): f;train.py(9): g", Input_type=["float"]),
        node("MmBackward0", 2300, 20, 5),
        annotation(WORKERS, 2400, 90),
        annotation("Optimizer.step#Adam.step", 2500, 90),
        *launched("graph kernel", 2600, 2610, 20, 88, graph_node_id=5, graph_id=2),
        span("nccl:all_reduce", 2700, 40, Collective_name="allreduce", dtype="Float", In_msg_nelems=8,
             Process_Group_Name="0", Process_Group_Description="default_pg", Group_size=3),
        span(REDUCES, 2710, 40, "kernel", Collective_name="allreduce", dtype="Float", Process_Group_Name="0",
             Process_Group_Description="default_pg", Group_size=3, In_msg_nelems=8, Out_msg_nelems=8),
        frame("train.py(3): f", 2800, 90, Python_id=99, Python_parent_id=None, Python_module_id=1),
        span("PyTorch Profiler (0)", 0, 9000, "Trace"),
        {"ph": "i", "cat": "user_annotation", "s": "t", "name": "marked", "pid": 1, "tid": 1, "ts": 2900},
        *({"ph": "M", "name": name, "pid": 1, "tid": 1, "ts": 0, "args": {key: "python"}}
          for name, key in (("process_name", "name"), ("process_labels", "labels"), ("thread_name", "name"))),
        step(5, 4000, 100), step(6, 4100, 100),
    ]  # fmt: skip
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "numSms": 132, "computeMajor": 9}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 3, "pg_config": [process_group]},
        "record_shapes": 1,
        "trace_id": "A",
        "messages": ["Dropped 5 activity records"],
        "traceName": "trace.json",
        "baseTimeNanoseconds": 0,
        "traceEvents": events,
    }  # fmt: skip


def write_poisoned(folder: Path, rank: int = 0, about: Any = None, trace: Any = None) -> Path:
    """A capture, poisoned unless its content is given; its summary is one of an exporter, poisoned too."""
    made_folder = write_capture(folder.parent, [], folder.name, rank=rank, world_size=3).folder
    described = json.loads((made_folder / "capture.json").read_text()) | ABOUT
    text = json.dumps(poisoned(document(rank)) if trace is None else trace)
    (made_folder / "trace.json.gz").write_bytes(gzip.compress(text.encode()))
    (made_folder / "capture.json").write_text(
        json.dumps(poisoned(described) if about is None else about)
    )
    return made_folder


@pytest.fixture(autouse=True)
def _strange_captures_are_warned_of(log: Log) -> Iterator[None]:
    yield
    log.at("WARNING")
    log.at("ERROR")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three ranks, an older run, captures that cannot be read, timings: all named by the stranger."""
    folder = tmp_path_factory.mktemp("captures") / FOLDER
    for rank in range(3):
        capture = write_poisoned(folder / f"{FOLDER}_rank{rank}", rank)
        with logged() as log:
            log.expect("is read with the default names of communication kernels")
            write(Capture.load(capture), capture)
        summary = json.loads((capture / "summary.json").read_text())
        (capture / "summary.json").write_text(json.dumps(poisoned(summary)))
    write_poisoned(
        folder / f"{FOLDER}older",
        about={**ABOUT, "run": "0" * 32, "started_at": "2020-01-01", "name": EVIL},
    )
    (folder / f"{FOLDER}bad").mkdir()
    (folder / f"{FOLDER}bad" / "capture.json").write_text("{")
    queued = shutil.copytree(folder / f"{FOLDER}_rank1", folder / f".{FOLDER}queued.queued")
    (queued / "trace.json").write_bytes(gzip.decompress((queued / "trace.json.gz").read_bytes()))
    (queued / "trace.json.gz").unlink()
    (folder / ".listens-1").touch()
    entry = {"since": {"calls": 2, "mean_ns": 5}, "run": {"calls": 2, "mean_ns": 5}}
    line = {"format": 1, "step": 3, "time": EVIL, "ranges": {EVIL: entry, "ProfilerStep*": entry}}
    (folder / "timings_rank0.jsonl").write_text(json.dumps(line))
    (folder / "timings_rank1.jsonl").write_text(json.dumps(line))
    return folder


def no_forgery(text: str, where: str = "", *, in_log: bool = True) -> None:
    """Fail if a line of a text is the stranger's, or a line holds a character that a terminal obeys."""
    for line in text.split("\n"):
        assert line.isprintable(), (where, line)
        assert not re.search("[\u3164\ufe0f]", line), (where, line)
        assert not line.startswith(FORGED), (where, line)
        if in_log:
            assert not line.lstrip(" ").startswith("::"), (where, line)
            assert "##[" not in line, (where, line)
            assert "##vso[" not in line, (where, line)


def parsers() -> dict[str, argparse.ArgumentParser]:
    choices = (each.choices for each in command._parser()._actions)
    return next(dict(each) for each in choices if isinstance(each, dict))


# Options whose value decides what is shown. All others get the evil text as their value.
VALUES = {
    "--rows": ["-1"],
    "--columns": ["all", EVIL],
    "--csv": ["ranks", "ranges", EVIL],
    "--finding": ["exposed-communication", EVIL],
    "--scale": [f"range:{EVIL}=0.5", "kernel:*=0.5"],
    "--remove": ["operator:*mm*", f"range:{EVIL}"],
    "--fail-on": ["operators>+0", f"calls[{EVIL}]>0"],
    "--blocks": ["1"],
}
# Sinks are options of `export`; what they write is read in another test.
SINKS = ("table", "chrome_trace", "stacks", "memory", "tensorboard", "parquet")


# Commands whose options are tried on a run of several ranks; those of the others on one capture.
OF_RUNS = ("ranks", "ls", "diagnose", "trigger")
EVERYWHERE = [False, pytest.param(True, marks=pytest.mark.nightly)]


def invocations(name: str, run: Path, everywhere: bool) -> Iterator[list[str]]:
    """Every option of a command, each alone; the command alone on the run, on a capture, on its trace and on nothing."""
    options = [
        [action.option_strings[0], *([] if value is None else [value])]
        for action in parsers()[name]._actions
        if action.option_strings and action.dest != "help"
        for value in (
            [None] if action.nargs == 0
            else VALUES.get(action.option_strings[0], action.choices or [EVIL])
        )
    ]  # fmt: skip
    capture = run / f"{FOLDER}_rank1"
    places = [run, capture, capture / "trace.json.gz", run / FOLDER, run / f"{FOLDER}bad"]
    positionals = [each for each in parsers()[name]._actions if not each.option_strings]
    for place in places:
        given = [str(place)] * max(len(positionals), 1)
        yield [name, *given]
        if place == (run if name in OF_RUNS else capture) or (
            everywhere and place in (run, capture)
        ):
            yield from ([name, *given, *option] for option in options)
    if name == "show":
        views = [option for option in options if len(option) == 1]
        yield [name, str(capture), *(each for view in views for each in view), "--json"]
        yield from ([name, str(capture), *view, "--csv"] for view in views)
        yield [name, str(run / "timings_rank0.jsonl")]
    if name == "export":
        yield from (
            [name, str(capture), "--sink", sink, "--to", str(run.parent / "to")] for sink in SINKS
        )
    if name in ("ranks", "report", "diagnose"):
        yield [name, *(str(run / f"{FOLDER}_rank{rank}") for rank in range(3))]
    if name == "diff":
        sides = [str(capture), str(run / f"{FOLDER}_rank0")]
        yield [name, *sides, "--fail-on", "operators>+0", "--markdown"]
        yield [name, *sides, "--force"]


@pytest.fixture
def place(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in a folder of its own in which a command may write; no browser, no waiting."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "_TIMEOUT_S", 0)
    monkeypatch.setattr(perfetto, "PORT", 0)
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    shutil.copytree(run, tmp_path / "captures" / FOLDER)
    return tmp_path / "captures" / FOLDER


@pytest.mark.parametrize("everywhere", EVERYWHERE)
@pytest.mark.parametrize("name", sorted(parsers().keys() - {"mcp", "run"}))
def test_no_command_prints_or_logs_a_line_of_a_stranger(
    name: str, everywhere: bool, place: Path, capsys: pytest.CaptureFixture[str], log: Log
) -> None:
    """Without `run`, which runs a script of the user, and `mcp`, which serves what others print."""
    shown = 0
    for arguments in invocations(name, place, everywhere):
        try:
            status = main(arguments)
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        assert status in (0, 1, 2, 3), arguments
        no_forgery(out, f"stdout of {arguments}")
        no_forgery(err, f"stderr of {arguments}")
        assert "Traceback" not in err, arguments
        if "--json" in arguments and status == 0:
            json.loads(out)
        shown += FORGED in out + err
    assert shown, "nothing of the stranger's was shown at all"
    for message in log:
        no_forgery(message, "log")
    for path in sorted(file for file in place.parent.rglob("*") if file.is_file()):
        if path.suffix in (".txt", ".html", ".md"):
            no_forgery(path.read_text(encoding="utf-8"), path.name)


def test_no_terminal_gets_a_line_of_a_stranger(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, tables are drawn by another function, with control sequences of our own."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ranks = [str(place / f"{FOLDER}_rank{rank}") for rank in range(3)]
    views = [f"--{view.option}" for view in VIEWS.values() if view.option]
    for columns in ("80", "3000"):
        monkeypatch.setenv("COLUMNS", columns)
        for arguments in (
            ["show", ranks[1], *views],
            ["show", ranks[1], "--by", "stack", "--columns", "all"],
            ["ls", str(place)],
            ["ranks", *ranks],
            ["diff", *ranks[:2], "--fail-on", "operators>+0"],
            ["whatif", ranks[1], "--scale", "kernel:*=0.5", "--critical-path"],
        ):
            main(arguments)
            out = capsys.readouterr().out
            assert FORGED in out
            assert is_harmless(SEQUENCES.sub("", out)), arguments
            assert not re.search(r"^ *::|##\[", out, re.MULTILINE), arguments
            if columns != "80":  # there, every text is wrapped
                no_forgery(SEQUENCES.sub("", out), str(arguments), in_log=False)


@pytest.mark.parametrize("everywhere", EVERYWHERE)
def test_each_value_alone_gives_no_line_either(
    tmp_path: Path, everywhere: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value of the wrong type, or a file that cannot be understood: what says so has one line."""
    rank = write_poisoned(tmp_path / "run" / "steps_3-4_rank0", about=ABOUT, trace=document(0))
    summary = Capture.load(rank)
    write(summary, rank)
    kinds = {event["cat"]: event for event in document(0)["traceEvents"] if "cat" in event}
    trace = {**document(0), "traceEvents": [*kinds.values()]}
    for name, commands in (
        ("capture.json", (["show", str(rank)], ["ls", str(tmp_path), "--no-verdict"])),
        ("summary.json", (["ranks", str(tmp_path)],)),
        ("trace.json.gz", (["show", str(rank), "--kernels"],)),
    ):
        file = rank / name
        before = file.read_bytes()
        whole = trace if name == "trace.json.gz" else json.loads(before)
        first_of_lists = (
            each for each in leaves(whole) if each[-1] == 0 or isinstance(each[-1], str)
        )
        for where in islice(first_of_lists, 0, None, 1 if everywhere else 3):
            text = json.dumps(with_evil_at(whole, where, EVIL)).encode()
            file.write_bytes(gzip.compress(text, 1) if name.endswith(".gz") else text)
            for arguments in commands:
                assert main(arguments) in (0, 2)
                out, err = capsys.readouterr()
                no_forgery(out + err, f"{arguments} with {where}")
                assert "Traceback" not in err, where
        file.write_bytes(before)


def test_no_view_of_a_notebook_and_no_markdown_has_a_line_of_a_stranger(run: Path) -> None:
    captures = [Capture.load(run / f"{FOLDER}_rank{rank}") for rank in range(2)]
    diagnosis, difference = diagnose(captures), diff(*captures)
    views = [attrgetter(each)(captures[0]) for each in VIEWS if "(" not in each]
    tables = [each for each in views if isinstance(each, Table)]
    results = (diagnosis, difference, captures[0].whatif, Run.load(run))
    for each in (*captures, *results, *tables):
        for write_text in ("__str__", "__repr__", "_repr_html_", "_repr_markdown_"):
            if text := getattr(each, write_text, str)():
                no_forgery(text.replace("\u200b", ""), f"{type(each)}.{write_text}", in_log=False)
    for value in tensorboard._report(captures[0]):
        for text in value.tensor.string_val:
            no_forgery(text.decode().replace("\u200b", ""), value.tag, in_log=False)


PROGRAM = f"""
import json, os, pathlib, sys
print({EVIL!r})
if sys.argv[-1] == "fails":
    sys.exit(3)
folder = pathlib.Path(os.environ["INSTRUMENT_DIR"]) / "steps_0-4"
folder.mkdir(parents=True)
names = [{EVIL!r}, {EVIL!r} + sys.argv[-1]]
events = [
    {{"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": dur}}
    for k in range(5)
    for name, at, dur in (
        (f"ProfilerStep#{{k}}", 100 * k, 100), (names[0], 100 * k, 40), (names[1], 100 * k + 50, 40)
    )
]
(folder / "trace.json").write_text(json.dumps({{"traceEvents": events}}))
(folder / "capture.json").write_text(json.dumps({{"format": 1, "name": {EVIL!r}}}))
"""


def test_no_program_of_an_ab_comparison_gets_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    program = [sys.executable, "program.py"]
    for a, b in ((EVIL.replace("\0", ""), "b"), ("a", "fails")):
        sides = ["--a", shlex.quote(a), "--b", shlex.quote(b)]
        status = main(["ab", *sides, "--blocks", "2", "--", *program])
        assert status == (2 if b == "fails" else 0)
        out, err = capsys.readouterr()
        assert FORGED in out + err
        no_forgery(out + err)


MODEL = f"""
from torch import nn
def build():
    model = nn.Sequential()
    model.add_module("::error::{FORGED} \u202e\u200b##[error]{FORGED}", nn.Linear(3, 3))
    return model
"""


def test_no_name_of_a_module_makes_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for more in ([], ["--by", "module_path"], ["--columns", "all"]):
        assert main(["graph", "evil_model:build", "--input", "2,3", *more]) == 0
        out, err = capsys.readouterr()
        assert FORGED in out
        no_forgery(out + err, str(more))


def test_only_one_module_writes_to_the_log() -> None:
    """The package logs through `instrument.base.log`, which escapes; two modules change handlers."""
    root = Path(instrument.__file__).parent
    sources = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in root.rglob("*.py")
        if root / "samples" not in path.parents  # programs of users
    }

    def having(pattern: str) -> set[str]:
        return {str(path) for path, text in sources.items() if re.search(pattern, text, re.M)}

    logging = having("(from|import) loguru")
    assert logging == {"base/log.py", "record/notebook.py", "export/__main__.py"}
    assert having(r"^\s+print\(") <= {
        "cli/output.py",
        "base/log.py",
        "cli/open.py",
        "export/waiting.py",
        "record/notebook.py",
        "graph/graph_profile.py",
        "record/script.py",  # the text of a script's SystemExit, as Python prints it
    }
