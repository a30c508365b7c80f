"""The folder of a window, from the raw trace to the finished capture: it is the only queue.

The name of a folder is its state, and each change of the state is one rename:

- `.NAME.partial`: in the training process, torch writes the trace. If that process is killed, the
  window is lost, and the next run removes the folder. A capture that is being removed has this name
  too.
- `.NAME.queued`: the trace is complete, and so is all that the training process knows for
  capture.json. If the exporter is killed, another exporter of the same run goes on with these.
- `.NAME.busy`: the exporter compresses the trace, runs the sinks, and completes capture.json. If it
  is killed, it leaves one such folder. No other exporter of the run takes it, because it may be the
  cause; `instrument export` does.
- `NAME`: the capture is complete.

What is still queued or busy when the run has ended, `instrument export` finishes. Hidden files in
the folder say what the names do not: why it is still queued (`.why`), which sinks have run
(`.sinks`), and for what the run still needs the capture (`.needed_for_…`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import msgspec

from instrument.base import file_lock, files
from instrument.base.errors import CaptureError
from instrument.base.files import METADATA_FILE
from instrument.base.log import logger

RAW, PACKED, SCALARS_FILE = "trace.json", "trace.json.gz", "scalars.json"
RAW_DETAIL = "detail.json"
# A queued window that is needed for this waits for its detail window, while its run lives.
DETAIL = "detail"
_PARTIAL, _QUEUED, _BUSY = ".partial", ".queued", ".busy"
_OWNER_FILE, _WHY_FILE, _SINKS_FILE, _NEEDED = "owner", ".why", ".sinks", ".needed_for_"
_LONGEST_WITHOUT_OWNER_S = 86_400
_RUN = re.compile(r"[0-9a-f]{32}")


def capture_name(phase: str, first: int, last: int | None, rank: int) -> str:
    """The name of a capture with the steps `first` to `last`; `last` is None for one step."""
    prefix = "" if phase == "train" else f"{phase}_"
    return f"{prefix}steps_{first:06d}-{first if last is None else last:06d}_rank{rank}"


def _names_on(rank: int) -> tuple[str, str]:
    """Globs for the names of captures of a rank, also those to which `publish` added a number."""
    return f"[!.]*_rank{rank}", f"[!.]*_rank{rank}-*"


class TakenError(CaptureError):
    """Another process finishes a window, or has finished it."""


def stage(output_dir: Path, name: str, run: str = "") -> Path:
    """Create the partial folder of a window; a number is added if the name is taken.

    `run` is the id of the run if the run holds its `FileLock`; otherwise it is empty.

    Raises:
        CaptureError: `output_dir` is a link to a folder that does not exist.
        OSError: a folder cannot be created.
    """
    for capture in _names(name):
        staging = output_dir / f".{capture}{_PARTIAL}"
        try:
            staging.mkdir()
        except FileExistsError:
            continue
        except FileNotFoundError as error:  # somebody has removed the folder for captures
            if output_dir.is_symlink():
                raise CaptureError(
                    f"The folder {output_dir} is a link to {output_dir.readlink()}, which does not "
                    "exist, so the window is lost: create that folder again."
                ) from error
            staging.mkdir(parents=True)
        # Checked in the order of the states, so that a rename between two checks is noticed.
        later = (f".{capture}{_QUEUED}", f".{capture}{_BUSY}", capture)
        if any(os.path.lexists(output_dir / each) for each in later):
            staging.rmdir()
            continue
        try:
            _write_new(staging / _OWNER_FILE, run)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return staging
    raise AssertionError("unreachable")


def _write_new(path: Path, text: str) -> None:
    """Create a new file in a partial folder. Not atomic, because nobody reads the folder yet."""
    with path.open("xb") as file:
        file.write(text.encode("utf-8", "replace"))


def _names(name: str) -> Iterator[str]:
    return chain([name], map("{}-{}".format, repeat(name), count(2)))


def describe(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write a folder's capture.json, or replace it."""
    files.write(folder / METADATA_FILE, _as_text(metadata))


