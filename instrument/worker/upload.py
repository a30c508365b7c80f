"""Uploads finished captures, each into the folder URL/NAME; capture.json is uploaded last.

An upload first claims the remote folder: it writes a file `upload.json` with a token (a random id)
there. The local capture stores the same token. If another capture has claimed the remote folder, or
if the remote folder holds other files, the upload goes to NAME-2. A capture counts as uploaded when
the server lists all its files with the right sizes. If the server's ETags are MD5 sums, these sums
must be right too. The local `upload.json` then records the URL. An interrupted upload is resumed.

All files in a capture's folder are uploaded, except hidden files and links. Files that sinks write
elsewhere, such as those of `tensorboard` and `parquet`, are not uploaded. Nothing at the URL is
ever removed.
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
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from pydantic import Field, PrivateAttr

from instrument.errors import CaptureError, reason_of
from instrument.files import read_bytes, write
from instrument.log import logger
from instrument.redact import without_secrets
from instrument.sinks import Sink
from instrument.storage import NOTE_FILE, files_of, filesystem
from instrument.worker import waiting

if TYPE_CHECKING:
    from instrument.capture import Capture

# The pauses between the attempts to upload one capture, in seconds.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_MOST_PENDING = 64
# The upload's name in the dict of sinks; no sink of the user can have this name.
SINK_NAME = "profiler.upload_to"


class Upload(Sink):
    """Uploads captures one after the other on a separate thread; runs after all other sinks.

    The upload of a capture is tried six times, with pauses. If all attempts fail, the capture
    counts as failed. If the bucket or a permission is missing, the capture counts as failed after
    one attempt, because only a change at the server can help. While a capture counts as failed, the
    upload of other captures is tried only once. Failed captures stay on disk, and are tried again
    after another capture has been uploaded. Only the first failure is logged.
    """

    needs_final_folder: ClassVar[bool] = True

    url: str
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    on_change: Callable[[list[Path]], Any] = Field(default=lambda _: None, repr=False)
    """Called with the list of captures that are queued or being uploaded, when the list changes."""

    _changed: Condition = PrivateAttr(default_factory=Condition)
    _pending: list[Path] = PrivateAttr(default_factory=list)
    _failed: list[Path] = PrivateAttr(default_factory=list)
    _thread: Thread | None = PrivateAttr(None)
    _failure_reported: bool = PrivateAttr(False)
    _closed: bool = PrivateAttr(False)

    def write(self, capture: Capture, folder: Path) -> None:  # noqa: ARG002
        """Queue a finished capture for upload."""
        self.submit(folder)

    def submit(self, *folders: Path) -> None:
        """Queue finished captures; if the queue is full, further captures count as failed."""
        with self._changed:
            for folder in folders:
                is_full = len(self._pending) >= _MOST_PENDING
                (self._failed if is_full else self._pending).append(folder)
            try:
                if self._thread is None:
                    self._thread = Thread(target=self._work, name="instrument upload", daemon=True)
                    self._thread.start()
            except RuntimeError:  # no thread can be started: the interpreter shuts down
                self._thread = None
                self._pending.clear()
            self.on_change(self._pending)
            self._changed.notify_all()

    def busy_with(self, folder: Path) -> bool:
        """Whether the capture is queued or is being uploaded; False once the upload has failed."""
        return folder in self._pending

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every capture is uploaded or has failed.

        With a timeout, log the progress, and wait at most `timeout_s` seconds.
        """
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
                    self._pending += self._failed
                    self._failed.clear()
                else:
                    self._failed.append(folder)
                self.on_change(self._pending)
                self._changed.notify_all()

    def _send_with_retries(self, folder: Path) -> bool:
        """Upload one capture with retries; return whether the upload succeeded."""
        pauses = iter(() if self._failed else _PAUSES_S)
        while True:
            try:
                logger.info("Sent {} to {}", folder.name, send(folder, self.url, self.options))
            except Exception as error:  # file systems raise anything
                reason = without_secrets(reason_of(error), self.options)
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
                self.url,
                reason.rstrip("."),
                folder.parent,
                self.url,
            )


