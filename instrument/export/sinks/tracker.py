"""`Tracker`, the base class of sinks that send windows to experiment trackers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, PrivateAttr

from instrument.base import threads
from instrument.base.errors import CaptureError
from instrument.base.log import logger
from instrument.base.storage import files_of
from instrument.export.sinks.sink import Sink
from instrument.export.sinks.window_scalars import known_scalars, last_step

if TYPE_CHECKING:
    from instrument.read.capture import Capture

# If the end of a run waits for the tracker longer than this, in seconds, the log names the windows
# that are not sent yet.
_SILENT_S = 2.0


class Sent(NamedTuple):
    """One window's data for a tracker: scalars by tag, their step, and files in `folder`."""

    name: str
    rank: int
    step: int
    values: dict[str, float]
    folder: Path
    files: list[Path]


class Tracker(Sink):
    """Sends the scalars and files of each window to an experiment tracker.

    The tracker's run is open in the training process, so a thread of this process sends the data.
    Neither training nor the next window waits for the tracker. An error is reported with the next
    window or at the end of the session.

    Tags begin with `profile/` on rank 0, with `profile/rank1/` on rank 1, and so on. Only rank 0
    may start a new run of the tracker; other ranks send only into a run that exists.
    """

    inline: ClassVar[bool] = True

    scalars: bool = True
    """Whether to log scalars."""

    artifact: Literal["all", "tables", "none"] = "all"
    """Files of the capture to attach: `all`, `tables` (all but the trace), `none`."""

    timeout_s: float = Field(60, gt=0)
    """Seconds that the end of the run waits, at most, until everything is sent."""

    # The queue of windows to send, and the thread that sends them: both exist, or both are None.
    _queue: SimpleQueue[Sent | None] | None = PrivateAttr(None)
    _thread: Thread | None = PrivateAttr(None)
    _unsent: list[Path] = PrivateAttr(default_factory=list)
    _failures: list[str] = PrivateAttr(default_factory=list)

    @abstractmethod
    def send(self, sent: Sent) -> None:
        """Send one window to the tracker. This method may block and may raise any exception."""

    def end(self) -> None:
        """End the tracker's run if this sink started it; called on the thread of `send`."""

    def write(self, capture: Capture, folder: Path) -> None:
        """Queue the window for the thread that sends.

        With `profiler.export=inline`, send it here, because the window's folder is renamed
        afterwards.

        Raises:
            CaptureError: an earlier window could not be sent.
        """
        sent = self._sent(capture, folder)
        if folder.name.startswith("."):
            self.send(sent)
            return
        if self._queue is None:
            queue: SimpleQueue[Sent | None] = SimpleQueue()
            name = f"instrument {self.sink_name}"
            thread = Thread(target=self._work, args=[queue], name=name, daemon=True)
            otherwise = f"{self.display_name()} sends each window as it ends, while training waits"
            if not threads.start(thread, otherwise):
                self.send(sent)
                return
            self._queue, self._thread = queue, thread
        self._unsent.append(sent.folder)
        self._queue.put(sent)
        if failures := self._take_failures():
            raise CaptureError(
                f"this window is queued, but an earlier window could not be sent: {failures}"
            )

    def busy_with(self, folder: Path) -> bool:
        """Whether the window of a capture still has to be sent."""
        return folder in self._unsent

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until everything is sent; after 2 s, log the names of the windows that are left.

        The time limit is the argument or the option `timeout_s`, whichever is shorter.

        Raises:
            CaptureError: the time was too short, or a window could not be sent.
        """
        thread, queue = self._thread, self._queue
        self._thread = self._queue = None
        if thread is None or queue is None:
            self.end()
            return
        queue.put(None)
        timeout_s = self.timeout_s if timeout_s is None else min(self.timeout_s, timeout_s)
        thread.join(min(_SILENT_S, timeout_s))
        if thread.is_alive() and timeout_s > _SILENT_S:
            names = ", ".join(folder.name for folder in self._unsent) or "its last message"
            what = "{} still has to send {}. The run waits for this, at most {:g} s in all."
            logger.info(what, self.display_name(), names, timeout_s)
            thread.join(timeout_s - _SILENT_S)
        failures = self._take_failures()
        if thread.is_alive():
            raise CaptureError(self._too_late(timeout_s, failures))
        if failures:
            raise CaptureError(f"{self.display_name()} could not send {failures}")

    def _too_late(self, waited_s: float, failures: str) -> str:
        kind = type(self)
        shipped = kind.__module__.startswith("instrument.")
        sink = self.sink_name if shipped else f"{kind.__module__}.{kind.__qualname__}"
        later = "".join(
            f"; `instrument export {folder} --sink {sink}` sends this window later"
            for folder in list(self._unsent)
        )
        earlier = f" Before, it could not send {failures}" if failures else ""
        return (
            f"{self.display_name()} is still sending after {waited_s:g} s (profiler.sinks."
            f"{self.sink_name}.timeout_s is {self.timeout_s:g}): its server may be unreachable. "
            "The tracker may not get the rest, but the captures are complete"
            f"{later}.{earlier}"
        )

    def _work(self, queue: SimpleQueue[Sent | None]) -> None:
        for sent in iter(queue.get, None):
            self._try(sent.name, self.send, sent)
            self._unsent.remove(sent.folder)
        self._try("the end of its run", self.end)

    def _try(self, what: str, act: Callable[..., None], *args: Sent) -> None:
        try:
            act(*args)
        except (Exception, SystemExit) as error:  # whatever the tracker raises
            reason = " ".join(str(error).split())
            self._failures.append(f"{what} ({type(error).__name__}: {reason})")

    def _take_failures(self) -> str:
        """The failures that were not reported yet, as the end of a sentence, or ""."""
        failures, self._failures = self._failures, []
        return f"{', '.join(failures)}." if failures else ""

    def _sent(self, capture: Capture, folder: Path) -> Sent:
        about = capture.about
        rank = about.rank or 0
        prefix = f"profile/rank{rank}/" if rank else "profile/"
        known = known_scalars(capture) if self.scalars else {}
        values = {prefix + tag: value for tag, value in known.items()}
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