def _as_text(metadata: Mapping[str, Any]) -> str:
    text = json.dumps(metadata, indent=2, default=repr)
    if "\\ud" in text:  # perhaps a lone surrogate, which JSON readers refuse
        text = json.dumps(files.encodable(json.loads(text)), indent=2)
    return text


def name_of(folder: Path) -> str:
    """The final name of a partial, queued or busy folder."""
    name = folder.name.removeprefix(".")
    for state in (_PARTIAL, _QUEUED, _BUSY):
        name = name.removesuffix(state)
    return name


def is_waiting(folder: Path) -> bool:
    """Whether a window that was queued is still queued or busy."""
    return files.exists(folder) or files.exists(busy_path(folder))


def is_queued(folder: Path) -> bool:
    """Whether a folder waits to be finished."""
    return folder.name.endswith(_QUEUED) and _is_saved(folder)


def _is_saved(folder: Path) -> bool:
    return files.is_folder(folder) and files.is_regular(folder / METADATA_FILE)


def queue(staging: Path, metadata: Mapping[str, Any]) -> Path:
    """Write the capture.json of a partial folder whose trace is complete, and queue the folder."""
    name = name_of(staging)
    folder = staging.with_name(f".{name}{_QUEUED}")
    _write_new(staging / METADATA_FILE, _as_text({**metadata, "name": name}))
    staging.rename(folder)
    with suppress(OSError):
        (folder / _OWNER_FILE).unlink()
    return folder


def queued_path(folder: Path) -> Path:
    """The path of a window's folder while the folder is queued."""
    return folder.with_name(f".{name_of(folder)}{_QUEUED}")


def busy_path(folder: Path) -> Path:
    """The path of a window's folder while a process finishes it."""
    return folder.with_name(f".{name_of(folder)}{_BUSY}")


def take(folder: Path) -> Path:
    """Rename a queued folder to a busy folder; only one process succeeds.

    Raises:
        TakenError: another process has taken or removed the folder.
    """
    try:
        return folder.rename(busy_path(folder))
    except FileNotFoundError:
        raise TakenError(f"Another process is finishing {folder}: wait until it is done.") from None


def put_back(folder: Path) -> Path:
    """Rename a busy folder to a queued folder."""
    return folder.rename(queued_path(folder))


def publish(folder: Path, metadata: dict[str, Any]) -> Path:
    """Rename a busy folder to its capture's name; a number is added if the name is taken."""
    for note in (_WHY_FILE, _SINKS_FILE):
        (folder / note).unlink(missing_ok=True)
    for name in _names(name_of(folder)):
        target = folder.with_name(name)
        if files.exists(target):
            continue
        if name != metadata.get("name"):
            describe(folder, metadata | {"name": name})
        try:
            return folder.rename(target)
        except OSError:
            if not files.exists(target):
                raise
    raise AssertionError("unreachable")


def remove(folder: Path) -> None:
    """Remove a capture; rename it first, so that no reader sees an incomplete capture."""
    with suppress(OSError):
        folder = folder.rename(folder.with_name(f".{folder.name}{_PARTIAL}"))
    shutil.rmtree(folder, ignore_errors=True)


def say_why(folder: Path, reason: str) -> None:
    """Note in a queued or busy folder why it is not finished, as far as the disk has room."""
    with suppress(OSError):
        files.write(folder / _WHY_FILE, reason)


def has_failed(folder: Path) -> bool:
    """Whether a process could not finish a queued or busy folder, as `say_why` has noted."""
    return files.exists(folder / _WHY_FILE)


def why(folder: Path) -> str:
    """Why a window is not finished yet, as a sentence."""
    with suppress(OSError):
        return files.read_bytes(folder / _WHY_FILE, most=10_000).decode("utf-8", "replace")
    alive = _lives(folder.parent, origin(folder).run)
    return (
        "Its run is alive, and exports it."
        if alive
        else "Its run has ended." + " It may be alive on another machine." * (alive is None)
    )


