"""What a run has left undone, done later: `instrument export` without a sink, and with one on queued folders.

A capture describes itself and gives no orders, as anybody may have made it. What is to be done with it comes from the
command line, or from the run's own job in the user's state folder (see `instrument.worker.job`). Where there is
neither, it gets what ships and stays in its folder: the sinks `table` and `chrome_trace`, and where the recording has
what they need `stacks` and `memory`, with their defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instrument.analysis.views import METADATA_FILE
from instrument.capture import Capture
from instrument.config.instantiate import sink_of_class
from instrument.config.presets import shipped
from instrument.errors import CaptureError, ConfigError, InstrumentError, reason_of
from instrument.files import importable_here
from instrument.runs.run import DEPTH, captures_below
from instrument.worker import queue, upload
from instrument.worker.finish import built, ctrl_c_passes, finish, tell_sinks
from instrument.worker.job import recall

_DEFAULTS = ("table", "chrome_trace", "stacks", "memory")


def finish_all(path: Path | str, url: str | None) -> str:
    """Finish what is queued at a path or below it, and send what has not arrived; gives what was done, as sentences.

    Raises:
        CaptureError: there is no such folder, or something could not be done.
        ConfigError: the path is a URL.
    """
    if isinstance(path, str):
        raise ConfigError(
            f"{path} is a URL, where nothing waits for its export: add --sink NAME to run a sink on it."
        )
    folders = queued_at(path)
    if not path.exists():
        raise CaptureError(f"There is no folder {path}: give one that a run has recorded into.")
    finished, notes, errors = finish_queued(folders)
    whole = (
        []
        if path in folders
        else [path]
        if (path / METADATA_FILE).exists()
        else captures_below(path)
    )
    sent, not_sent, unsent = _send([*finished, *whole], url)
    if errors or unsent:
        count = len(folders) + len(sent) + len(unsent)
        reasons = "; ".join([*errors, *unsent])
        raise CaptureError(
            f"{len(errors) + len(unsent)} of {count} could not be finished. {reasons}"
        )
    if not folders and not sent:
        done = [
            f"Nothing waits for its export in {path}; to run a sink on captures, add --sink NAME."
        ]
        return "\n".join([*done, *not_sent])
    said = {"Finished": [str(place) for place in finished], "Sent": sent}
    done = [f"{what} {', '.join(places)}." for what, places in said.items() if places]
    return "\n".join([*done, *notes, *not_sent])


def queued_at(path: Path) -> list[Path]:
    """The queued folder at a path, or those in a folder and below it."""
    return [path] if queue.is_queued(path) else queue.queued(path, DEPTH)


class Outcome(NamedTuple):
    """The captures that were finished, and sentences: what is to be said of them, and what went wrong."""

    done: list[Path]
    notes: list[str]
    errors: list[str]


def finish_queued(folders: Iterable[Path], sinks: Mapping[str, Any] | None = None) -> Outcome:
    """Finish queued folders with these sinks; None: those of each one's own job, or else the defaults."""
    done, notes, errors = list[Path](), list[str](), list[str]()
    jobs: dict[
        str, dict[str, Any]
    ] = {}  # sinks, by the run: those of a job are built once and closed at the end
    failed: set[str] = set()
    for folder in folders:
        try:
            about = Capture.load(folder).metadata
            job = recall(folder.parent, about.get("run"))
            if sinks is not None:
                chosen: Mapping[str, Any] = sinks
            elif job is not None:
                if job.run not in jobs:
                    with importable_here():
                        jobs[job.run] = built(job.sinks, failed)
                chosen = jobs[job.run]
            else:
                chosen = _defaults(about.get("config", {}))
            with ctrl_c_passes():
                done.append(finish(folder, chosen, failed=failed))
            if sinks is None:
                notes += _left_out(done[-1], about, chosen)
        except (InstrumentError, OSError) as error:
            errors.append(f"{queue.name_of(folder)}: {reason_of(error)}")
    for built_sinks in jobs.values():
        tell_sinks(built_sinks, "close", failed)
    return Outcome(done, list(dict.fromkeys(notes)), errors)


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sinks that ship and write into the capture alone, but for those that need what was not recorded."""
    sinks = {name: sink_of_class(name, {}) for name in _DEFAULTS}
    return {
        name: sink
        for name, sink in sinks.items()
        if all(config.get(option) is True for option in sink.needs)
    }


def _left_out(place: Path, about: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    """The sinks that the capture names and that were not run, with the command that runs one."""
    config = about.get("config", {})
    inline = about.get("sinks_inline", [])
    wanted = [
        str(name) for name in config.get("sinks", {}) if name not in ran and name not in inline
    ]
    if not wanted:
        return []
    known = shipped("sinks")
    example = next((name for name in wanted if name in known), "package.module.Class")
    return [
        f"Not run, as only its run knows their options: {', '.join(wanted)}. `instrument export {place.parent} "
        f"--sink {example} KEY=VALUE` runs one."
    ]


def _send(captures: Iterable[Path], url: str | None) -> tuple[list[str], list[str], list[str]]:
    """Send finished captures to a URL, or where each one's own job says; gives the places there, notes and errors."""
    sent, notes, errors = list[str](), list[str](), list[str]()
    for folder in dict.fromkeys(captures):
        try:
            about = Capture.load(folder).metadata
        except CaptureError:  # no capture of ours
            continue
        job = recall(folder.parent, about.get("run")) if url is None else None
        target = url or (job.upload_to if job is not None else None)
        wanted = about.get("config", {}).get("upload_to")
        if target is None and wanted:
            notes.append(
                f"{folder.name} says that it was to go to {wanted}; add --upload-to URL to send it somewhere."
            )
        if target is None or upload.has_arrived(folder, target):
            continue
        try:
            sent.append(upload.send(folder, target, job.upload_options if job is not None else {}))
        except Exception as error:  # whatever the file system there raises
            errors.append(f"{folder.name}: {reason_of(error)}")
    return sent, notes, errors
