"""Manages the folder of each window, from the raw trace to the finished capture.

A folder's name shows its state:

- `.NAME.partial`: torch writes the trace.
- `.NAME.queued`: the trace and capture.json are complete.
- `NAME`: the sinks have run, except the sinks that need the final name.

Each change of the state is one rename. So every folder without a leading dot is a complete capture.
If a process is killed, `instrument export` finishes the queued folders that the process leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument import file_lock, files
from instrument.errors import CaptureError, ConfigError, InstrumentError
from instrument.log import logger
from instrument.trace import capture_json
from instrument.trace.capture_json import METADATA_FILE
from instrument.worker.job import Job

if TYPE_CHECKING:
    # Only for type checks: at run time it would take a third of this module's import time.
    from instrument.config.schema import ProfilerConfig

RAW, PACKED = "trace.json", "trace.json.gz"
_PARTIAL, _QUEUED = ".partial", ".queued"
_OWNER_FILE = "owner"
_LONGEST_WITHOUT_OWNER_S = 86_400


def output_dir(config: ProfilerConfig) -> Path:
    """The folder for captures.

    The environment variable `INSTRUMENT_DIR`, if it is set, replaces `profiler.output_dir`. The
    default is the folder `profile` in Hydra's run folder, or in the current folder without Hydra.
    """
    given = os.environ.get(files.CAPTURES_VARIABLE) or config.output_dir
    if given is not None:
        try:
            return Path(given).expanduser().absolute()
        except RuntimeError as error:  # an unknown user after ~
            raise ConfigError(f"{_folder_option()} is {str(given)!r}: {error}") from None
    hydra = hydra_run()
    return (
        Path("profile").absolute() if hydra is None else Path(hydra.runtime.output_dir) / "profile"
    )


def _folder_option() -> str:
    """For error messages: the name of the variable or option that sets the folder for captures."""
    variable = files.CAPTURES_VARIABLE
    return (
        f"The environment variable {variable}" if variable in os.environ else "profiler.output_dir"
    )


def hydra_run() -> Any:
    """The `HydraConfig` of the running application; it holds the application's output folder.

    None if the application does not use Hydra.
    """
    module = sys.modules.get("hydra.core.hydra_config")  # loaded if Hydra runs
    return (
        module.HydraConfig.get()
        if module is not None and module.HydraConfig.initialized()
        else None
    )


def writable(folder: Path) -> Path:
    """Return the folder; create it if it is missing, and check that files can be written to it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"{_folder_option()} is {str(folder)!r}, which cannot be written ({reason}): choose "
            "another folder."
        ) from None


def stage(output_dir: Path, name: str, run: str = "") -> Path:
    """Create the partial folder of a window.

    Args:
        output_dir: the folder for captures.
        name: the name of the capture; a number is added if the name is taken.
        run: the id of the run if the run holds its `FileLock`; otherwise empty.

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
        except FileNotFoundError:
            _make_again(staging)
        # Checked in the order of the states, so that a rename between two checks is noticed.
        if os.path.lexists(output_dir / f".{capture}{_QUEUED}") or os.path.lexists(
            output_dir / capture
        ):
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
    """Yield the names NAME, NAME-2, NAME-3 and so on."""
    return chain([name], map("{}-{}".format, repeat(name), count(2)))


def _make_again(staging: Path) -> None:
    """Create the partial folder `staging`. Its parent, the folder for captures, is created too.

    The folder for captures existed earlier in the run, but somebody has removed it.

    Raises:
        CaptureError: the folder for captures is a link to a folder that does not exist.
        OSError: a folder cannot be created.
    """
    above = staging.parent
    if above.is_symlink():
        raise CaptureError(
            f"The folder {above} is a link to {above.readlink()}, which does not exist, so the "
            "window is lost: create that folder again."
        )
    staging.mkdir(parents=True)


def describe(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write a folder's capture.json, and replace an existing capture.json."""
    files.write(folder / METADATA_FILE, _as_text(metadata))


