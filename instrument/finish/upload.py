"""Uploads finished captures, each into a folder below a URL; capture.json is uploaded last.

The folder is named after the capture and its run, such as `NAME-1f8a02c5`, so captures of different
runs do not meet. A capture counts as uploaded when the server lists all its files with the right
sizes; the file `upload.json` in the capture's own folder then records the URL. An interrupted
upload is resumed. Nothing is written into a remote folder that another capture's folder has begun,
and nothing at the URL is ever removed.

All files in a capture's folder are uploaded, except hidden files and links. Files that sinks write
elsewhere, such as those of `tensorboard` and `parquet`, are not uploaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from instrument.errors import CaptureError, reason_of
from instrument.files import METADATA_FILE, read_bytes, write
from instrument.finish import queue, waiting
from instrument.log import logger
from instrument.redact import without_secrets
from instrument.storage import NOTE_FILE, files_of, filesystem

# The pauses between the attempts to upload one capture, in seconds.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_RUN_DIGITS = 8


class Uploads:
    """Uploads captures one after the other on a separate thread.

    The upload of a capture is tried six times, with pauses. If all attempts fail, the capture
    counts as failed. If the bucket or a permission is missing, the capture counts as failed after
    one attempt, because only a change at the server can help. While a capture counts as failed, the
    upload of other captures is tried only once. Failed captures stay on disk, and are tried again
    after another capture has been uploaded. Only the first failure is logged.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        self._changed = Condition()
        self._pending: list[Path] = []
        self._failed: list[Path] = []
        self._thread: Thread | None = None
        self._failure_reported = self._closed = False

    def add(self, *folders: Path) -> None:
        """Queue finished captures. Nothing is uploaded if no thread can be started."""
        with self._changed:
            self._pending += folders
            self._changed.notify()
            if self._pending and self._thread is None:
                thread = Thread(target=self._work, name="instrument upload", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter shuts down
                    return
                self._thread = thread

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every capture is uploaded or has failed.

        With a timeout, log the progress, and wait at most `timeout_s` seconds.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is None:
            return
        if timeout_s is None:
            self._thread.join()
        else:
            waiting.wait_for(self._thread, self._left, timeout_s, timeout_s, "upload")

    def _left(self) -> list[str]:
        return [folder.name for folder in self._pending]

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
                    self._pending += self._failed
                    self._failed.clear()
                else:
                    self._failed.append(folder)

    def _send_with_retries(self, folder: Path) -> bool:
        """Upload one capture with retries; return whether the upload succeeded."""
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
                logger.debug(
                    "{} is not sent yet ({}); the next attempt is in {:g} s.",
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
    """Whether further attempts are useless after this error.

    True if the bucket or the permission is missing, if another capture is at the URL, or if the
    interpreter shuts down.
    """
    # fsspec's packages raise these for responses of the server
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return True
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


def send(folder: Path, url: str, options: Mapping[str, Any]) -> str:
    """Upload a finished capture, check that it arrived, and return the URL of its folder.

    Args:
        folder: the folder of the capture.
        url: the URL of the parent folder.
        options: fsspec's options for the URL.

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
    for files in ([each for each in missing if each != METADATA_FILE], [METADATA_FILE]):
        _put(fs, folder, path, [each for each in files if each in missing])
    if missing and (missing := _missing(fs, folder, path)):
        raise CaptureError(
            f"{len(missing)} of the capture's files did not arrive completely, such as {missing[0]}"
        )
    _note(folder, place, arrived=True)
    return place


def _place(folder: Path, url: str) -> str:
    """The URL of a capture below the URL of an upload."""
    run, base = queue.origin(folder).run[:_RUN_DIGITS], url.rstrip("/")
    above = f"{base}//" if base.endswith(":") else base  # the root, such as file:///
    return f"{above}/{folder.name}{f'-{run}' if run.isalnum() else ''}"


def has_arrived(folder: Path, url: str) -> bool:
    """Whether a finished capture was uploaded to a folder at this URL."""
    return _places(folder).get(_place(folder, url)) is True


def _places(folder: Path) -> dict[str, bool]:
    """The remote folders that a capture's folder may write to; true if all files have arrived.

    They stand in `upload.json`, with the inode of the capture's folder. The file is valid only if
    the folder has this inode, so a copied or downloaded `upload.json` is ignored. Otherwise a
    capture that you downloaded from somebody, and then uploaded, could overwrite a capture of yours
    at the URL.
    """
    try:
        note = json.loads(read_bytes(folder / NOTE_FILE))
        return dict(note["places"]) if note["inode"] == folder.stat().st_ino else {}
    except (OSError, ValueError, TypeError, KeyError):
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
