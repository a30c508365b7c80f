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
from typing import Any

import msgspec

from instrument.base.errors import CaptureError
from instrument.base.files import CAPTURES_VARIABLE
from instrument.read.compare.work import Work
from instrument.read.views.find_captures import captures_below

SOCKET_VARIABLE = "INSTRUMENT_TRIAL"
_MOST_BYTES = 64 << 20  # of an answer
_POLL_S = 0.2
_ENDS_S = 10.0  # how long a process may take to end after its connection
_ALL_STEPS = 1 << 30


class StepsError(CaptureError):
    """A run of the script has not run the steps that were asked for."""


class ChangeError(StepsError):
    """The changes could not be made; the run goes on without them."""


class ScriptError(StepsError):
    """The script has raised an error, or was killed."""


class ScriptEndedError(StepsError):
    """The script has ended without an error."""


class TimeUpError(StepsError):
    """The run has not answered in time."""


class ScriptRun:
    """A run of the script, which waits between two steps.

    Attributes:
        changes: the changes that could be made to the script, as its first rank describes them.
        steps: how many steps it has run.
    """

    def __init__(
        self, command: Sequence[str], here: Path, folder: Path, variables: Mapping[str, str]
    ) -> None:
        """Start the command in the folder `here`; `folder` gets its output and its captures."""
        folder.mkdir(parents=True, exist_ok=True)
        self.changes: list[dict[str, Any]] = []
        self.steps = 0
        self.output = folder / "output.txt"
        self._place = Path(tempfile.mkdtemp(prefix="instrument-"))  # a socket's path must be short
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._place / "s"))
        self._server.listen()
        self._lines: list[Any] = []  # the connections of the ranks
        self._captures = folder / "captures"
        own = {SOCKET_VARIABLE: str(self._place / "s"), CAPTURES_VARIABLE: str(self._captures)}
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
            ranks = int(first["ranks"])
            if first["rank"] == 0 or not self.changes:
                self.changes = first["changes"]
            if first["rank"] == 0:
                self._lines.insert(0, self._lines.pop())
        self._stop()

    def run(self, steps: int, until: float, *, lead: int = 0, changes: str = "") -> float:
        """Run steps with these changes switched on; return the mean time of a step in ns.

        The first `lead` steps are not timed.

        Raises:
            StepsError: the subclasses say why.
        """
        answer = self._ask({"steps": steps, "lead": lead, "with": changes}, until)
        self.steps += steps + lead
        return float(answer["step_ns"])

    def record(self, until: float) -> list[Path]:
        """Run steps until they are recorded; return the captures of the first rank."""
        asked = {"steps": _ALL_STEPS, "captured": True}
        try:
            answer = self._ask(asked, until)
        except ScriptEndedError:  # it has waited for its captures
            return [*captures_below(self._captures)]
        return [*map(Path, answer["captures"])]

    def work(self, until: float) -> Work:
        """What the script has done so far; from now on, only its losses are observed."""
        return msgspec.convert(self._ask({"work": True}, until)["work"], Work)

    def _ask(self, request: dict[str, Any], until: float) -> dict[str, Any]:
        os.killpg(self._process.pid, signal.SIGCONT)
        for each in self._lines:
            with suppress(OSError):  # the script has ended
                each.connection.sendall(msgspec.json.encode(request) + b"\n")
        answers = [self._answer(each, until) for each in self._lines]
        self._stop()
        return answers[0]

    def _answer(self, lines: _Lines, until: float) -> dict[str, Any]:
        while (line := lines.next()) is None:
            self._check(until)
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDS_S)
            raise self._how_it_ended()
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise ChangeError(str(answer["error"]))
        return answer

    def _check(self, until: float) -> None:
        if self._process.poll() is not None:
            raise self._how_it_ended()
        if time.monotonic() > until:
            raise TimeUpError(f"A step has not ended in time; the output is in {self.output}.")

    def _how_it_ended(self) -> StepsError:
        status = self._process.poll()
        if status == 0:
            return ScriptEndedError(f"The script has ended after {self.steps} steps.")
        lines = self.output.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
        last = next((each.strip() for each in reversed(lines) if each.strip()), "no output")
        return ScriptError(f"The script has ended with status {status}: {last}")

    def _stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End the run without letting the script notice, so that it saves nothing more."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        return bytes(line)