def _is_final(error: Exception) -> bool:
    """Whether further attempts are useless after this error.

    True if the bucket or the permission is missing, or if the interpreter shuts down.
    """
    # fsspec's packages raise these for responses of the server
    if isinstance(error, FileNotFoundError | PermissionError):
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
        Exception: any exception that fsspec's package for the URL raises.
    """
    fs, base = filesystem(url, options)
    token = _note(folder).get("token") or uuid4().hex
    _keep_note(folder, {"token": token})
    names = (folder.name if number == 1 else f"{folder.name}-{number}" for number in count(1))
    name = next(name for name in names if _claim_folder(fs, f"{base}/{name}", token))
    missing = _missing(fs, folder, f"{base}/{name}", token)
    for file in missing:
        _put(fs, folder / file, f"{base}/{name}/{file}")
    missing = missing and _missing(fs, folder, f"{base}/{name}", token)
    if missing:
        raise CaptureError(
            f"{len(missing)} of the capture's files did not arrive completely, such as {missing[0]}"
        )
    place = f"{url.rstrip('/')}/{name}"
    _keep_note(folder, {"token": token, "sent_to": place})
    return place


def has_arrived(folder: Path, url: str) -> bool:
    """Whether a finished capture was uploaded below this URL."""
    return str(_note(folder).get("sent_to")).startswith(f"{url.rstrip('/')}/")


def _note(folder: Path) -> dict[str, Any]:
    """The content of a capture's `upload.json`; empty if there is no valid file.

    The keys:

    - `token`: a random id. `send` uploads a capture only into a remote folder that holds the same
      token.
    - `inode`: the inode of the capture's folder when the file was written.
    - `sent_to`: the URL of the uploaded capture; missing until the upload is complete.

    The file is valid only if the folder has this inode, so a copied or downloaded `upload.json` is
    ignored. Without this check, an attacker could put the token of your uploaded capture into the
    `upload.json` of another capture. If you downloaded the other capture and uploaded it to the
    same URL, it could overwrite your capture there.
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


def _claim_folder(fs: Any, path: str, token: str) -> bool:
    """Claim a remote folder unless it is in use.

    Returns whether the folder is now claimed with `token`.
    """
    claim = f"{path}/{NOTE_FILE}"
    present = fs.find(path)
    if present and claim not in present:  # the folder holds other files
        return False
    if not present:
        _make_folder(fs, path)
        try:
            fs.pipe_file(claim, _claim(token), mode="create")
        # another upload has claimed the folder, or our own claim got no response
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno != errno.ENOSYS:  # S3 servers without conditional writes
                raise
            fs.pipe_file(claim, _claim(token))
    fs.invalidate_cache()
    own = _claim(token)
    return fs.info(claim)["size"] == len(own) and bool(fs.cat_file(claim) == own)


def _make_folder(fs: Any, path: str) -> None:
    if not fs.async_impl:  # object stores have no folders: this call might create a bucket there
        fs.makedirs(path, exist_ok=True)


def _put(fs: Any, file: Path, path: str) -> None:
    _make_folder(fs, path.rpartition("/")[0])
    fs.put_file(str(file), path)


def _missing(fs: Any, folder: Path, path: str, token: str) -> list[str]:
    """The files of the capture that have not arrived completely, in the order of upload."""
    fs.invalidate_cache()
    present = fs.find(path, detail=True)
    etags_are_md5 = _etag(present.get(f"{path}/{NOTE_FILE}", {})) == _md5([_claim(token)])
    return [
        file
        for file in files_of(folder)
        if not _is_complete(folder / file, present.get(f"{path}/{file}"), etags_are_md5)
    ]


def _is_complete(file: Path, remote: Mapping[str, Any] | None, etags_are_md5: bool) -> bool:
    if remote is None or remote["size"] != file.stat().st_size:
        return False
    etag = _etag(remote)
    if not etags_are_md5 or "-" in etag:  # the ETag of a multipart upload is no MD5
        return True
    with file.open("rb") as content:
        return etag == _md5(iter(lambda: content.read(1 << 20), b""))


def _etag(remote: Mapping[str, Any]) -> str:
    return str(remote.get("ETag", "")).strip('"')


def _md5(parts: Iterable[bytes]) -> str:
    total = hashlib.md5(usedforsecurity=False)
    for part in parts:
        total.update(part)
    return total.hexdigest()
