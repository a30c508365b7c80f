"""`instrument ab` with programs that write traces, whose times are known."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from builders import annotation, span, step, write_capture
from golden import Golden

from instrument.base.errors import CaptureError, ConfigError
from instrument.cli.command import main
from instrument.read.compare import ab_runs
from instrument.read.compare.ab import Comparison
from instrument.read.compare.ab_runs import BLOCKS_FILE, Block, Program, Run, read_run, worktrees
from instrument.read.compare.counters import Count
from instrument.read.show.ab import JSON_KEYS, parts, progress
from instrument.record.config.schema import ProfilerConfig
from instrument.record.output_folder import output_dir

# A program whose steps take as many µs as its last argument says, with 1 % noise from run to run.
# The first of the nine steps is far slower; half of each step is in `mlp` and half in `load`.
PROGRAM = """
import json, os, pathlib, random, sys
folder = pathlib.Path(os.environ["INSTRUMENT_DIR"])
folder.mkdir(parents=True)
print("made", *sys.argv[1:])
step_ns = int(sys.argv[-1]) * random.Random(os.getpid()).uniform(990, 1010)
folder = folder / "steps_0-8"
folder.mkdir()
events, start_ns = [], 0
for number in range(9):
    half_ns = round(step_ns * (100 if number == 0 else 1) / 2)
    for name, at, halves in ((f"ProfilerStep#{number}", 0, 2), ("mlp", 0, 1), ("load", 1, 1)):
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1,
                       "ts": (start_ns + at * half_ns) / 1000, "dur": halves * half_ns / 1000})
    start_ns += 2 * half_ns
(folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
(folder / "capture.json").write_text(json.dumps({"format": 1, "name": folder.name}))
"""
FAILING = "import sys; print('first line'); print('no such option'); sys.exit(3)"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that runs the program; the current folder is an empty one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return f"{sys.executable} {tmp_path / 'program.py'}"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run takes as many µs as the last argument says, as in the program, but nothing is run.

    The current folder is an empty one.
    """
    random = Random(0)
    monkeypatch.chdir(tmp_path)

    def run_once(program: Program, folder: Path) -> Run:
        step_ns = int(program.command[-1]) * random.uniform(990, 1010)
        return replace(record(step_ns, mlp=step_ns / 2, load=step_ns / 2), label=program.label)

    monkeypatch.setattr(ab_runs, "run_once", run_once)


def record(step_ns: float, counters: dict[str, Count | None] | None = None, **ranges: float) -> Any:
    return Run("A", 5, step_ns, ranges, counters or {})


def blocks_of(a: Any, b: Any, number: int = 10) -> list[Block]:
    """Blocks of equal runs."""
    runs = [replace(each, label=label) for label, each in zip("ABBA", (a, b, b, a))]
    return [Block(runs)] * number


# The command


COMMANDS = [
    "ab --a 'x=1 1000' --b 'x=2 1500' --blocks 7 -- python train.py",
    "ab --a 'train 3000' --b 'train 3000' --margin 5 --blocks 7",
    "ab --a 'train 3000' --b 'train 9000' --blocks 1 --output new",
    "ab --a 'train 3000' --b 'train 9000' --blocks 2 --continue new",
    "ab --a 'train 3000' --b 'train 9000' --blocks 8 --continue new --margin 1",
    "ab --a 'train 3000' --b 'train 8000' --continue new",
    "ab --a 'train 3000' --b 'train 9000' --continue new --output newer",
    "ab --a 'train 3000' --b 'train 9000' --continue missing",
]


@pytest.mark.usefixtures("simulated")
def test_what_is_printed(transcript: Callable[[list[str]], str], golden: Golden) -> None:
    golden("ab.txt", transcript(COMMANDS))


@pytest.mark.usefixtures("simulated")
def test_two_commands_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--a", "train 3000", "--b", "train 2000", "--blocks", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["version", *JSON_KEYS]
    assert (found["verdict"], found["blocks_missing"]) == ("faster", None)
    assert found["step"]["share"] == pytest.approx(-1 / 3, abs=0.02)
    # One interval in twenty does not hold the true value, so only its place is tested.
    assert found["step"]["low"] <= found["step"]["share"] <= found["step"]["high"]
    assert found["step"]["low"] == pytest.approx(-1 / 3, abs=0.03)
    assert found["step"]["high"] == pytest.approx(-1 / 3, abs=0.03)
    assert {each["path"] for each in found["ranges"]} == {"mlp", "load"}
    assert found["ranges"][0]["a_ns"] == pytest.approx(1_500_000, rel=0.02)
    assert found["ranges"][1]["a_ns"] == pytest.approx(1_500_000, rel=0.02)
    orders = ["".join(run["label"] for run in block) for block in found["blocks"]]
    assert set(orders) == {"ABBA", "BAAB"}


@pytest.mark.usefixtures("simulated")
def test_only_an_undecided_comparison_leaves_a_file_behind(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["ab", "--a", "train 1000", "--b", "train 2000", "--json"]
    assert main([*words, "--blocks", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] is None
    assert not [*tmp_path.iterdir()]
    assert main([*words, "--blocks", "1"]) == 0
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert [path.name for path in Path(folder).iterdir()] == [BLOCKS_FILE]
    assert main([*words, "--blocks", "7", "--continue", folder]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["confidence"], found["folder"]) == ("slower", 0.975, None)
    assert len(found["blocks"]) == 8
    assert not [*tmp_path.iterdir()]


def test_runs_are_read_and_can_be_continued(program, capsys) -> None:
    options = ["--a", "1000", "--b", "2000", "--json"]
    assert main(["ab", *options, "--blocks", "1", "--", *program.split()]) == 0
    undecided = json.loads(capsys.readouterr().out)
    (left,) = Path(undecided["folder"]).iterdir()
    assert left.name == BLOCKS_FILE
    (runs,) = undecided["blocks"]
    assert {run["steps"] for run in runs} == {8}
    for run in runs:
        step_ns = 1_000_000 if run["label"] == "A" else 2_000_000
        assert run["step_ns"] == pytest.approx(step_ns, rel=0.01)
        assert run["ranges_ns"] == pytest.approx(
            {"mlp": step_ns / 2, "load": step_ns / 2}, rel=0.01
        )
    more = ["--continue", undecided["folder"], "--blocks", "1", "--", *program.split()]
    assert main(["ab", *options, *more]) == 0
    first, second = json.loads(capsys.readouterr().out)["blocks"]
    assert first == runs != second


def test_the_output_of_all_runs_is_kept_on_request(program: str, tmp_path: Path) -> None:
    options = ["--a", "1000", "--b", "2000", "--blocks", "1", "--output", str(tmp_path / "kept")]
    assert main(["ab", *options, "--", *program.split()]) == 0
    kept = [path.read_text() for path in sorted((tmp_path / "kept").glob("*/output.txt"))]
    assert sorted(kept) == ["made 1000\n"] * 2 + ["made 2000\n"] * 2
    assert len([*(tmp_path / "kept").glob("*/captures/*/trace.json")]) == 4
    assert main(["ab", *options, "--", *program.split()]) == 2  # the folder exists
    more = [*options[:4], "--blocks", "1", "--continue", str(tmp_path / "kept")]
    assert main(["ab", *more, "--", *program.split()]) == 0
    assert len([*(tmp_path / "kept").glob("*/captures/*/trace.json")]) == 8


def test_a_failing_command_is_told_with_its_last_lines(program, tmp_path, capsys) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    failing = f"{sys.executable} {tmp_path / 'failing.py'}"
    assert main(["ab", "--a", f"{program} 5", "--b", failing]) == 2
    printed = capsys.readouterr()
    assert "  first line\n  no such option\n" in printed.err
    assert "The command of B failed with status 3; its output is in " in printed.err
    output = Path(printed.err.rpartition(" is in ")[2].strip().removesuffix("."))
    assert output.read_text() == "first line\nno such option\n"


def test_finished_blocks_are_shown_if_a_later_run_fails(program, tmp_path, capsys) -> None:
    counting = tmp_path / "counting.py"
    marks = f"import pathlib\nruns = pathlib.Path({str(tmp_path / 'runs')!r})\n"
    marks += "with runs.open('a') as file: file.write('x')\nassert len(runs.read_text()) < 6\n"
    counting.write_text(marks + PROGRAM)
    assert main(["ab", "--a", "1000", "--b", "2000", "--", sys.executable, str(counting)]) == 2
    printed = capsys.readouterr()
    assert "AssertionError" in printed.err
    assert "from 1 block of four runs" in printed.out


def test_a_comparison_goes_on_after_a_run_has_failed(program, tmp_path, capsys) -> None:
    """The sixth run fails once: its block begins again, and the order of the blocks stays."""
    counting = tmp_path / "counting.py"
    marks = f"import pathlib\nruns = pathlib.Path({str(tmp_path / 'runs')!r})\n"
    marks += "with runs.open('a') as file: file.write('x')\nassert len(runs.read_text()) != 6\n"
    counting.write_text(marks + PROGRAM)
    options = ["--a", "1000", "--b", "2000", "--json"]
    command = ["--", sys.executable, str(counting)]
    assert main(["ab", *options, *command]) == 2
    folder = json.loads(capsys.readouterr().out)["folder"]
    more = ["--continue", folder, "--blocks", "1"]
    assert main(["ab", *options, *more, *command]) == 0
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    drawn = np.random.default_rng(0).integers(0, 2, 10)
    assert [block[0]["label"] == "B" for block in blocks] == drawn[:2].astype(bool).tolist()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"format":2', '"format":1'), "of another version"),
        (lambda text: text.replace('"A"', '"B"', 1), "a block has other runs"),
        (lambda text: text[:-9], "is damaged"),
        (lambda text: re.sub('"step_ns":[^,]*', '"step_ns":0', text), "is damaged"),
        (lambda text: re.sub('"step_ns":[^,]*', '"step_ns":null', text), "is damaged"),
        (lambda text: re.sub('"mlp":[^,]*', '"mlp":-1', text), "is damaged"),
        (lambda text: re.sub('"blocks":.*]', '"blocks":[]', text), "is damaged"),
        (lambda text: text.replace('"continued":0', '"continued":20'), "continued 20 times"),
        (lambda text: text.replace('"continued":0', '"continued":-1'), "is damaged"),
        (lambda text: text.replace('"continued":0', f'"continued":{"9" * 5000}'), "blocks.json"),
    ],
)
def test_a_damaged_comparison_is_not_continued(change, said, capsys) -> None:
    words = ["ab", "--a", "train 1000", "--b", "train 1000", "--blocks", "1"]
    assert main([*words, "--output", "kept"]) == 0
    path = Path("kept", BLOCKS_FILE)
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    assert main([*words, "--continue", "kept"]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_steps_is_an_error(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--a", f"{program} 5", "--b", f"{sys.executable} -c pass"]) == 2
    printed = capsys.readouterr().err
    assert "A run of B cannot be used: The run has recorded no window" in printed
    assert printed.startswith("instrument: ")  # the program printed nothing
    assert Path(printed.rpartition(" is in ")[2].strip().removesuffix(".")).read_bytes() == b""


MISTAKES = [
    "ab",
    "ab main",
    "ab main HEAD",
    "ab main -- true",
    "ab main HEAD dev -- true",
    "ab --a true",
    "ab --a true -- true",
    "ab main HEAD --a x=1 --b x=2 -- true",
    "ab --a '' --b true",
    'ab --a "\'true" --b true',
    "ab --a no-such-program --b no-such-program",
    "ab --a /no/such/program --b /no/such/program",
    *(f"ab --a true --b true --margin={margin}" for margin in ("0", "-1", "100", "nan")),
]


def test_mistakes_get_a_sentence_and_no_folder(tmp_path, monkeypatch, transcript, golden) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    golden("ab_mistakes.txt", transcript(MISTAKES))
    assert not [*tmp_path.iterdir()]


# Revisions


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture
def repository(program: str) -> Path:
    """A repository with two commits whose steps differ, and a change that is not committed."""
    here = Path.cwd()
    (here / "training").mkdir()
    git(here, "init", "--quiet")
    for value in (1000, 1500):
        (here / "training" / "train.py").write_text(
            f"import sys; sys.argv += ['{value}']\n{PROGRAM}"
        )
        git(here, "add", ".")
        git(here, "commit", "--quiet", "-m", str(value))
    (here / "training" / "train.py").write_text("raise SystemExit('not committed')")
    return here


def test_two_revisions(repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository / "training")
    state = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    words = ["HEAD~1", "HEAD", "--blocks", "1", "--json", "--", sys.executable, "train.py"]
    assert main(["ab", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"]) == ("HEAD~1", "HEAD")
    assert found["step"]["share"] == pytest.approx(0.5, abs=0.03)
    assert state == (git(repository, "status", "--porcelain"), git(repository, "worktree", "list"))


@pytest.mark.usefixtures("simulated")
def test_only_the_same_commits_are_continued(repository, tmp_path, capsys) -> None:
    words = ["ab", "HEAD~1", "HEAD", "--blocks", "1"]
    kept, command = str(tmp_path / "kept"), ["--", "train", "1000"]
    assert main([*words, "--output", kept, *command]) == 0
    assert main([*words, "--continue", kept, *command]) == 0
    git(repository, "commit", "--quiet", "--all", "-m", "another")
    assert main([*words, "--continue", kept, *command]) == 2
    assert "compares other programs" in capsys.readouterr().err


def test_worktrees_are_removed_after_an_error(repository: Path) -> None:
    before = git(repository, "worktree", "list")
    folders: list[Path] = []

    def use() -> None:
        with worktrees(["HEAD~1", "HEAD"], repository) as found:
            folders.extend(found)
            texts = [(folder / "training" / "train.py").read_text() for folder in found]
            assert ["'1000'" in text for text in texts] == [True, False]
            (found[0] / "new file").write_text("left by the program")
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert git(repository, "worktree", "list") == before
    assert not any(folder.exists() for folder in folders)


def test_hooks_do_not_run(repository: Path) -> None:
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch '{repository}/hooked'\n")
    hook.chmod(0o755)
    with worktrees(["HEAD", "HEAD"], repository):
        assert not (repository / "hooked").exists()


def test_the_variables_of_a_git_hook_change_nothing(repository, monkeypatch) -> None:
    index = (repository / ".git" / "index").read_bytes()
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    with worktrees(["HEAD~1", "HEAD"], repository) as found:
        got = ["'1000'" in (each / "training/train.py").read_text() for each in found]
        assert got == [True, False]
    assert (repository / ".git" / "index").read_bytes() == index


def test_a_locked_worktree_is_removed(repository: Path) -> None:
    before = git(repository, "worktree", "list")
    with worktrees(["HEAD"], repository) as (tree,):
        git(repository, "worktree", "lock", str(tree))
    assert git(repository, "worktree", "list") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_no_worktrees(repository, capfd, number) -> None:
    before = git(repository, "worktree", "list")
    interrupt = f"import os, signal; os.kill({os.getpid()}, {number:d}); signal.pause()"
    assert main(["ab", "HEAD~1", "HEAD", "--", sys.executable, "-c", interrupt]) == 130
    assert capfd.readouterr().err.endswith("instrument: interrupted\n")
    assert git(repository, "worktree", "list") == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_runs, "_ENDS_S", 0.1)
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print(); signal.pause()"
    command = [sys.executable, "-c", stubborn]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        ab_runs._end(process)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["no-such-branch", "--force", "HEAD:training"])
def test_names_that_are_no_revisions(repository: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no revision of the git repository"):
        worktrees(["HEAD", name], repository).__enter__()


def test_a_folder_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="git rev-parse fails"):
        worktrees(["HEAD", "HEAD"], tmp_path / "plain").__enter__()


# What a run records


def test_the_environment_chooses_the_folder_for_captures(tmp_path, monkeypatch) -> None:
    config = ProfilerConfig(output_dir=tmp_path / "option")
    assert output_dir(config) == tmp_path / "option"
    monkeypatch.setenv("INSTRUMENT_DIR", str(tmp_path / "variable"))
    assert output_dir(config) == tmp_path / "variable"
    assert output_dir(ProfilerConfig()) == tmp_path / "variable"
    monkeypatch.setenv("INSTRUMENT_DIR", "")
    assert output_dir(config) == tmp_path / "option"


def window(*durations_us: float) -> list[Any]:
    """Steps in which `mlp` takes half of the time, and one operator of 10 µs runs outside."""
    events, start = [], 0.0
    for number, duration in enumerate(durations_us):
        events += [
            step(number, start, duration),
            annotation("mlp", start + 10, duration / 2),
            span("aten::mm", start + 11, duration / 4),
            span("aten::add", start + 20 + duration / 2, 10),
        ]
        start += duration
    return events


def test_medians_of_a_window_leave_out_its_first_step(tmp_path: Path) -> None:
    write_capture(tmp_path / "one", window(9_000, 200, 100, 500))
    found = read_run(tmp_path, "A")
    assert (found.steps, found.step_ns) == (3, 200_000)
    assert found.ranges_ns == {"(no range)": 100_000, "mlp": 100_000}
    assert found.counters["operators"] == Count(6, 2, 2)


def test_several_windows_count_together_but_other_phases_and_ranks_do_not(tmp_path: Path) -> None:
    write_capture(tmp_path / "one", window(9_000, 100, 100))
    write_capture(tmp_path / "two", window(9_000, 300, 300, 300))
    write_capture(tmp_path / "validation", window(1, 7, 7), window={"phase": "validation"})
    write_capture(tmp_path / "rank1", window(1, 7, 7), rank=1)
    write_capture(tmp_path / "short", window(1))
    found = read_run(tmp_path, "A")
    assert (found.steps, found.step_ns) == (5, 300_000)


def test_how_long_the_steps_had_no_cpu_is_known(tmp_path: Path) -> None:
    waits = {"waited_ns": 100, "ran_ns": 300, "window_ns": 400}
    write_capture(tmp_path / "one", window(9_000, 200), environment={"cpu_wait": waits})
    assert read_run(tmp_path, "A").cpu_wait == 0.25
    write_capture(tmp_path / "two", window(9_000, 200))
    found = read_run(tmp_path, "B")
    assert (found.label, found.cpu_wait) == ("B", 0.25)
    blocks = blocks_of(found, found)
    assert progress(1, 2, blocks[0]).endswith("; 25 % of a run without a CPU")
    (*_, last) = parts(*[Program("A", "x", ["x"], tmp_path)] * 2, Comparison(blocks), tmp_path)
    assert "25 % (25 % to 25 %) of the window in A" in last[0]


def test_a_window_with_one_step_is_no_sample(tmp_path: Path) -> None:
    write_capture(tmp_path / "one", window(9_000))
    with pytest.raises(CaptureError, match="no window with two steps"):
        read_run(tmp_path, "A")


# The comparison


def test_the_changed_range_is_named() -> None:
    a, b = record(1000.0, mlp=400.0, load=300.0), record(1100.0, mlp=500.0, load=300.0)
    found = Comparison(blocks_of(a, b))
    got = [(each.path, each.verdict) for each in found.quantities]
    assert got == [(None, "slower"), ("mlp", "slower"), ("load", "same")]
    assert found.quantities[1].change.share == pytest.approx(0.25)


def test_the_change_is_estimated_from_the_blocks_and_not_from_the_medians() -> None:
    """The blocks change by +10, +10 and −50 %, and the median over the runs by +10 %."""
    times = [(1000.0, 1100.0), (10.0, 11.0), (100_000.0, 50_000.0)]
    blocks = [blocks_of(record(a), record(b), 1)[0] for a, b in times]
    step = Comparison(blocks).step
    ratios = sorted(np.log([1.1, 1.1, 0.5]))
    pairs = [(x + y) / 2 for i, x in enumerate(ratios) for y in ratios[i:]]
    assert step.change.share == pytest.approx(float(np.expm1(np.median(pairs))))
    assert (step.a_ns, step.b_ns) == (1000.0, 1100.0)
    assert step.change.share < 0 < step.b_ns / step.a_ns - 1


def test_a_drift_that_is_linear_in_the_logarithm_cancels() -> None:
    times = [1000 * 1.01**place for place in range(4)]
    runs = [replace(record(ns), label=label) for label, ns in zip("ABBA", times)]
    found = Comparison([Block(runs)] * 10)
    assert found.step.change.share == pytest.approx(0, abs=1e-12)


def test_ranges_that_only_one_side_has() -> None:
    a, b = record(1000.0, mlp=400.0, old=3.0), record(1000.0, mlp=400.0, new=5.0)
    found = Comparison(blocks_of(a, b))
    assert (found.only_in("A"), found.only_in("B")) == ({"old": 3.0}, {"new": 5.0})
    assert [each.path for each in found.quantities[1:]] == ["mlp"]


def test_only_the_longest_ranges_are_compared() -> None:
    ranges = {f"range{k}": float(k + 1) for k in range(50)}
    both = record(1000.0, **ranges)
    found = Comparison(blocks_of(both, both))
    assert [each.path for each in found.quantities[1:]] == [f"range{k}" for k in range(49, 30, -1)]
    both = record(4500.0, **ranges)  # 1 % are 45
    found = Comparison(blocks_of(both, both))
    assert [each.path for each in found.quantities[1:]] == [f"range{k}" for k in range(49, 43, -1)]


def test_counters_are_compared_exactly() -> None:
    a = record(1.0, {"launches": Count(20, 10, 10), "syncs": Count(2, 1, 1), "flops": None})
    b = record(1.0, {"launches": Count(22, 11, 11), "syncs": Count(3, 1, 2), "flops": None})
    found = {each.name: each for each in Comparison(blocks_of(a, b)).counters}
    assert found.keys() == {"launches", "syncs"}
    got = (found["launches"].a, found["launches"].b, found["launches"].differs)
    assert got == ((10, 10), (11, 11), True)
    assert (found["syncs"].b, found["syncs"].differs) == ((1, 2), False)
