"""A window's folder on its way from the trainer to a finished capture.

It is called `.NAME.partial` while torch writes the trace, `.NAME.queued` once the trace and capture.json are whole, and
`NAME` when every sink has run: one rename each. These names are the whole state. Whoever lists captures sees whole
ones, and whatever ends a process in between leaves nothing, or a queued folder that `instrument export` finishes later.
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
from itertools import count
from pathlib import Path
from typing import Any

from loguru import logger

from instrument import files
from instrument.analysis.views import METADATA_FILE
from instrument.capture import Capture
from instrument.config.schema import ProfilerConfig
from instrument.errors import CaptureError, ConfigError, InstrumentError
from instrument.worker import run_lock
from instrument.worker.job import Job

RAW, PACKED = "trace.json", "trace.json.gz"
_PARTIAL, _QUEUED = ".partial", ".queued"
_OWNER_FILE = "owner"
_LONGEST_WITHOUT_OWNER_S = 86_400


def output_dir(config: ProfilerConfig) -> Path:
    """The folder for captures: the one given, or `profile/` in Hydra's run folder or the current one."""
    if config.output_dir is not None:
        try:
            return Path(config.output_dir).expanduser().absolute()
        except RuntimeError as error:  # no such user
            raise ConfigError(
                f"profiler.output_dir is {str(config.output_dir)!r}: {error}"
            ) from None
    hydra = hydra_run()
    return (
        Path("profile").absolute() if hydra is None else Path(hydra.runtime.output_dir) / "profile"
    )


def hydra_run() -> Any:
    """What Hydra says of the application that it runs: its folder, its overrides; None where it runs none."""
    module = sys.modules.get("hydra.core.hydra_config")  # where Hydra runs, it is loaded
    return (
        module.HydraConfig.get()
        if module is not None and module.HydraConfig.initialized()
        else None
    )


def writable(folder: Path) -> Path:
    """The folder, made where it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"profiler.output_dir is {str(folder)!r}, which cannot be written ({reason}): choose another folder."
        ) from error


def stage(output_dir: Path, name: str, run: str = "") -> Path:
    """A new partial folder, whose capture will have this name, with a number behind it where that is taken.

    `run` is the id of the run that writes into it and holds its lock; empty where there is no lock.

    Raises:
        CaptureError: the folder for captures is gone and cannot be made again.
        OSError: the folder cannot be made.
    """
    for capture in _names(name):
        staging = output_dir / f".{capture}{_PARTIAL}"
        try:
            staging.mkdir()
        except FileExistsError:
            continue
        except FileNotFoundError:
            _make_again(staging)
        # Asked in the order in which a folder changes its name: one on its way cannot slip by.
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
    """Write a file of a partial folder: nobody reads it before the folder has another name. No link is followed."""
    with path.open("xb") as file:
        file.write(text.encode("utf-8", "replace"))


def _names(name: str) -> Iterator[str]:
    """A name, and others to take where it is taken."""
    yield name
    yield from (f"{name}-{attempt}" for attempt in count(2))


def _make_again(staging: Path) -> None:
    """Make a partial folder with those above it, which somebody has removed."""
    above = staging.parent
    if above.is_symlink():
        raise CaptureError(
            f"The folder {above} is a link to {above.readlink()}, which is gone, so the window is lost: "
            "make that folder again."
        )
    staging.mkdir(parents=True)


def describe(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write a folder's capture.json, in place of the one that it has."""
    files.write(folder / METADATA_FILE, _as_text(metadata))


def _as_text(metadata: Mapping[str, Any]) -> str:
    text = json.dumps(metadata, indent=2, default=repr)
    if "\\ud" in text:  # perhaps half of a character, which no reader takes
        text = json.dumps(files.encodable(json.loads(text)), indent=2)
    return text


def name_of(folder: Path) -> str:
    """The name of the capture that a partial or queued folder becomes."""
    return folder.name.removeprefix(".").removesuffix(_PARTIAL).removesuffix(_QUEUED)


def is_queued(folder: Path) -> bool:
    """Whether a folder holds a whole trace whose sinks have not all run."""
    return (
        folder.name.endswith(_QUEUED)
        and files.is_folder(folder)
        and files.is_regular(folder / METADATA_FILE)
    )