def _as_text(metadata: Mapping[str, Any]) -> str:
    text = json.dumps(metadata, indent=2, default=repr)
    if "\\ud" in text:  # perhaps a lone surrogate, which JSON readers refuse
        text = json.dumps(files.encodable(json.loads(text)), indent=2)
    return text


def name_of(folder: Path) -> str:
    """The final name of a partial or queued folder."""
    return folder.name.removeprefix(".").removesuffix(_PARTIAL).removesuffix(_QUEUED)


def is_queued(folder: Path) -> bool:
    """Whether a folder is queued: its trace is complete, and it has no final name yet."""
    return (
        folder.name.endswith(_QUEUED)
        and files.is_folder(folder)
        and files.is_regular(folder / METADATA_FILE)
    )


def queue(staging: Path, metadata: Mapping[str, Any]) -> Path:
    """Queue the folder of a window whose trace is complete, and return the new path.

    Write capture.json, and rename the folder from `.NAME.partial` to `.NAME.queued`.
    """
    name = name_of(staging)
    _write_new(staging / METADATA_FILE, _as_text({**metadata, "name": name}))
    folder = staging.rename(staging.with_name(f".{name}{_QUEUED}"))
    with suppress(OSError):
        (folder / _OWNER_FILE).unlink()
    return folder


def publish(folder: Path, metadata: dict[str, Any]) -> Path:
    """Rename a queued folder to its capture's name; return the new path.

    If the name is taken, a number is added.
    """
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


def queued(output_dir: Path, depth: int = 1) -> list[Path]:
    """The queued folders below `output_dir`, down to `depth` levels, oldest first; skips links."""
    found = [
        f
        for folder in _folders(output_dir, depth)
        for f in folder.glob(f".*{_QUEUED}")
        if is_queued(f)
    ]
    return sorted(found, key=_described_at)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """A folder and its subfolders, down to `depth` levels; links are skipped."""
    yield folder
    if depth > 1:
        with suppress(OSError):
            for subfolder in folder.iterdir():
                if files.is_folder(subfolder):
                    yield from _folders(subfolder, depth - 1)


def queued_of(job: Job) -> list[Path]:
    """The queued folders that belong to a job, oldest first.

    A job is the settings of a worker process. A folder belongs to it if both have the same run, the
    same rank and the same owner (a user id).
    """
    return [folder for folder in queued(Path(job.folder)) if _is_of(folder, job)]


def _is_of(folder: Path, job: Job) -> bool:
    """Whether a queued folder belongs to a job (the settings of a worker process).

    Both must have the same run, the same rank and the same owner (a user id).
    """
    try:
        if job.owner is not None and folder.lstat().st_uid != job.owner:
            return False
        about = capture_json.read(folder)
    except (OSError, InstrumentError):
        return False
    return (about.get("run"), about.get("rank")) == (job.run, job.rank)


def _described_at(folder: Path) -> int:
    try:
        return (folder / METADATA_FILE).stat().st_mtime_ns
    except OSError:  # the folder has just been finished
        return 0


def remove_stale(output_dir: Path) -> None:
    """Remove partial folders, partial files and lock files of ended runs.

    Also warn about the queued windows of these runs.
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
    left = []
    for folder in queued(output_dir):
        with suppress(CaptureError):
            writer = capture_json.read(folder).get("run")
            if isinstance(writer, str) and _lives(output_dir, writer) is False:
                left.append(name_of(folder))
    for path in output_dir.glob(".run-*.lock"):
        file_lock.remove_if_free(path)
    if left:
        logger.warning(
            "An earlier run recorded {} but has not finished them: `instrument export {}` does, "
            "with the default sinks.",
            ", ".join(left),
            output_dir,
        )


def lock_of(folder: Path, run: str) -> Path:
    """The file whose lock a run holds: the trainer, and the worker, which inherits the handle."""
    return folder / f".run-{run}.lock"


def _lives(folder: Path, run: str) -> bool | None:
    return file_lock.is_held(lock_of(folder, run)) if run else None


def _is_stale(staging: Path) -> bool:
    """Whether the run that wrote a partial folder has ended.

    On a file system without locks, the run counts as ended if the folder is older than a day.
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
