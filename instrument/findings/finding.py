"""`Finding`: a problem, its evidence, what to change, and the step time that the change saves."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from instrument.errors import CaptureError

if TYPE_CHECKING:
    from instrument.analysis.views import Views
    from instrument.runs.run import Ranks
    from instrument.whatif.scenario import Scenario


class NotRecorded(CaptureError):  # noqa: N818
    """A check cannot run because the capture lacks something.

    A diagnosis has one sentence for all checks with the same remedy.

    Args:
        missing: what the capture lacks, such as "the trace has no Python stacks".
        remedy: what to do, such as "record with profiler.with_stack=true".
    """

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"{missing[:1].upper()}{missing[1:]}: {remedy}.")
        self.missing, self.remedy = missing, remedy


# Remedies that several checks have in common.
RECORD_SHAPES = "record with profiler.record_shapes=true"
RECORD_STEPS = "record with profiler.active=4 or more"
RECORD_DEVICE = "record with a device among profiler.activities"
RECORD_AGAIN = "record with a session of this version of instrument"


class Evidence(NamedTuple):
    """Events of one name that show a problem, as one table row.

    Attributes:
        name: the name of the events, such as "aten::item".
        calls: how often the events occurred in the window.
        total_ns: the time of the events in the window; None if this time has no meaning.
        start_ns: the start of the longest event, on the trace's own clock; None if it is not known.
        detail: further facts, such as a size or a shape; empty if there are none.
    """

    name: str
    calls: int
    total_ns: int | None = None
    start_ns: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a capture.

    Attributes:
        code: the kind of the problem, such as "loader-wait". The file in `instrument.findings` that
            finds the problem has the same name with underscores.
        title: the problem in one sentence, with a number, such as "80 % of the step waits for
            data".
        change: what to write, as a sentence or a line of PyTorch.
        verify: how to check that the change helped. Usually, it is a shell command that
            `show_command` makes: run it for this capture, and for a capture of the changed program.
            Else it is a sentence.
        saving: the simulation of the step without the problem; None if it cannot be simulated.
            `saving.saving_ns` is how much shorter a step would be.
        range: the path of the range where the problem is; None if the problem is in no range, or in
            several.
        source: the file and line, such as "train.py:31"; None if the line is not known, or if there
            are several.
        evidence: the events that show the problem, the most important first.
        coverage: the rows of `capture.coverage` that the finding depends on.
        share: the share of the step that the title names; None if the title names no share. For
            `unmarked-time`, it is the share outside all ranges and operators.
        capture: the name of the capture that holds the evidence; None for a comparison of ranks.
            `diagnose` sets it.
        phase: the phase of the step that the saving shortens, such as "validation"; None if all
            captures are of one phase. `diagnose` sets it.
    """

    code: str
    title: str
    change: str
    verify: str
    saving: Scenario | None = None
    range: str | None = None
    source: str | None = None
    evidence: tuple[Evidence, ...] = ()
    coverage: tuple[str, ...] = ()
    share: float | None = None
    capture: str | None = None
    phase: str | None = None


class Check(NamedTuple):
    """A kind of problem and the function that looks for it.

    Attributes:
        code: the code of the findings, as in `Finding`.
        find: yields the findings of one capture. Its arguments are the capture and
            `capture.whatif`, the simulation without edits. It raises `NotRecorded` if the capture
            lacks what it needs.
        needs_device_work: whether only a trace with device work can show the problem. In a trace
            without device work, such a check never counts as passed.
    """

    code: str
    find: Callable[[Views, Scenario], Iterator[Finding]]
    needs_device_work: bool = False


class RanksCheck(NamedTuple):
    """A kind of problem that only shows if the ranks of a window are compared.

    Attributes:
        code: the code of the findings, as in `Finding`.
        find: yields the findings of one window on all its ranks. It raises `NotRecorded` if the
            captures lack what it needs.
    """

    code: str
    find: Callable[[Ranks], Iterator[Finding]]


def show_command(capture: Views, options: str, expected: str = "") -> str:
    """The command that prints tables of a capture, ready to paste into a shell.

    Args:
        capture: the capture.
        options: the options of `instrument show`.
        expected: what the tables show once the problem is solved; it is added to the command as a
            shell comment.
    """
    comment = f"  # {expected}" if expected else ""
    return f"instrument show {shlex.quote(str(capture.place))} {options}{comment}"