def queue(staging: Path, metadata: Mapping[str, Any]) -> Path:
    """Say that the trace in a partial folder is whole; gives the queued folder."""
    name = name_of(staging)
    _write_new(staging / METADATA_FILE, _as_text({**metadata, "name": name}))
    folder = staging.rename(staging.with_name(f".{name}{_QUEUED}"))
    with suppress(OSError):
        (folder / _OWNER_FILE).unlink()
    return folder


def publish(folder: Path, metadata: dict[str, Any]) -> Path:
    """Give a queued folder its name, or where that is taken meanwhile a free one; renaming onto files fails."""
    for name in _names(name_of(folder)):
        place = folder.with_name(name)
        if files.exists(place):
            continue
        if name != metadata.get("name"):
            describe(folder, metadata | {"name": name})
        try:
            return folder.rename(place)
        except OSError:
            if not files.exists(place):
                raise
    raise AssertionError("unreachable")


def remove(folder: Path) -> None:
    """Remove a capture, so that nobody ever sees half of it."""
    with suppress(OSError):
        folder = folder.rename(folder.with_name(f".{folder.name}{_PARTIAL}"))
    shutil.rmtree(folder, ignore_errors=True)


def queued(output_dir: Path, depth: int = 1) -> list[Path]:
    """The queued folders in a folder for captures, or down to a depth below it, oldest first; none behind links."""
    found = [
        f
        for folder in _folders(output_dir, depth)
        for f in folder.glob(f".*{_QUEUED}")
        if is_queued(f)
    ]
    return sorted(found, key=_described_at)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """A folder and those below it, `depth` levels in all, without those behind links."""
    yield folder
    if depth > 1:
        with suppress(OSError):
            for inner in folder.iterdir():
                if files.is_folder(inner):
                    yield from _folders(inner, depth - 1)


def queued_of(job: Job) -> list[Path]:
    """The queued folders of a job's run and rank that its user owns, oldest first."""
    return [folder for folder in queued(Path(job.folder)) if is_queued_of(folder, job)]


def is_queued_of(folder: Path, job: Job) -> bool:
    """Whether a folder is queued, of a job's run and rank, and owned by its user."""
    if not is_queued(folder):
        return False
    try:
        if job.owner is not None and folder.lstat().st_uid != job.owner:
            return False
        about = Capture.load(folder).metadata
    except (OSError, InstrumentError):
        return False
    return (about.get("run"), about.get("rank")) == (job.run, job.rank)


def _described_at(folder: Path) -> int:
    try:
        return (folder / METADATA_FILE).stat().st_mtime_ns
    except OSError:  # finished meanwhile
        return 0


def tidy(output_dir: Path) -> None:
    """Remove what runs that have ended left half written, and say which windows they left queued."""
    for staging in output_dir.glob(f".*{_PARTIAL}"):
        with suppress(OSError):  # taken away by another that tidies, or somebody else's
            if files.is_folder(staging) and _is_left(staging):
                shutil.rmtree(staging)
    for half_written in output_dir.glob(".execution_trace_*.partial.json"):
        run = half_written.name.split("_")[2]
        with suppress(OSError):
            if run_lock.lives(output_dir, run) is False:
                half_written.unlink()
    left = []
    for folder in queued(output_dir):
        with suppress(CaptureError):
            writer = Capture.load(folder).metadata.get("run")
            if isinstance(writer, str) and run_lock.lives(output_dir, writer) is False:
                left.append(name_of(folder))
    for path in output_dir.glob(".run-*.lock"):
        run_lock.remove_if_free(path)
    if left:
        logger.warning(
            "An earlier run left {} recorded but without its tables: `instrument export {}` finishes that.",
            ", ".join(left),
            output_dir,
        )


def _is_left(staging: Path) -> bool:
    """Whether nobody writes into a partial folder any more; where no lock tells, it must be a day old."""
    try:
        run = files.read_bytes(staging / _OWNER_FILE, most=100).decode("ascii", "replace")
        alive = run_lock.lives(staging.parent, run)
    except FileNotFoundError:
        alive = None
    return (
        time.time() - staging.lstat().st_mtime > _LONGEST_WITHOUT_OWNER_S
        if alive is None
        else not alive
    )
