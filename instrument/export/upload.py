"""Uploads finished captures, each into a folder below a URL; capture.json is uploaded last.

docs/export.md says what is uploaded, when it is tried again, and what is never overwritten. The
file `upload.json` in the capture's own folder records the folders at URLs that it has begun. An
interrupted upload is resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from random import SystemRandom
from threading import Condition, Thread
from typing import Any

from instrument.base import queue, waiting
from instrument.base.errors import CaptureError, reason_of
from instrument.base.files import METADATA_FILE, read_bytes, write
from instrument.base.log import logger
from instrument.base.redact import without_secrets
from instrument.base.storage import NOTE_FILE, files_of, filesystem

# The average pauses between the attempts to upload one capture, in seconds.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
# All ranks end a window at the same moment: at most about this many begin to upload per second.
_RANKS_PER_SECOND = 1000
_RUN_DIGITS = 8
uniform = SystemRandom().uniform  # forked ranks share Python's own generator


class Uploads:
    """Uploads captures one after the other on a separate thread.

    While a capture counts as failed, the upload of other captures is tried only once. Failed
    captures are tried again after another capture has been uploaded. Only the first failure is
    logged. The more ranks record, the longer is the random pause before the first of a queue.
    """

    def __init__(self, url: str, options: Mapping[str, Any], ranks: int = 1) -> None:
        self._url, self._options = url, options
        self._longest_start_s = ranks / _RANKS_PER_SECOND if ranks > 1 else 0.0
        self._changed = Condition()
        self._pending: list[Path] = []
        self._failed: list[Path] = []
        self._thread: Thread | None = None
        self._failure_reported = self._closed = False

    def add(self, *folders: Path) -> None:
        """Queue finished captures. Nothing is uploaded if no thread can be started."""
        with self._changed:
            known = {*self._pending, *self._failed}
            self._pending += [folder for folder in folders if folder not in known]
            self._changed.notify()
            if self._pending and self._thread is None:
                thread = Thread(target=self._work, name="instrument upload", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter shuts down
                    return
                self._thread = thread

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until each capture is uploaded or has failed; with `timeout_s`, log the progress."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is None:
            return
        if timeout_s is None:
            self._thread.join()
        else:
            waiting.wait_for(self._ended, self._left, timeout_s, timeout_s, "upload")

    def _ended(self, seconds: float) -> bool:
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _left(self) -> list[str]:
        return [folder.name for folder in self._pending]

    def _work(self) -> None:
        pause_s = self._longest_start_s
        while True:
            with self._changed:
                pause_s = pause_s if self._pending else self._longest_start_s
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                folder = self._pending[0]
            time.sleep(uniform(0, pause_s))
            pause_s = 0.0
            arrived = self._send_with_retries(folder)
            with self._changed:
                self._pending.remove(folder)
                if arrived:
                    self._pending += self._failed
                    self._failed.clear()
                else:
                    self._failed.append(folder)

    def _send_with_retries(self, folder: Path) -> bool:
        pauses = iter(() if self._failed else _PAUSES_S)
        while True:
            try:
                logger.info("Sent {} to {}", folder.name, send(folder, self._url, self._options))
            except Exception as error:  # file systems raise anything
                reason = without_secrets(reason_of(error), self._options)
                pause = None if _is_final(error) else next(pauses, None)
                if pause is None:
                    self._report_failure(folder, reason)
                    return False
                pause *= uniform(0.5, 1.5)
                logger.debug(
                    "{} is not sent yet ({}); the next attempt is in {:.1f} s.",
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
                "{} cannot be sent to {} ({}) and is kept on disk; later failures are not logged. "
                "`instrument export {} --upload-to {}` sends such captures.",
                folder.name,
                self._url,
                reason.rstrip("."),
                folder.parent,
                self._url,
            )


def _is_final(error: Exception) -> bool:
    """Whether further attempts are useless after this error."""
    # fsspec's packages raise these for responses of the server
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return True
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


def send(folder: Path, url: str, options: Mapping[str, Any]) -> str:
    """Upload a finished capture, check that it arrived, and return the URL of its folder.

    `url` is the URL of the parent folder, `options` are those of fsspec.

    Raises:
        CaptureError: a file did not arrive completely.
        FileExistsError: there is already a folder of this name, which `folder` has not begun.
        Exception: any exception that fsspec's package for the URL raises.
    """
    place = _place(folder, url)
    fs, path = filesystem(place, options)
    if place not in _places(folder):
        if fs.find(path):
            raise FileExistsError(f"there is already a capture at {place}")
        _note(folder, place, arrived=False)
    missing = _missing(fs, folder, path)
    for is_last in (False, True):
        _put(fs, folder, path, [each for each in missing if (each == METADATA_FILE) is is_last])
    if missing and (missing := _missing(fs, folder, path)):
        raise CaptureError(
            f"{len(missing)} of the capture's files did not arrive completely, such as {missing[0]}"
        )
    _note(folder, place, arrived=True)
    queue.let_go(folder, "upload")
    return place


def _place(folder: Path, url: str) -> str:
    run, base = queue.origin(folder).run[:_RUN_DIGITS], url.rstrip("/")
    above = f"{base}//" if base.endswith(":") else base  # the root, such as file:///
    return f"{above}/{folder.name}{f'-{run}' if run.isalnum() else ''}"


def has_arrived(folder: Path, url: str) -> bool:
    """Whether a finished capture was uploaded to a folder at this URL."""
    return _places(folder).get(_place(folder, url)) is True


def _places(folder: Path) -> dict[str, bool]:
    """The remote folders that a capture's folder may write to; true if all files have arrived.

    They stand in `upload.json`, which is valid only for a folder with the inode that it names.
    Otherwise a capture that you downloaded from somebody, and then uploaded, could overwrite a
    capture of yours at the URL.
    """
    try:
        note = json.loads(read_bytes(folder / NOTE_FILE))
        return dict(note["places"]) if note["inode"] == folder.stat().st_ino else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _note(folder: Path, place: str, *, arrived: bool) -> None:
    places = {**_places(folder), place: arrived}
    note = {"inode": folder.stat().st_ino, "places": places}
    write(folder / NOTE_FILE, json.dumps(note))


def _put(fs: Any, folder: Path, path: str, files: list[str]) -> None:
    pairs = {str(folder / file): f"{path}/{file}" for file in files}
    if not fs.async_impl:
        for source, target in pairs.items():
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(source, target)  # older SFTP file systems have a `put` without lists
    elif pairs:  # without `makedirs`: object stores have no folders, and it might create a bucket
        fs.put(list(pairs), list(pairs.values()))


def _missing(fs: Any, folder: Path, path: str) -> list[str]:
    """The files of the capture that have not arrived with their size, in the order of upload."""
    fs.invalidate_cache()
    present = fs.find(path, detail=True)
    return [
        file
        for file in files_of(folder)
        if present.get(f"{path}/{file}", {}).get("size") != (folder / file).stat().st_size
    ]