def note_sink(folder: Path, name: str) -> None:
    """Note in a busy folder that a sink has run: a process that goes on with it runs the others."""
    with files.open_to_append(folder / _SINKS_FILE) as file:
        file.write(f"{name}\n".encode("utf-8", "replace"))


def sinks_run(folder: Path) -> list[str]:
    """The names that `note_sink` has noted in a busy folder."""
    try:
        return files.read_bytes(folder / _SINKS_FILE).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def need(folder: Path, purpose: str) -> None:
    """Keep the capture of a folder, whatever `remove_oldest` is asked for, until `let_go`."""
    with suppress(OSError):
        (folder / f"{_NEEDED}{purpose}").touch()


def let_go(folder: Path, purpose: str) -> None:
    """Undo `need`."""
    with suppress(OSError):
        (folder / f"{_NEEDED}{purpose}").unlink()


def is_needed(folder: Path, purpose: str = "*") -> bool:
    """Whether the run still needs a capture for a purpose; by default, for any."""
    return any(folder.glob(f"{_NEEDED}{purpose}"))


def remove_oldest(captures: Sequence[Path], keep: int | None, budget: int | None) -> None:
    """Remove the oldest of a run's captures beyond `keep` captures or `budget` bytes.

    None means no limit. The newest capture always stays, and so do captures that are needed. Cost
    with a budget: about 0.04 ms for each capture, to list its files.
    """
    left = len(captures)
    sizes = {folder: files.folder_bytes(folder) for folder in captures if budget is not None}
    total_bytes = sum(sizes.values())
    for folder in captures[:-1]:
        too_many = keep is not None and left > keep
        if not too_many and (budget is None or total_bytes <= budget):
            break
        if not is_needed(folder):
            remove(folder)
            left -= 1
            total_bytes -= sizes.get(folder, 0)
            logger.info("Removed {}, because of profiler.keep or profiler.disk_budget", folder)


def queued(output_dir: Path, depth: int = 1) -> list[Path]:
    """The queued folders below `output_dir`, down to `depth` levels, oldest first; skips links."""
    return _found(output_dir, depth, _QUEUED)


def unfinished(output_dir: Path, depth: int = 1) -> list[Path]:
    """The queued and the busy folders below `output_dir`, found as `queued` finds folders."""
    return [*_found(output_dir, depth, _BUSY), *queued(output_dir, depth)]


def left_queued(output_dir: Path, depth: int = 1) -> list[Path]:
    """The queued folders of runs that have ended, or of which that cannot be known."""
    return _of_ended_runs(queued(output_dir, depth))


def left_busy(output_dir: Path, depth: int = 1) -> list[Path]:
    """The folders, found as by `queued`, that a process was finishing when it was killed.

    On a file system without locks, a process may still be finishing one of them.
    """
    return _of_ended_runs(_found(output_dir, depth, _BUSY))


def _of_ended_runs(found: Iterable[Path]) -> list[Path]:
    return [each for each in found if not _lives(each.parent, origin(each).run)]


def _found(output_dir: Path, depth: int, state: str) -> list[Path]:
    found = [
        folder
        for above in _folders(output_dir, depth)
        for folder in above.glob(f".*{state}")
        if _is_saved(folder)
    ]
    return sorted(found, key=_described_at)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth > 1:
        with suppress(OSError):
            for subfolder in folder.iterdir():
                if files.is_folder(subfolder):
                    yield from _folders(subfolder, depth - 1)


class Origin(msgspec.Struct, frozen=True):
    """Where a window comes from, according to its capture.json, which anybody may have written."""

    run: str = ""
    rank: int | None = None
    started_at: str = ""  # in ISO format


def origin(folder: Path) -> Origin:
    """The origin of a window; all fields have their defaults if capture.json cannot be read."""
    try:
        return msgspec.json.decode(files.read_bytes(folder / METADATA_FILE), type=Origin)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Origin()


