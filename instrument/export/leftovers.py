"""Finishes the windows that ended runs have left queued or busy, and uploads captures.

The sinks and the URL come from the command line, never from the capture, because anybody may have
made the capture. Without sinks, the default sinks run with their default options, except those that
need data that was not recorded. They write only into the capture's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from instrument.base import queue
from instrument.base.errors import CaptureError, ConfigError, InstrumentError, reason_of
from instrument.base.file_lock import FileLock, is_held
from instrument.base.files import METADATA_FILE
from instrument.base.instantiate import sink_of_class
from instrument.base.presets import shipped
from instrument.base.signals import interruptibly
from instrument.export import upload
from instrument.export.window import finish
from instrument.read.capture import Capture
from instrument.read.views.find_captures import DEPTH, captures_below

_DEFAULTS = ("table", "chrome_trace", "stacks", "memory")


def finish_all(path: Path | str, url: str | None) -> list[str]:
    """Turn queued folders at or below a path into captures, upload captures, and return sentences.

    Nothing is uploaded if `url` is None.

    Raises:
        CaptureError: the folder does not exist, or a capture could not be finished or uploaded.
        ConfigError: the path is a URL.
    """
    if isinstance(path, str):
        raise ConfigError(
            f"{path} is a URL, but only local folders can be finished: add --sink NAME to run a "
            "sink on the captures at the URL."
        )
    if not path.exists():
        raise CaptureError(
            f"There is no folder {path}: give the folder that a run has recorded into."
        )
    folders = queued_at(path)
    finished, notes, errors = finish_queued(folders)
    captures: Iterable[Path] = []
    if path not in folders:
        captures = [path] if (path / METADATA_FILE).exists() else captures_below(path)
    sent, not_sent, unsent = _send([*finished, *captures], url)
    if errors or unsent:
        count = len(folders) + len(sent) + len(unsent)
        reasons = "; ".join([*errors, *unsent])
        raise CaptureError(
            f"{len(errors) + len(unsent)} of {count} captures could not be finished or sent. "
            f"{reasons}"
        )
    if alive := queue.unfinished(path, DEPTH):
        names = ", ".join(map(queue.name_of, alive))
        notes.append(f"A run that is alive still finishes {names}.")
    if not folders and not sent:
        done = [
            f"No capture in {path} waits for export; to run a sink on captures, add --sink NAME."
        ]
        return [*done, *notes, *not_sent]
    paths = {"Finished": [str(folder) for folder in finished], "Sent": sent}
    done = [f"{what} {', '.join(each)}." for what, each in paths.items() if each]
    return [*done, *notes, *not_sent]


def queued_at(path: Path) -> list[Path]:
    """The queued folder at a path, or those below the path that ended runs have left.

    Folders that a killed process has left busy are queued again.
    """
    if queue.is_queued(path):
        return [path]
    for folder in queue.left_busy(path, DEPTH):
        with suppress(OSError):
            queue.put_back(folder)
    return queue.left_queued(path, DEPTH)


class Outcome(NamedTuple):
    """The folders of the finished captures, sentences about them, and sentences about failures."""

    done: list[Path]
    notes: list[str]
    errors: list[str]


def finish_queued(folders: Iterable[Path], sinks: Mapping[str, Any] | None = None) -> Outcome:
    """Turn queued folders into captures, and run `sinks`, or else the default sinks, on them."""
    done, notes, errors = list[Path](), list[str](), list[str]()
    failed: set[str] = set()
    for folder in folders:
        try:
            about = Capture.load(folder).metadata
            chosen = _defaults(about.get("config", {})) if sinks is None else sinks
            lock = FileLock(queue.lock_of(folder.parent, str(about.get("run"))))
            is_ours = lock.hold()  # so that no other process takes the folder for a leftover
            if not is_ours and is_held(lock.path):
                raise CaptureError("the run that recorded it is alive, or is being exported")
            try:
                done.append(interruptibly(finish, folder, chosen, failed=failed))
            finally:
                if is_ours:
                    lock.release(done=True)
            if sinks is None:
                notes += _left_out(done[-1], about, Capture.load(done[-1]).about.sinks_run)
        except (InstrumentError, OSError) as error:
            errors.append(f"{queue.name_of(folder)}: {reason_of(error)}")
    return Outcome(done, list(dict.fromkeys(notes)), errors)


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    sinks = {name: sink_of_class(name, {}) for name in _DEFAULTS}
    return {
        name: sink
        for name, sink in sinks.items()
        if all(config.get(option) is True for option in sink.needs)
    }


def _left_out(folder: Path, about: Mapping[str, Any], ran: Sequence[str]) -> list[str]:
    """A list with a sentence about the sinks that did not run; an empty list if all have run."""
    wanted = [str(name) for name in about.get("config", {}).get("sinks", {}) if name not in ran]
    if not wanted:
        return []
    known = shipped("sinks")
    example = next((name for name in wanted if name in known), "package.module.Class")
    return [
        "These sinks did not run, because only the training run knows their options: "
        f"{', '.join(wanted)}. "
        f"`instrument export {folder.parent} --sink {example} KEY=VALUE` runs one of them."
    ]


def _send(captures: Iterable[Path], url: str | None) -> tuple[list[str], list[str], list[str]]:
    """Upload captures; return their URLs, sentences about URLs not trusted, and about errors."""
    sent, notes, errors = list[str](), list[str](), list[str]()
    for folder in dict.fromkeys(captures):
        try:
            about = Capture.load(folder).metadata
        except CaptureError:  # the folder is not a capture of instrument
            continue
        wanted = about.get("config", {}).get("upload_to")
        if url is None and wanted and not upload.has_arrived(folder, wanted):
            notes.append(
                f"{folder.name} was recorded with upload_to={wanted}, but a URL in a capture is "
                "not trusted: add --upload-to URL to upload the capture."
            )
        if url is None or upload.has_arrived(folder, url):
            continue
        try:
            sent.append(upload.send(folder, url, {}))
        except Exception as error:  # file systems raise anything
            errors.append(f"{folder.name}: {reason_of(error)}")
    return sent, notes, errors
