"""Finished captures sent to a URL: each into a folder of its name there, URL/NAME, its capture.json last.

The folder is claimed first, by a file `upload.json` with a token that the capture keeps; one that another capture has
claimed, or that somebody filled, is left alone, and NAME-2 is taken. A capture counts as sent when the server lists
every file with its size, and with its MD5 where the server's ETags are such sums; `upload.json` in the capture then
says so. What was sent in part, because a process was killed, goes on from there.

Sent is all that lies in a capture's folder, but for hidden files and the kept columns of its trace; what sinks write
elsewhere in the run, as `tensorboard` and `parquet` do, is not. Nothing at the URL is ever removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from threading import Condition, Thread
from typing import Any, ClassVar
from uuid import uuid4

from loguru import logger
from pydantic import Field, PrivateAttr

from instrument.analysis.views import NOTE_FILE, files_of
from instrument.capture import Capture
from instrument.errors import CaptureError, reason_of
from instrument.files import read_bytes, write
from instrument.redact import without_secrets
from instrument.sinks import Sink
from instrument.storage import filesystem
from instrument.worker import waiting

# How long is waited before each further try at one capture.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_LONGEST = 64
# What the sink is called among a run's sinks, where no sink of the user's can have the name.
SINK_NAME = "profiler.upload_to"


class Upload(Sink):
    """Sends finished captures one after the other, on a thread of its own; runs behind all other sinks.

    One that fails is tried again after a while, six times in all, and then when another has arrived; while the server
    is away each of the others has one try, and so has one that nothing but a change there will help: no such bucket, no
    right to write. What cannot be sent is said once and kept.
    """

    needs_final_folder: ClassVar[bool] = True

    url: str
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    on_change: Callable[[list[Path]], Any] = Field(default=lambda pending: None, repr=False)  # noqa: ARG005
    """Called with the captures that have a try ahead of them, whenever these change."""

    _changed: Condition = PrivateAttr(default_factory=Condition)
    _pending: list[Path] = PrivateAttr(default_factory=list)
    _left: list[Path] = PrivateAttr(default_factory=list)  # tried in vain
    _thread: Thread | None = PrivateAttr(None)
    _failure_reported: bool = PrivateAttr(False)
    _closed: bool = PrivateAttr(False)

    def write(self, capture: Capture, folder: Path) -> None:  # noqa: ARG002
        """Have a finished capture sent."""
        self.submit(folder)

    def submit(self, *folders: Path) -> None:
        """Have finished captures sent; one that there is no room for, or no thread any more, is left."""
        with self._changed:
            for folder in folders:
                full = len(self._pending) >= _LONGEST
                (self._left if full else self._pending).append(folder)
            try:
                if self._thread is None:
                    self._thread = Thread(target=self._work, name="instrument upload", daemon=True)
                    self._thread.start()
            except RuntimeError:  # the interpreter ends
                self._thread = None
                self._pending.clear()
            self.on_change(self._pending)
            self._changed.notify_all()

    def busy_with(self, folder: Path) -> bool:
        """Whether a capture has a try ahead of it; one that was tried in vain has that only when another arrives."""
        return folder in self._pending

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until each has arrived or was left, at most the time allowed, and say what for; None: silently."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if timeout_s is not None:
                waiting.wait(
                    self._changed,
                    lambda: [folder.name for folder in self._pending],
                    timeout_s,
                    "upload",
                )
        if timeout_s is None and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                folder = self._pending[0]
            arrived = self._send_with_retries(folder)
            with self._changed:
                self._pending.remove(folder)
                if arrived:
                    self._pending += self._left
                    self._left.clear()
                else:
                    self._left.append(folder)
                self.on_change(self._pending)
                self._changed.notify_all()

    def _send_with_retries(self, folder: Path) -> bool:
        """Send one capture, with as many tries as it takes and may have; gives whether it arrived."""
        pauses = iter(() if self._left else _PAUSES_S)
        while True:
            try:
                logger.info("Sent {} to {}", folder.name, send(folder, self.url, self.options))
            except Exception as error:  # whatever a file system raises
                reason = without_secrets(reason_of(error), self.options)
                pause = None if _is_final(error) else next(pauses, None)
                if pause is None:
                    self._report_failure(folder, reason)
                    return False
                logger.debug(
                    "{} is not sent yet ({}); the next try is in {:g} s.",
                    folder.name,
                    reason,
                    pause,
                )
                time.sleep(pause)
            else:
                return True

    def _report_failure(self, folder: Path, reason: str) -> None:
        if not self._failure_reported:
            self._failure_reported = True
            logger.error(
                "{} cannot be sent to {} ({}) and is kept, as further ones are, untold: `instrument export {}` sends "
                "them.",
                folder.name,
                self.url,
                reason.rstrip("."),
                folder.parent,
            )


def _is_final(error: Exception) -> bool:
    """Whether another try is in vain: there is no such bucket, it may not be written, or the interpreter ends."""
    if isinstance(
        error, FileNotFoundError | PermissionError
    ):  # fsspec's packages make them of the server's answers
        return True
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


def send(folder: Path, url: str, options: Mapping[str, Any]) -> str:
    """Send one finished capture and see that it has arrived; gives the URL of its folder there.

    Raises:
        CaptureError: a file did not arrive whole.
        Exception: whatever the package behind the URL raises.
    """
    fs, base = filesystem(url, options)
    token = _note(folder).get("token") or uuid4().hex
    _keep_note(folder, {"token": token})
    names = (folder.name if number == 1 else f"{folder.name}-{number}" for number in count(1))
    name = next(name for name in names if _claimed(fs, f"{base}/{name}", token))
    missing = _missing(fs, folder, f"{base}/{name}", token)
    for file in missing:
        _put(fs, folder / file, f"{base}/{name}/{file}")
    missing = missing and _missing(fs, folder, f"{base}/{name}", token)
    if missing:
        raise CaptureError(
            f"{len(missing)} of its files did not arrive whole, such as {missing[0]}"
        )
    place = f"{url.rstrip('/')}/{name}"
    _keep_note(folder, {"token": token, "sent_to": place})
    return place


def has_arrived(folder: Path, url: str) -> bool:
    """Whether a finished capture was sent to a folder at this URL."""
    return str(_note(folder).get("sent_to")).startswith(f"{url.rstrip('/')}/")


def _note(folder: Path) -> dict[str, Any]:
    """What `upload.json` says: the token, and once it has arrived where; empty where there is none.

    A token counts in the very folder that it was made for, known by its inode: with that of another capture, which
    stands beside that one at its URL, a download could have the other overwritten.
    """
    try:
        note = json.loads(read_bytes(folder / NOTE_FILE))
        return dict(note) if note.get("inode") == folder.stat().st_ino else {}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep_note(folder: Path, note: dict[str, Any]) -> None:
    write(folder / NOTE_FILE, json.dumps(note | {"inode": folder.stat().st_ino}))


def _claim(token: str) -> bytes:
    return json.dumps({"token": token}).encode()


def _claimed(fs: Any, place: str, token: str) -> bool:
    """Whether a folder there is this capture's: claimed before, or free until now."""
    claim = f"{place}/{NOTE_FILE}"
    there = fs.find(place)
    if there and claim not in there:  # somebody else's
        return False
    if not there:
        _make_folder(fs, place)
        try:
            fs.pipe_file(claim, _claim(token), mode="create")
        except FileExistsError:  # another was faster, or the answer to our own try was lost
            pass
        except OSError as error:
            if error.errno != errno.ENOSYS:  # S3 servers without conditional writes
                raise
            fs.pipe_file(claim, _claim(token))
    return bool(fs.cat_file(claim) == _claim(token))


