"""A/B comparison: run two programs in alternating blocks, and test how B differs from A.

`instrument.read.compare.statistics` describes the blocks and the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from instrument.base.errors import CaptureError, ConfigError, InstrumentError
from instrument.base.files import CAPTURES_VARIABLE
from instrument.read.compare.machine import MachineState, watch
from instrument.read.compare.run_record import RunRecord, read_run
from instrument.read.compare.statistics import (
    Change,
    Floats,
    Verdict,
    blocks_missing,
    changes,
    level_of,
)

Label = Literal["A", "B"]
LABELS: tuple[Label, Label] = ("A", "B")

#: A step counts as the same if its time changes by at most this share.
MARGIN = 0.02
#: The file in a run's folder that holds the program's output.
OUTPUT_FILE = "output.txt"
#: Only ranges that take at least this share of the step are compared, and of these only this many
#: longest. With more ranges, only clearer changes would be significant.
LEAST_SHARE, MOST_RANGES = 0.01, 19
_SEED = 0
_ENDS_S = 10.0


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


class Run(NamedTuple):
    """One run of A or B: its side, its recorded times, and the state of the machine."""

    label: Label
    record: RunRecord
    machine: MachineState


class Block(NamedTuple):
    """Two runs of A and two of B, in the order in which they ran."""

    runs: Sequence[Run]

    def step_ns(self, label: Label) -> float:
        """The step time of one side, in ns: the mean of its two runs."""
        return float(np.mean([run.record.step_ns for run in self.runs if run.label == label]))


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
    folder.mkdir(parents=True)
    output = folder / OUTPUT_FILE
    variables = {**os.environ, **program.environment, CAPTURES_VARIABLE: str(folder / "captures")}
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                program.command,
                cwd=program.folder,
                env=variables,
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
            machine = watch(process)
        finally:
            _end(process)
    if process.returncode:
        raise RunError(
            f"The command of {program.label} failed with status {process.returncode}; its output "
            f"is in {output}.",
            output,
        )
    try:
        return Run(program.label, read_run(folder / "captures"), machine)
    except InstrumentError as error:
        raise RunError(
            f"A run of {program.label} cannot be used: {error} Its output is in {output}.", output
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a program that still runs, and kill it after 10 s."""
    process.terminate()
    try:
        process.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Quantity(NamedTuple):
    """The time of the step (`path` None) or of a range, as medians of runs, and its change."""

    path: str | None
    a_ns: float
    b_ns: float
    change: Change
    verdict: Verdict


class CounterValues(NamedTuple):
    """The lowest and the highest value of a counter in the steps of A and of B."""

    name: str
    a: tuple[int, int]
    b: tuple[int, int]

    @property
    def differs(self) -> bool:
        """Whether all values of one side are lower than all values of the other side."""
        return self.a[1] < self.b[0] or self.b[1] < self.a[0]


class Comparison:
    """The result of an A/B comparison.

    Attributes:
        blocks: at least one block.
        margin: a time counts as the same if it changes by at most this share.
        quantities: the step, then the compared ranges, the longest first: at most 19, which take
            time in all runs and at least 1 % of the step.
        continued: how often the comparison was continued.
        level: the share of comparisons of a program with itself that may report a change now.
    """

    def __init__(self, blocks: Sequence[Block], margin: float = MARGIN, continued: int = 0) -> None:
        self.blocks = blocks
        self.margin = margin
        self.continued = continued
        self.level = level_of(continued)
        paths = [None, *self._common_ranges()[:MOST_RANGES]]
        found = changes(np.stack([self._log_ratios(path) for path in paths], axis=1), self.level)
        self.quantities = [
            Quantity(
                path,
                median(self._times("A", path)),
                median(self._times("B", path)),
                change,
                change.verdict(margin),
            )
            for path, change in zip(paths, found)
        ]

    @property
    def step(self) -> Quantity:
        """The whole step. Its verdict is the verdict of the comparison."""
        return self.quantities[0]

    @property
    def blocks_missing(self) -> int | None:
        """About how many more blocks a verdict on the step needs; None if there is one."""
        if self.step.verdict != "undecided":
            return None
        change, blocks, quantities = self.step.change, len(self.blocks), len(self.quantities)
        return blocks_missing(change, blocks, quantities, self.margin, self.level)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest change of the step in a block."""
        ratios = np.expm1(self._log_ratios(None))
        return float(ratios.min()), float(ratios.max())

    def only_in(self, label: Label) -> dict[str, float]:
        """The ranges that no run of the other side has, each with its median time in ns."""
        own, others = self._records(label), self._records("B" if label == "A" else "A")
        theirs = {path for record in others for path in record.ranges_ns}
        return {
            path: median(record.ranges_ns.get(path, 0) for record in own)
            for path in dict.fromkeys(path for record in own for path in record.ranges_ns)
            if path not in theirs
        }

    @property
    def counters(self) -> list[CounterValues]:
        """The counters that all runs recorded."""
        a, b = self._counter_values("A"), self._counter_values("B")
        return [CounterValues(name, a[name], b[name]) for name in a if name in b]

    def runs(self, label: Label) -> list[Run]:
        """The runs of one side, in their order."""
        return [run for block in self.blocks for run in block.runs if run.label == label]

    def _records(self, label: Label) -> list[RunRecord]:
        return [run.record for run in self.runs(label)]

    def _common_ranges(self) -> list[str]:
        records = [*self._records("A"), *self._records("B")]
        least_ns = LEAST_SHARE * median(record.step_ns for record in records)
        middle_ns = {
            path: median(record.ranges_ns[path] for record in records)
            for path in records[0].ranges_ns
            if all(record.ranges_ns.get(path, 0) > 0 for record in records)
        }
        long = [path for path, time_ns in middle_ns.items() if time_ns >= least_ns]
        return sorted(long, key=lambda path: -middle_ns[path])

    def _times(self, label: Label, path: str | None) -> list[float]:
        return [
            record.step_ns if path is None else record.ranges_ns[path]
            for record in self._records(label)
        ]

    def _log_ratios(self, path: str | None) -> Floats:
        """For each block, the mean of log(B / A) over its two pairs of runs."""
        a, b = (np.log(self._times(label, path)).reshape(-1, 2).mean(axis=1) for label in LABELS)
        ratios: Floats = b - a
        return ratios

    def _counter_values(self, label: Label) -> dict[str, tuple[int, int]]:
        runs = [record.counters for record in self._records(label)]
        found = {name: [counts.get(name) for counts in runs] for name in runs[0]}
        return {
            name: (min(count.least for count in counts), max(count.most for count in counts))
            for name, values in found.items()
            if len(counts := [count for count in values if count is not None]) == len(runs)
        }
