"""What the sinks for experiment trackers share: what they send, and how they keep training from waiting for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import ClassVar, Literal, NamedTuple

from loguru import logger
from pydantic import Field, PrivateAttr

from instrument import threads
from instrument.analysis.views import files_of
from instrument.capture import Capture
from instrument.errors import CaptureError
from instrument.sinks import Sink
from instrument.sinks.scalars import last_step, scalars

# How long the end of a run waits for a tracker without a word.
_SILENT_S = 2.0


class Sent(NamedTuple):
    """What a tracker gets of a window: values by their tag, at a training step, and files of the capture `folder`."""

    name: str
    rank: int
    step: int
    values: dict[str, float]
    folder: Path
    files: list[Path]


class Tracker(Sink):
    """Sends each window to an experiment tracker: the scalars of `instrument.sinks.scalars`, and the capture's files.

    It runs in the training process, which holds the tracker's run, on a thread of its own: one that is slow or away
    holds up neither training nor the next window. What goes wrong is told with the window after it, or at the end.

    Tags begin with `profile/`, those of every rank but the first with `profile/rank1/` and so on. Such a rank sends
    only into a run that it already has, and never begins one.
    """

    inline: ClassVar[bool] = True

    scalars: bool = True
    """Whether scalars are logged."""

    artifact: Literal["all", "tables", "none"] = "all"
    """Which files of the capture are attached: all, all but the trace, or none."""

    timeout_s: float = Field(60, gt=0)
    """Seconds that the end of the run waits until everything is sent."""

    _waiting: SimpleQueue[Sent | None] | None = PrivateAttr(
        None
    )  # together with the thread that takes from it
    _thread: Thread | None = PrivateAttr(None)
    _unsent: list[Path] = PrivateAttr(default_factory=list)  # captures
    _failures: list[str] = PrivateAttr(default_factory=list)

    @abstractmethod
    def send(self, sent: Sent) -> None:
        """Hand one window to the tracker; may take its time, and raise anything."""

    def end(self) -> None:
        """End the run that this sink began, if it did; called where `send` is."""

    def write(self, capture: Capture, folder: Path) -> None:
        """Have the window sent. Where the folder is still to be renamed, as with `profiler.export=inline`, do it now.

        Raises:
            CaptureError: an earlier window could not be sent.
            TraceError: the trace cannot be read.
        """
        sent = self._sent(capture, folder)
        if folder.name.startswith("."):
            self.send(sent)
            return
        if self._waiting is None:
            waiting: SimpleQueue[Sent | None] = SimpleQueue()
            thread = Thread(
                target=self._work, args=[waiting], name=f"instrument {self.sink_name}", daemon=True
            )
            if not threads.start(
                thread, f"{self.display_name()} sends each window as it ends, while training waits"
            ):
                self.send(sent)
                return
            self._waiting, self._thread = waiting, thread
        self._unsent.append(sent.folder)
        self._waiting.put(sent)
        if failures := self._told_failures():
            raise CaptureError(
                f"it has this one yet to send, and could not send the one before: {failures}"
            )

    def busy_with(self, folder: Path) -> bool:
        """Whether a capture waits to be sent."""
        return folder in self._unsent

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until everything is sent, no longer than its own `timeout_s` and this one; after 2 s say what for.

        Raises:
            CaptureError: that was not long enough, or a window could not be sent.
        """
        thread, waiting = self._thread, self._waiting
        self._thread = self._waiting = None
        if thread is None or waiting is None:
            self.end()
            return
        waiting.put(None)
        timeout_s = self.timeout_s if timeout_s is None else min(self.timeout_s, timeout_s)
        self._wait(thread, timeout_s)
        failures = self._told_failures()
        if thread.is_alive():
            raise CaptureError(self._too_late(timeout_s, failures))
        if failures:
            raise CaptureError(f"{self.display_name()} could not send {failures}")

    def _wait(self, thread: Thread, timeout_s: float) -> None:
        thread.join(min(_SILENT_S, timeout_s))
        if thread.is_alive() and timeout_s > _SILENT_S:
            names = ", ".join(folder.name for folder in self._unsent) or "that its run has ended"
            what = "{} has yet to send {}: the end of the run waits for it, at most {:g} s in all."
            logger.info(what, self.display_name(), names, timeout_s)
            thread.join(timeout_s - _SILENT_S)

    def _too_late(self, waited_s: float, failures: str) -> str:
        kind, left = type(self), list(self._unsent)
        shipped = kind.__module__.startswith("instrument.")
        command = (
            f"--sink {self.sink_name if shipped else f'{kind.__module__}.{kind.__qualname__}'}"
        )
        later = "".join(
            f"; `instrument export {folder} {command}` sends it later" for folder in left
        )
        return (
            f"{self.display_name()} is still sending after {waited_s:g} s (profiler.sinks.{self.sink_name}.timeout_s is "
            f"{self.timeout_s:g}): its server may be out of reach. What is left may be lost to the tracker, and the "
            f"captures are whole{later}."
            + (f" Before, it could not send {failures}" if failures else "")
        )

    def _work(self, waiting: SimpleQueue[Sent | None]) -> None:
        for sent in iter(waiting.get, None):
            self._try(sent.name, self.send, sent)
            self._unsent.remove(sent.folder)
        self._try("the end of its run", self.end)

    def _try(self, what: str, act: Callable[..., None], *args: Sent) -> None:
        try:
            act(*args)
        except (Exception, SystemExit) as error:  # whatever the tracker raises
            self._failures.append(
                f"{what} ({type(error).__name__}: {' '.join(str(error).split())})"
            )

    def _told_failures(self) -> str:
        """What could not be sent and was not told yet, to end a sentence; empty where there is nothing."""
        failures, self._failures = self._failures, []
        return f"{', '.join(failures)}." if failures else ""

    def _sent(self, capture: Capture, folder: Path) -> Sent:
        about = capture.about
        rank = about.rank or 0
        prefix = f"profile/rank{rank}/" if rank else "profile/"
        # the exporter has computed them, for the sake of training, which would feel the reading of a large trace
        known = about.scalars or (dict(scalars(capture)) if self.scalars else {})
        values = {prefix + tag: value for tag, value in known.items()} if self.scalars else {}
        return Sent(
            capture.name,
            rank,
            last_step(capture),
            values,
            capture.folder or folder,
            self._files(capture),
        )

    def _files(self, capture: Capture) -> list[Path]:
        if self.artifact == "none" or capture.folder is None:
            return []
        files = [capture.folder / file for file in files_of(capture.folder)]
        return [file for file in files if self.artifact == "all" or file != capture.trace_path]
