"""`RequestedWindow`: what becomes of a window that `Session.request` has requested."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from instrument.base import files, queue, waiting
from instrument.base.errors import CaptureError

if TYPE_CHECKING:
    from instrument.read.capture import Capture
    from instrument.record.session import Session

State: TypeAlias = Literal["waiting", "recording", "exporting", "done", "failed"]


class RequestedWindow:
    """A window that `Session.request` has requested; any thread may use it.

    Attributes:
        id: random text, which is in the window's `trigger_reason` in `capture.json`.
        folder: the folder of the finished capture; None before `state` was "done".
    """

    def __init__(self, session: Session, *, refused: str | None = None) -> None:
        self.id = secrets.token_hex(8)
        self.folder: Path | None = None
        self._session, self._refused = session, refused
        self._state: State = "failed" if refused else "waiting"

    @property
    def state(self) -> State:
        """`waiting`, `recording`, `exporting`, and at the end `done` or `failed`.

        A window waits until the training step ends, and while it warms up. It fails if the session
        stops first, or if recording or export fails; the log says why.
        """
        if self._state not in ("done", "failed"):
            # None: another thread begins, ends or saves a window
            found = self._session._loop.exclusively(self._in_loop, wait=False)
            self._state = self._on_disk() if found == "saved" else found or self._state
        return self._state

    def wait(self, timeout_s: float | None = None) -> State:
        """Wait until the window is `done` or `failed`, or for `timeout_s`; return the state.

        Do not call this on the thread that ends the steps before these steps have ended.
        """
        waiting.poll(lambda: self.state in ("done", "failed"), timeout_s)
        return self.state

    @property
    def capture(self) -> Capture:
        """The finished capture.

        Raises:
            CaptureError: there is none yet, or the window has failed.
        """
        state = self.state
        found = (each for each in self._session.captures if each.folder == self.folder)
        if state == "done" and (capture := next(found, None)) is not None:
            return capture
        why = self._refused or {
            "failed": "see the log, or the session has stopped before it",
            "done": f"{self.folder} was removed",
        }.get(state, "call wait() on a thread that ends no steps")
        raise CaptureError(f"The requested window has no capture; it is {state}: {why}.")

    def __repr__(self) -> str:
        return f"<RequestedWindow {self.id}: {self.state}>"

    def _in_loop(self) -> Literal["waiting", "recording", "saved"]:
        loop = self._session._loop
        if loop.running and loop.run is not None:
            planned = loop.train.window
            if loop.run.triggers.is_pending(self.id):
                return "waiting"
            if planned is not None and self.id in (planned.trigger_reason or ""):
                return "recording" if loop.recording else "waiting"
        return "saved"

    def _on_disk(self) -> State:
        folders, given_up = list[Path](), list[Path]()
        for finisher in self._session._finishers:
            given_up += finisher.given_up
        for each in {finisher.output_dir for finisher in self._session._finishers}:
            # queued folders twice, because a folder may become busy, or queued again, meanwhile
            folders += queue.queued(each) + queue.unfinished(each)
        most, moved = 0, False
        for folder in [*folders, *(folder for _, folder in self._session._capture_folders())]:
            try:
                about = files.read_bytes(folder / files.METADATA_FILE)
            except FileNotFoundError:  # the exporter has renamed it since it was found
                moved = True
                continue
            except OSError:
                continue
            if self.id.encode() in about:
                if folder.name.startswith("."):
                    is_left = queue.has_failed(folder) or queue.queued_path(folder) in given_up
                    return "failed" if is_left else "exporting"
                steps = json.loads(about)["window"]["steps"]
                if steps >= most:  # of a window in parts, the part with the most steps
                    most, self.folder = steps, folder
        if self.folder is None:
            return "exporting" if moved else "failed"  # the next look will tell
        return "done"