def _make_folder(fs: Any, place: str) -> None:
    if (
        not fs.async_impl
    ):  # object stores have no folders; being asked for one they may make a bucket
        fs.makedirs(place, exist_ok=True)


def _put(fs: Any, file: Path, there: str) -> None:
    _make_folder(fs, there.rpartition("/")[0])
    fs.put_file(str(file), there)


def _missing(fs: Any, folder: Path, place: str, token: str) -> list[str]:
    """The files, in the order in which they are sent, that have not arrived whole."""
    fs.invalidate_cache()
    there = fs.find(place, detail=True)
    sums = _etag(there.get(f"{place}/{NOTE_FILE}", {})) == _md5([_claim(token)])
    return [
        file
        for file in files_of(folder)
        if not _is_whole(folder / file, there.get(f"{place}/{file}"), sums)
    ]


def _is_whole(file: Path, there: Mapping[str, Any] | None, sums: bool) -> bool:
    if there is None or there["size"] != file.stat().st_size:
        return False
    etag = _etag(there)
    if not sums or "-" in etag:  # of a file sent in parts it is no sum
        return True
    with file.open("rb") as content:
        return etag == _md5(iter(lambda: content.read(1 << 20), b""))


def _etag(there: Mapping[str, Any]) -> str:
    return str(there.get("ETag", "")).strip('"')


def _md5(parts: Iterable[bytes]) -> str:
    total = hashlib.md5(usedforsecurity=False)
    for part in parts:
        total.update(part)
    return total.hexdigest()
