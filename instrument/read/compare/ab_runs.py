"""The runs of an A/B comparison: two programs, or revisions of one, in alternating blocks.

docs/compare.md describes the blocks. A comparison that was interrupted, or is undecided, goes on
from a file with its finished blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from instrument.base import files
from instrument.base.errors import CaptureError, ConfigError, InstrumentError
from instrument.base.files import CAPTURES_VARIABLE, WORK_VARIABLE
from instrument.read.compare.counters import Count, counters
from instrument.read.compare.statistics import Floats
from instrument.read.compare.work import Work, read_work
from instrument.read.facts.segments import ranges_of_steps
from instrument.read.trace.capture_json import BAD_JSON
from instrument.read.views.find_captures import captures_below
from instrument.read.views.views import TRAIN, Views

Label = Literal["A", "B"]
Text = Annotated[str, Meta(max_length=4000)]
Time = Annotated[float, Meta(gt=0, le=1e18)]
LABELS: tuple[Label, Label] = ("A", "B")

#: The file in a run's folder that holds the program's output.
OUTPUT_FILE = "output.txt"
#: The file in the folder of a comparison that holds the finished blocks.
BLOCKS_FILE = "blocks.json"
_MOST_BYTES = 256 << 20
_SEED = 0
_ENDS_S = 10.0
# Git sets these variables for its hooks. In a hook, GIT_INDEX_FILE would make git write into the
# user's index.
_VARIABLES_OF_HOOKS = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"})
# The repository's hooks are disabled, because they could change the user's files.
_SAFE = ["-c", f"core.hooksPath={os.devnull}"]


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run: one side of the comparison.

    Attributes:
        label: "A" or "B".
        name: what the user gave: a revision, overrides of Hydra, or a command.
        command: the command with its arguments. It runs without a shell.
        folder: the folder in which the command runs.
        environment: variables to set in addition to those of this process.
        commit: the commit of a revision.
    """

    label: Label
    name: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of A or B: the medians over its steps, without the first step of each window.

    Attributes:
        label: "A" or "B".
        steps: the number of steps.
        step_ns: the median duration of a step.
        ranges_ns: the median time that a step spends in each range, by the path of the range.
        counters: the counters of the first window.
        cpu_wait: the largest share of a window in which the thread of the steps was ready to run,
            but had no CPU; None if it is not known.
    """

    label: Label
    steps: int
    step_ns: Annotated[float, Meta(gt=0)]
    ranges_ns: dict[str, Annotated[float, Meta(ge=0)]]
    counters: dict[str, Count | None] = field(default_factory=dict)
    cpu_wait: float | None = None


class RunTime(Struct, frozen=True):
    """A run in a certificate: its median step, and the times of the ranges compared with it."""

    label: Label
    step_ns: Time
    ranges_ns: Annotated[dict[Text, Time], Meta(max_length=64)] = {}


def times(runs: Iterable[Run | RunTime], label: Label, path: str | None = None) -> list[float]:
    """The times in ns of the step, or of the range `path`, in the runs of one side."""
    return [e.step_ns if path is None else e.ranges_ns[path] for e in runs if e.label == label]


def log_ratios(blocks: Iterable[Iterable[Run | RunTime]], path: str | None = None) -> Floats:
    """For each block, the mean of log(B / A) over its runs, of which as many are of A as of B."""
    found = [[np.log(times(each, label, path)).mean() for label in LABELS] for each in blocks]
    return np.array([b - a for a, b in found])


class Block(NamedTuple):
    """Two runs of A and two of B, in the order in which they ran."""

    runs: Annotated[Sequence[Run], Meta(min_length=4, max_length=4)]

    def step_ns(self, label: Label) -> float:
        """The step time of one side, in ns: the mean of its two runs."""
        return float(np.mean(times(self.runs, label)))


def program_of_revision(label: Label, name: str, command: Sequence[str], folder: Path) -> Program:
    """The program that a command runs in a folder of a worktree."""
    variables = {"PYTHONPATH": python_path(folder)}
    return Program(label, name, command, folder, variables, commit_of("HEAD", folder))


class RunError(CaptureError):
    """A run of a program failed, or recorded nothing; `output` is the file with its output."""

    def __init__(self, message: str, output: Path) -> None:
        super().__init__(message)
        self.output = output


def run_blocks(
    a: Program, b: Program, blocks: int, folder: Path, keep: bool, done: int = 0
) -> Iterator[Block]:
    """Run A and B in blocks of four runs, in the order A B B A or B A A B, and yield each block.

    The order of each block is drawn at random with a fixed seed. Each run gets its own folder in
    `folder` for its captures and its output; `keep` keeps those of runs that succeed. `done` is the
    number of blocks that ran before; the folder of a block that did not finish is replaced.

    Raises:
        ConfigError: a program cannot be started.
        RunError: a program failed, or recorded no steps. The folder of this run is kept.
    """
    is_b_first = np.random.default_rng(_SEED).integers(0, 2, done + blocks)
    for number in range(done, done + blocks):
        outer, inner = (b, a) if is_b_first[number] else (a, b)
        runs = []
        for place, program in enumerate((outer, inner, inner, outer), 1):
            own = folder / f"block{number + 1:03d}-run{place}-{program.label}"
            shutil.rmtree(own, ignore_errors=True)
            runs.append(run_once(program, own))
            if not keep:
                shutil.rmtree(own, ignore_errors=True)
        yield Block(runs)


def run_once(program: Program, folder: Path) -> Run:
    """Run a program, and read its captures.

    INSTRUMENT_DIR tells the program the folder for captures. Its standard input is empty. If this
    function is interrupted, it ends the program.

    Raises:
        ConfigError: the program cannot be started.
        RunError: the program failed, or recorded no steps.
    """
    output = _execute(program, folder, {CAPTURES_VARIABLE: str(folder / "captures")})
    try:
        return read_run(folder / "captures", program.label)
    except InstrumentError as error:
        raise RunError(
            f"A run of {program.label} cannot be used: {error} Its output is in {output}.", output
        ) from error


def observe(program: Program, folder: Path) -> Work:
    """Run a program once, which is not timed, and return what work it does.

    Raises:
        ConfigError: the program cannot be started.
        RunError: the program failed, or its work was not seen. The folder of this run is kept.
    """
    captures, file = folder / "captures", folder / "work.json"
    variables = {CAPTURES_VARIABLE: str(captures), WORK_VARIABLE: str(file)}
    output = _execute(program, folder, variables)
    try:
        work = read_work(file)
    except CaptureError as error:
        raise RunError(f"{error} Its output is in {output}.", output) from error
    shutil.rmtree(folder, ignore_errors=True)
    return work


def _execute(program: Program, folder: Path, variables: Mapping[str, str]) -> Path:
    """Run a program in a new folder, and return the file with its output."""
    folder.mkdir(parents=True)
    output = folder / OUTPUT_FILE
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                program.command,
                cwd=program.folder,
                env={**os.environ, **program.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(
                f"The command {program.command[0]!r} of {program.label} cannot be started: "
                f"{error.strerror}."
            ) from None
        try:
            process.wait()
        finally:
            _end(process)
    if process.returncode:
        raise RunError(
            f"The command of {program.label} failed with status {process.returncode}; its output "
            f"is in {output}.",
            output,
        )
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a program that still runs, and kill it after 10 s."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_S)
    process.kill()
    process.wait()


def read_run(folder: Path, label: Label) -> Run:
    """Read a run from its windows.

    Only training windows of the lowest rank with at least two steps are used.

    Raises:
        CaptureError: no steps are recorded, or a file cannot be read.
        TraceError: a trace cannot be read.
    """
    captures = [Views.load(path) for path in captures_below(folder)]
    training = [each for each in captures if each.phase == TRAIN]
    lowest = min((each.about.rank or 0 for each in training), default=0)
    windows = [each for each in training if (each.about.rank or 0) == lowest]
    windows = [each for each in windows if len(each.links.steps) > 1]
    if not windows:
        raise CaptureError(
            "The run has recorded no window with two steps: train in a Session with profiler=trace."
        )
    steps = [each for window in windows for each in ranges_of_steps(window)]
    paths = dict.fromkeys(path for each in steps for path in each)
    waits = [each.about.cpu_wait.share for each in windows if each.about.cpu_wait is not None]
    return Run(
        label,
        len(steps),
        median(sum(each.values()) for each in steps),
        {path: median(each.get(path, 0) for each in steps) for path in paths},
        counters(windows[0]).counts,
        max((each for each in waits if each is not None), default=None),
    )


@dataclass(slots=True)
class Finished:
    """What a comparison has measured so far.

    Attributes:
        programs: a digest of the names, the commands and the commits of A and B.
        keep: whether the captures and the output of its runs are kept.
        blocks: the finished blocks.
        continued: how often the comparison was continued. Each time halves the level: after 20
            times, a verdict needs at least 26 blocks.
    """

    programs: str
    keep: bool
    blocks: Annotated[list[Block], Meta(min_length=1)] = field(default_factory=list)
    continued: Annotated[int, Meta(ge=0, lt=20)] = 0
    format: Literal[2] = 2


def digest(a: Program, b: Program) -> str:
    """Return a text that is equal for equal programs, and that does not hold their arguments."""
    content = [[each.name, *each.command, each.commit] for each in (a, b)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def save_blocks(finished: Finished, folder: Path) -> None:
    """Write the finished blocks into the folder of the comparison."""
    files.write(folder / BLOCKS_FILE, msgspec.json.encode(finished))


def read_blocks(folder: Path) -> Finished:
    """Read the finished blocks from the folder of a comparison.

    Raises:
        ConfigError: the folder holds no such file, or the file is damaged or of another version,
            or the comparison was continued too often.
    """
    path = folder / BLOCKS_FILE
    try:
        found = msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=Finished)
        _check(found.blocks)
    except OSError as error:
        raise ConfigError(
            f"--continue is {str(folder)!r}, whose {BLOCKS_FILE} cannot be read "
            f"({error.strerror}): give the folder that an undecided comparison has named."
        ) from None
    except BAD_JSON as error:
        raise ConfigError(
            f"{path} is damaged, of another version of torch-instrument, or was continued 20 times "
            f"({error}): start a new comparison, with more --blocks."
        ) from None
    return found


def _check(blocks: Sequence[Block]) -> None:
    if any(sorted(run.label for run in block.runs) != [*"AABB"] for block in blocks):
        raise msgspec.ValidationError("a block has other runs than two of A and two of B")


@contextmanager
def worktrees(revisions: Sequence[str], folder: Path) -> Iterator[list[Path]]:
    """Check out revisions into temporary worktrees, which are removed at the end of the block.

    The working tree and the index of the user do not change. For each branch, tag or commit, the
    block gets the path of `folder` in its worktree.

    Raises:
        ConfigError: `folder` is not in a git repository, a revision does not exist or does not
            contain the folder, or git fails.
    """
    commits = [commit_of(name, folder) for name in revisions]
    inside = _git(folder, "rev-parse", "--show-prefix")
    with tempfile.TemporaryDirectory(prefix="instrument-ab-") as parent:
        trees = [Path(parent, f"{k}-{commit[:12]}") for k, commit in enumerate(commits)]
        try:
            for tree, commit in zip(trees, commits):
                _git(folder, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            yield [_existing(tree / inside, name) for tree, name in zip(trees, revisions)]
        finally:
            for tree in trees:
                with suppress(ConfigError):  # the worktree does not exist yet
                    # With --force given twice, git removes a locked worktree too.
                    _git(folder, "worktree", "remove", "--force", "--force", str(tree))


def python_path(tree: Path) -> str:
    """The `PYTHONPATH` with which a program imports the modules of a worktree.

    A package in editable mode would be imported from the user's working tree.
    """
    root = Path(_git(tree, "rev-parse", "--show-toplevel"))
    given = os.environ.get("PYTHONPATH")
    folders = [root, *(path for path in [root / "src"] if path.is_dir())]
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def commit_of(name: str, folder: Path) -> str:
    """Return the hash of the commit that a revision names.

    Raises:
        ConfigError: `folder` is not in a git repository, or the revision does not exist.
    """
    _git(folder, "rev-parse", "--git-dir")
    try:
        return _git(
            folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
    except ConfigError:
        raise ConfigError(
            f"{name!r} is no revision of the git repository at {folder}: give a branch, a tag or a "
            "commit; to compare two commands, use --a and --b."
        ) from None


def _existing(folder: Path, revision: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(
            f"The revision {revision!r} has no folder {folder.name}: run the command from a folder "
            "that both revisions have."
        )
    return folder


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *_SAFE, *arguments],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k not in _VARIABLES_OF_HOOKS},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=True,
        )
    except OSError as error:
        raise ConfigError(f"git cannot be started ({error.strerror}): install git.") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise ConfigError(f"git {arguments[0]} fails in {folder}: {lines[-1]}.") from None
    return done.stdout.rstrip("\n")
