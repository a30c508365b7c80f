"""Runs of a script that stop between two steps until they are asked for more.

Each run is a process `instrument run`, in which `instrument.record.trial` answers. While a run
waits, all of its processes are stopped (SIGSTOP): workers of its loader prepare no batches, and
nothing of it takes time from another run. So two runs can take turns on one machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from instrument.base.errors import CaptureError
from instrument.base.files import CAPTURES_VARIABLE, TRIAL_VARIABLE
from instrument.base.units import counted
from instrument.read.compare.work import Declared, Work
from instrument.read.trace.capture_json import BAD_JSON
from instrument.read.views.find_captures import captures_below

_MOST_BYTES = 64 << 20  # of an answer
_POLL_S = 0.2
_ENDS_S = 10.0  # how long a process may take to end after its connection
_ALL_STEPS = 1 << 30
_SHOWN_BYTES, _SHOWN_WIDTH = 1 << 16, 500  # of the script's output, to say how it has ended
_ODD = "The script's process has given an odd answer"


Text = Annotated[str, Meta(max_length=4000)]


class Applicable(Struct, kw_only=True):
    """A change that can be made to a script; see `instrument.record.changes`.

    Attributes:
        name: the name of the change; of several that were made together, their names.
        words: the change as `--with` names it, such as "workers=2".
        does, by_hand: what it changes, and how to write it in the script.
        numbers: what it may change in the results: "same", "rounding" or "precision".
        findings: the codes of the findings whose saving it realises.
        switchable: whether it can be switched between two steps.
    """

    name: Text
    # a folder has its name
    words: Annotated[str, Meta(pattern=r"^[a-z0-9_=,-]{1,250}\Z")] = msgspec.field(name="with")
    does: Text
    by_hand: Text
    numbers: Declared
    findings: Annotated[list[Text], Meta(max_length=64)] = []
    switchable: bool = False


class _Answer(Struct, frozen=True):
    rank: int = 0
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    changes: Annotated[list[Applicable], Meta(max_length=1000)] = []
    step_ns: Annotated[float, Meta(ge=1)] | None = None
    collections: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    work: Work | None = None
    error: Text | None = None


class StepsError(CaptureError):
    """A run of the script has not run the steps that were asked for."""

    #: The result of the change that was measured.
    result: Literal["failed", "not tried", "undecided"] = "failed"


class ChangeError(StepsError):
    """The changes could not be made; the run goes on without them."""


class ScriptError(StepsError):
    """The script has raised an error, or was killed."""


class ScriptEndedError(StepsError):
    """The script has ended without an error."""


class TimeUpError(StepsError):
    """The run has not answered in time."""

    result = "not tried"


class UndecidedError(StepsError):
    """The run cannot show what a change saves."""

    result = "undecided"


class ScriptRun:
    """A run of the script, which waits between two steps.

    Attributes:
        changes: the changes that could be made to the script, as its first rank describes them.
        steps: how many steps it has run.
        collections: how many full collections of garbage fell into the timed ones.
    """

    def __init__(
        self, command: Sequence[str], here: Path, folder: Path, variables: Mapping[str, str]
    ) -> None:
        """Start the command in the folder `here`; `folder` gets its output and its captures."""
        self.changes: list[Applicable] = []
        self.steps = self.collections = 0
        self.output = folder / "output.txt"
        self._place = Path(tempfile.mkdtemp(prefix="instrument-"))  # a socket's path must be short
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._place / "s"))
        self._server.listen()
        self._lines: list[Any] = []  # the connections of the ranks
        self._captures = folder / "captures"
        own = {TRIAL_VARIABLE: str(self._place / "s"), CAPTURES_VARIABLE: str(self._captures)}
        with self.output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=here,
                env={**os.environ, **variables, **own},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # stopped processes get SIGHUP and SIGCONT from the system when this one ends
                process_group=0,
            )

    def start(self, until: float) -> None:
        """Wait for the first step of each rank; `until` is a time of `time.monotonic`."""
        ranks = 1
        while len(self._lines) < ranks:
            self._server.settimeout(_POLL_S)
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                self._check(until)
                continue
            connection.settimeout(_POLL_S)
            self._lines.append(_Lines(connection))
            first = self._answer(self._lines[-1], until)
            if first.error:
                raise ScriptError(first.error)
            ranks = first.ranks
            if first.rank == 0 or not self.changes:
                self.changes = first.changes
            if first.rank == 0:
                self._lines.insert(0, self._lines.pop())
        self._signal(signal.SIGSTOP)

    def run(self, steps: int, until: float, *, lead: int = 0, changes: str = "") -> float:
        """Run steps with these changes switched on; return the mean time of a step in ns.

        The first `lead` steps are not timed.

        Raises:
            StepsError: the subclasses say why.
        """
        answer = self._ask({"steps": steps, "lead": lead, "with": changes}, until)
        self.steps += steps + lead
        self.collections += answer.collections
        if answer.step_ns is None:
            raise ScriptError(_ODD)
        return answer.step_ns

    def record(self, until: float) -> list[Path]:
        """Run steps until they are recorded; return the captures."""
        with suppress(ScriptEndedError):  # it has waited for its captures
            self._ask({"steps": _ALL_STEPS, "captured": True}, until)
        return [*captures_below(self._captures)]

    def work(self, until: float) -> Work:
        """What the script has done so far; from now on, only its losses are observed."""
        work = self._ask({"work": True}, until).work
        if work is None:
            raise ScriptError(_ODD)
        return work

    def _ask(self, request: dict[str, Any], until: float) -> _Answer:
        self._signal(signal.SIGCONT)
        for each in self._lines:
            with suppress(OSError):  # the script has ended
                each.connection.sendall(msgspec.json.encode(request) + b"\n")
        answers = [self._answer(each, until) for each in self._lines]
        self._signal(signal.SIGSTOP)
        if (error := next((each.error for each in answers if each.error), None)) is not None:
            raise ChangeError(error)
        return answers[0]

    def _answer(self, lines: _Lines, until: float) -> _Answer:
        while (line := lines.next()) is None:
            self._check(until)
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDS_S)
            raise self._how_it_ended()
        try:
            return msgspec.json.decode(line, type=_Answer)
        except BAD_JSON as error:
            raise ScriptError(f"{_ODD}: {error}") from None

    def _check(self, until: float) -> None:
        if self._process.poll() is not None:
            raise self._how_it_ended()
        if time.monotonic() > until:
            printed = f"; its output is in {self.output}" if self.output.stat().st_size else ""
            raise TimeUpError(f"its time was used up before its steps had ended{printed}")

    def _how_it_ended(self) -> StepsError:
        status = self._process.poll()
        if status == 0 and not self._lines:
            return ScriptEndedError(
                "The script has ended before two steps were seen: --step says what ends a step."
            )
        if status == 0:
            return ScriptEndedError(f"The script has ended after {counted(self.steps, 'step')}.")
        if status is not None and status < 0:
            name = signal.strsignal(-status)
            return ScriptError(f"The script was ended by signal {-status} ({name}).")
        with self.output.open("rb") as file:
            file.seek(max(self.output.stat().st_size - _SHOWN_BYTES, 0))
            text = file.read(_SHOWN_BYTES).decode("utf-8", "replace")
        # below a traceback are more lines, such as what slows the script
        lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
        raised = (each for each in lines if each.strip() and not each.startswith(" "))
        is_raised = "Traceback (most recent call last):\n" in text
        last = next(raised if is_raised else reversed([*raised]), "no output")[:_SHOWN_WIDTH]
        return ScriptError(f"The script has ended with status {status}: {last}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all its processes have ended
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the run without letting the script notice, so that it saves nothing more."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for each in self._lines:
            each.connection.close()
        self._server.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> ScriptRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Lines:
    """The lines that come from a connection, of at most 64 MiB."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._read = bytearray()

    def next(self) -> bytes | None:
        """The next line; None if it has not arrived yet, and empty at the end."""
        try:
            found = self.connection.recv(1 << 16)
        except TimeoutError:
            return None
        except OSError:
            return b""
        self._read += found
        if not found or len(self._read) > _MOST_BYTES:
            return b""
        if b"\n" not in found:
            return None
        line, _, rest = self._read.partition(b"\n")
        self._read = rest
        return bytes(line)