def queued_of(
    output_dir: Path, run: str, rank: int, owner: int | None, *, is_over: bool = True
) -> list[Path]:
    """The queued folders of one rank of a run, oldest first.

    Folders of another `owner`, a user id, are left out: whoever may write into `output_dir` could
    otherwise make the run read files for him. None means any owner. Unless the run is over, those
    that wait for their detail window are left out too.
    """
    return [
        each
        for each in queued(output_dir)
        if _origin_on(each, rank, {run: owner}) is not None
        and (is_over or not is_needed(each, DETAIL))
    ]


def captures_of(
    output_dir: Path, rank: int, owners: Mapping[str, int | None]
) -> list[tuple[Origin, Path]]:
    """The origin and the folder of each finished capture of some runs on one rank, oldest first.

    `owners` has the id of each run, and the user id that owns its folders, as for `queued_of`.
    Cost: about 0.1 ms for each capture of this rank in `output_dir`.
    """
    found = {}
    for pattern in _names_on(rank):
        for folder in output_dir.glob(pattern):
            if (its := _origin_on(folder, rank, owners)) is not None:
                found[folder] = its
    ordered = sorted(found, key=lambda folder: (found[folder].started_at, folder))
    return [(found[folder], folder) for folder in ordered]


def _origin_on(folder: Path, rank: int, owners: Mapping[str, int | None]) -> Origin | None:
    """The origin of a window if it is of this rank and of one of the runs; otherwise None."""
    try:
        status = folder.lstat()
    except OSError:  # another process has just renamed or removed it
        return None
    its = origin(folder) if stat.S_ISDIR(status.st_mode) else Origin()
    is_ours = its.rank == rank and its.run in owners
    return its if is_ours and owners[its.run] in (None, status.st_uid) else None


def _described_at(folder: Path) -> int:
    try:
        return (folder / METADATA_FILE).stat().st_mtime_ns
    except OSError:  # the folder has just been finished
        return 0


def remove_stale(output_dir: Path) -> None:
    """Remove partial folders, partial files and lock files of ended runs.

    A warning names the queued windows of these runs.
    """
    for staging in output_dir.glob(f".*{_PARTIAL}"):
        with suppress(OSError):  # another process removes it too, or it belongs to another user
            if files.is_folder(staging) and _is_stale(staging):
                shutil.rmtree(staging)
    for half_written in output_dir.glob(".execution_trace_*.partial.json"):
        run = half_written.name.split("_")[2]
        with suppress(OSError):
            if _lives(output_dir, run) is False:
                half_written.unlink()
    left = [
        folder
        for folder in unfinished(output_dir)
        if _lives(output_dir, origin(folder).run) is False
    ]
    for path in output_dir.glob(".run-*.lock"):
        file_lock.remove_if_free(path)
    if left:
        logger.warning(
            "An earlier run recorded {} but has not finished them: `instrument export {}` does, "
            "with the default sinks.",
            ", ".join(map(name_of, left)),
            output_dir,
        )


def lock_of(folder: Path, run: str) -> Path:
    """The file whose lock a run holds: the trainer, and the exporter, which inherits the handle."""
    return folder / f".run-{run if _RUN.fullmatch(run) else ''}.lock"


def _lives(folder: Path, run: str) -> bool | None:
    """Whether a run lives; None if that cannot be known."""
    return file_lock.is_held(lock_of(folder, run)) if _RUN.fullmatch(run) else None


def _is_stale(staging: Path) -> bool:
    """Whether the run that wrote a partial folder has ended.

    On a file system without locks, a run counts as ended a day after the folder's last change.
    """
    try:
        run = files.read_bytes(staging / _OWNER_FILE, most=100).decode("ascii", "replace")
        alive = _lives(staging.parent, run)
    except FileNotFoundError:
        alive = None
    return (
        time.time() - staging.lstat().st_mtime > _LONGEST_WITHOUT_OWNER_S
        if alive is None
        else not alive
    )
