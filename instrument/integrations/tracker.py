"""`Tracker`, the base class of callbacks that send captures to experiment trackers."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PrivateAttr

from instrument.base import queue, threads, waiting
from instrument.base.errors import need_package
from instrument.base.files import DETAIL_FILE
from instrument.base.log import logger
from instrument.base.options import Options
from instrument.base.storage import files_of

if TYPE_CHECKING:
    from instrument.read.capture import Capture


class Sent(NamedTuple):
    """One capture for a tracker: scalars by tag, their step, and files in `folder`."""

    folder: Path
    rank: int
    step: int
    values: dict[str, float]
    files: list[Path]


class Tracker(Options):
    """Sends the scalars and files of each capture to an experiment tracker, for `on_capture`.

    A thread sends them, so training waits neither for the tracker nor for its server. The first
    error is logged.

    Tags begin with `profile/` on rank 0, with `profile/rank1/` on rank 1, and so on. Only rank 0
    may start a new run of the tracker; other ranks send only into a run that exists.
    """

    tracker_name: ClassVar[str] = "tracker"

    scalars: bool = True
    """Whether to log scalars."""

    artifact: Literal["all", "tables", "none"] = "all"
    """Files of the capture to attach: `all`, `tables` (all but the trace), `none`."""

    timeout_s: float = Field(60, gt=0)
    """Seconds that the end of the run waits, at most, until everything is sent."""

    _queue: SimpleQueue[Sent | None] = PrivateAttr(default_factory=SimpleQueue)
    _thread: Thread | None = PrivateAttr(None)
    _unsent: list[Path] = PrivateAttr(default_factory=list)
    _has_failed: bool = PrivateAttr(False)

    def model_post_init(self, context: Any, /) -> None:
        """Raise MissingPackage before the first step if the tracker's package is missing."""
        super().model_post_init(context)
        if self._is_shipped():  # its name is that of the package, and of the extra
            need_package(self.display_name(), self.tracker_name, self.tracker_name)

    @classmethod
    def _is_shipped(cls) -> bool:
        return cls.__module__.startswith("instrument.")

    @classmethod
    def display_name(cls) -> str:
        """The name in messages, such as "The mlflow tracker"."""
        return f"The {cls.tracker_name} tracker"

    def begin(self) -> None:
        """Remember the program's run; called on the training thread before the first step."""

    def send(self, sent: Sent) -> None:
        """Send one capture to the tracker. This method may block and may raise any exception."""
        raise NotImplementedError

    def end(self) -> None:
        """End the tracker's run if this object started it; called on the thread of `send`."""

    def __call__(self, folder: Path, scalars: dict[str, float]) -> None:
        """Have a capture sent; `scalars` is the content of its `scalars.json`."""
        self.begin()
        sent = self._sent(folder, scalars)
        if self._thread is None:
            name = f"instrument {self.tracker_name}"
            thread = Thread(target=self._work, name=name, daemon=True)
            if not threads.start(thread, f"{self.display_name()} sends while training waits"):
                self._try(sent)
                return
            self._thread = thread
        queue.need(folder, self.tracker_name)
        self._unsent.append(folder)
        self._queue.put(sent)

    def write(self, capture: Capture, folder: Path) -> None:
        """Send a capture while the caller waits, as for `instrument export --sink`."""
        from instrument.export.sinks.window_scalars import numbers

        self.send(self._sent(capture.folder or folder, numbers(capture)))

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until everything is sent, at most the shorter of both `timeout_s`; log what is not.

        Then end the run of the tracker if this object started it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            self.end()
            return

        def has_ended(longest_s: float) -> bool:
            thread.join(longest_s)
            return not thread.is_alive()

        def left() -> list[str]:
            return [folder.name for folder in list(self._unsent)]

        self._queue.put(None)
        longest_s = self.timeout_s if timeout_s is None else min(self.timeout_s, timeout_s)
        waiting.wait_for(has_ended, left, longest_s, longest_s, f"{self.tracker_name} tracker")
        if thread.is_alive():
            logger.error(
                "{} is still sending after {:g} s: its server may be unreachable. The captures are "
                "complete{}.",
                self.display_name(),
                longest_s,
                "".join(f"; {self._later(folder)}" for folder in list(self._unsent)),
            )

    def _work(self) -> None:
        for sent in iter(self._queue.get, None):
            self._try(sent)
            self._unsent.remove(sent.folder)
            queue.let_go(sent.folder, self.tracker_name)
        self._try(None)

    def _try(self, sent: Sent | None) -> None:
        """Send a capture, or end the run if there is none."""
        try:
            self.end() if sent is None else self.send(sent)
        except (Exception, SystemExit) as error:  # whatever the tracker raises
            if not self._has_failed:
                self._has_failed = True
                logger.error(
                    "{} failed ({}: {}); further failures of it are not logged{}.",
                    self.display_name(),
                    type(error).__name__,
                    " ".join(str(error).split()),
                    "" if sent is None else f"; {self._later(sent.folder)}",
                )

    def _later(self, folder: Path) -> str:
        kind = type(self)
        name = self.tracker_name if self._is_shipped() else f"{kind.__module__}.{kind.__qualname__}"
        return f"`instrument export {folder} --sink {name}` sends this capture later"

    def _sent(self, folder: Path, scalars: dict[str, float]) -> Sent:
        values = dict(scalars)
        rank, step = int(values.pop("rank")), int(values.pop("step"))
        prefix = f"profile/rank{rank}/" if rank else "profile/"
        traces = (queue.RAW, queue.PACKED, DETAIL_FILE) if self.artifact == "tables" else ()
        found = [] if self.artifact == "none" else files_of(folder)
        return Sent(
            folder,
            rank,
            step,
            {prefix + tag: value for tag, value in values.items()} if self.scalars else {},
            [folder / file for file in found if file not in traces],
        )
