"""A window's folder, from the raw trace to the finished capture.

It is called `.NAME.partial` while torch writes the trace, `.NAME.queued` once the trace and capture.json are whole, and
`NAME` when every sink has run: one rename each. Whoever lists captures sees whole ones, and whatever ends a process in
between leaves nothing, or a queued folder that `instrument export` finishes later.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from traceback import format_exception
from typing import Any, Literal

from loguru import logger

from instrument.capture import METADATA_FILE, Capture
from instrument.capture import rank as of_rank
from instrument.capture.cache import path_of
from instrument.config import ProfilerConfig
from instrument.errors import CaptureError, ConfigError, InstrumentError
from instrument.files import replacing
from instrument.sinks import Sink
from instrument.sinks.chrome_trace import rewrite
from instrument.sinks.scalars import scalars
from instrument.targets import rebuilt_sink

RAW, PACKED = "trace.json", "trace.json.gz"
_PARTIAL, _QUEUED = ".partial", ".queued"
_OWNER_FILE = "owner"
_LOCK_FILE = ".lock"
_LONGEST_WITHOUT_OWNER_S = 86_400


def output_dir(config: ProfilerConfig) -> Path:
    """The folder for captures: the one given, or `profile/` in Hydra's run folder or the current one."""
    if config.output_dir is not None:
        try:
            return Path(config.output_dir).expanduser().absolute()
        except RuntimeError as error:  # no such user
            raise ConfigError(f"profiler.output_dir is {str(config.output_dir)!r}: {error}") from None
    hydra = hydra_run()
    return Path("profile").absolute() if hydra is None else Path(hydra.runtime.output_dir) / "profile"


def hydra_run() -> Any:
    """What Hydra says of the application that it runs: its folder, its overrides; None where it runs none."""
    module = sys.modules.get("hydra.core.hydra_config")  # where Hydra runs, it is loaded
    return module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None


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


def stage(output_dir: Path, name: str) -> Path:
    """A new partial folder, whose capture will have this name, with a number behind it where that is taken."""
    for attempt in count(1):
        staging = output_dir / f".{name if attempt == 1 else f'{name}-{attempt}'}{_PARTIAL}"
        try:
            staging.mkdir(parents=True)
        except FileExistsError:
            continue
        # Asked in the order in which a folder changes its name: one on its way cannot slip by.
        if staging.with_suffix(_QUEUED).exists() or (output_dir / name_of(staging)).exists():
            staging.rmdir()
            continue
        try:
            (staging / _OWNER_FILE).write_text(f"{socket.gethostname()} {os.getpid()}")
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return staging
    raise AssertionError("unreachable")


def name_of(folder: Path) -> str:
    """The name of the capture that a partial or queued folder becomes."""
    return folder.name.removeprefix(".").removesuffix(_PARTIAL).removesuffix(_QUEUED)


def is_queued(folder: Path) -> bool:
    """Whether a folder holds a whole trace whose sinks have not all run."""
    return folder.name.endswith(_QUEUED) and (folder / METADATA_FILE).exists()


def queue(staging: Path, metadata: Mapping[str, Any]) -> Path:
    """Say that the trace in a partial folder is whole; gives the queued folder."""
    _describe(staging, {**metadata, "name": name_of(staging)})
    folder = staging.rename(staging.with_suffix(_QUEUED))
    with suppress(OSError):
        (folder / _OWNER_FILE).unlink()
    return folder


def remove(folder: Path) -> None:
    """Remove a capture, so that nobody ever sees half of it."""
    with suppress(OSError):
        folder = folder.rename(folder.with_name(f".{folder.name}{_PARTIAL}"))
    shutil.rmtree(folder, ignore_errors=True)


def finish(folder: Path, sinks: Mapping[str, Any] | None = None, *, failed: set[str]) -> Path:
    """Compress a queued folder's trace, write its summary, run the sinks on it, and give it its name.

    Without `sinks`, those that its metadata names are built anew. `failed` are the sinks that have failed before in
    this run, which is said once; they are added to it.

    Raises:
        CaptureError: another process is at it.
        OSError: the trace cannot be compressed, for one because the disk is full; the folder stays queued.
    """
    with _alone(folder):
        began = time.perf_counter_ns()
        for half_written in folder.glob(".*.tmp"):  # by one that was killed at it
            half_written.unlink()
        raw = folder / RAW
        if raw.exists():
            # put in here and not by torch, whose export turns backslashes into slashes and the trace into no JSON
            rewrite(raw, folder / PACKED, Capture.load(folder).metadata.get("user_metadata", {}))
            raw.unlink()
            path_of(raw).unlink(missing_ok=True)
        capture, given = Capture.load(folder), sinks
        sinks = sinks_of(capture.metadata, failed) if given is None else given
        cost = capture.metadata.setdefault("cost", {})
        cost["packed_bytes"] = (folder / PACKED).stat().st_size
        _summarize(capture, folder, failed)
        for name, sink in sorted(sinks.items(), key=lambda item: bool(getattr(item[1], "last", False))):
            cost["export_ns"] = time.perf_counter_ns() - began  # until now
            run_sink(name, sink, capture, failed)
        if given is None:
            tell_sinks(sinks, "close", failed)
        cost["export_ns"] = time.perf_counter_ns() - began
        with suppress(InstrumentError):
            if capture.metadata.get("sinks_inline"):  # training would feel it if they read a large trace for these
                capture.metadata["scalars"] = dict(scalars(capture))
        _describe(folder, capture.metadata)
        (folder / _LOCK_FILE).unlink(missing_ok=True)
        return _published(folder, capture.metadata)


def _summarize(capture: Capture, folder: Path, failed: set[str]) -> None:
    """Write what a table of all ranks needs of this one; that it failed is said once, and it is made when needed."""
    try:
        of_rank.write(capture, folder)
    except Exception as error:  # the trace is there, or the sinks that need it say what is wrong
        if of_rank.SUMMARY_FILE not in failed:
            failed.add(of_rank.SUMMARY_FILE)
            logger.warning("{} gets no {} ({}).", name_of(folder), of_rank.SUMMARY_FILE, str(error).rstrip("."))


def run_sink(name: str, sink: Any, capture: Capture, failed: set[str]) -> None:
    """Let one sink write into the capture's folder; what it raises is logged, once for each sink in `failed`."""
    folder = capture.folder or Path()
    try:
        sink.write(capture, folder)
    except (Exception, SystemExit) as error:  # a sink may fail in any way; training and the other sinks go on
        if name in failed:
            return
        failed.add(name)
        # one of our own sentences says it all, anything else needs its traceback; loguru's would show every variable
        where = "" if isinstance(error, InstrumentError) else f"\n{traceback_of(error)}"
        logger.error(
            "The {} sink failed on {}: {}. The trace is kept in {}, and further failures of this sink are not told.{}",
            name,
            name_of(folder),
            str(error).rstrip("."),
            folder.with_name(name_of(folder)),
            where,
        )


def tell_sinks(sinks: Mapping[str, Any], what: Literal["notice", "hurry", "close"], failed: set[str]) -> None:
    """Call one of the methods that sinks have besides `write`; what it raises is logged, once for each in `failed`."""
    for name, sink in sinks.items():
        try:
            if isinstance(sink, Sink):  # another's `close` may mean anything
                getattr(sink, what)()
        except (Exception, SystemExit) as error:
            if f"{name}.{what}" not in failed:
                failed.add(f"{name}.{what}")
                where = "" if isinstance(error, InstrumentError) else f"\n{traceback_of(error)}"
                logger.error("The {} sink failed in {}(): {}{}", name, what, str(error).rstrip("."), where)


def traceback_of(error: BaseException) -> str:
    """An exception with its traceback, as Python prints it."""
    return "".join(format_exception(error)).rstrip()


def sinks_of(metadata: Mapping[str, Any], failed: set[str]) -> dict[str, Any]:
    """The sinks that a capture's metadata names, built anew; without those that ran where it was recorded.

    One that cannot be built is logged, and added to `failed`.
    """
    sinks = {}
    for name, described in metadata.get("config", {}).get("sinks", {}).items():
        if name in metadata.get("sinks_inline", ()):
            continue
        try:
            sinks[name] = rebuilt_sink(described)
        except Exception as error:
            if name not in failed:
                failed.add(name)
                logger.error("The {} sink cannot be built where captures are finished: {}", name, error)
    return sinks


def queued(output_dir: Path, depth: int = 1) -> list[Path]:
    """The queued folders in a folder for captures, or down to a depth below it, oldest first."""
    found = [f for level in range(depth) for f in output_dir.glob("*/" * level + f".*{_QUEUED}") if is_queued(f)]
    return sorted(found, key=_described_at)


def _described_at(folder: Path) -> int:
    try:
        return (folder / METADATA_FILE).stat().st_mtime_ns
    except OSError:  # finished meanwhile
        return 0


def tidy(output_dir: Path) -> None:
    """Remove what processes that have ended left half written, and say which windows they left queued."""
    for staging in output_dir.glob(f".*{_PARTIAL}"):
        with suppress(OSError, ValueError):  # taken away by another that tidies, or somebody else's
            if _is_left(staging):
                shutil.rmtree(staging)
    for half_written in output_dir.glob(".execution_trace_*.partial.json"):
        with suppress(OSError, ValueError):
            host, pid, _ = half_written.name.removeprefix(".execution_trace_").rsplit("_", 2)
            if _has_ended(host, int(pid)):
                half_written.unlink()
    left = []
    for folder in queued(output_dir):
        with suppress(CaptureError):
            about = Capture.load(folder).metadata
            left += [name_of(folder)] if _has_ended(str(about.get("host")), int(about.get("pid", 0))) else []
    if left:
        logger.warning(
            "An earlier run left {} recorded but without its tables: `instrument export {}` finishes that.",
            ", ".join(left),
            output_dir,
        )


def _is_left(staging: Path) -> bool:
    """Whether nobody writes into a partial folder any more; without an owner's name it must be a day old."""
    try:
        host, pid = (staging / _OWNER_FILE).read_text().split()
    except FileNotFoundError:
        return time.time() - staging.stat().st_mtime > _LONGEST_WITHOUT_OWNER_S
    return _has_ended(host, int(pid))


def _has_ended(host: str, pid: int) -> bool:
    """Whether a process is known to have ended; of another machine's nothing is known.

    One with this process's number has: containers give the same to each.
    """
    if host != socket.gethostname():
        return False
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and somebody else's
        return False
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from finishing the same folder; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT)  # NFS locks no folder
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CaptureError(f"{folder} is just being finished by another process: wait for that.") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def _describe(folder: Path, metadata: Mapping[str, Any]) -> None:
    with replacing(folder / METADATA_FILE) as file:
        file.write(json.dumps(metadata, indent=2, default=repr).encode())


def _published(folder: Path, metadata: dict[str, Any]) -> Path:
    """Give the folder its name, or where that is taken meanwhile a free one; renaming onto files fails."""
    for attempt in count(1):
        name = name_of(folder) if attempt == 1 else f"{name_of(folder)}-{attempt}"
        place = folder.with_name(name)
        if place.exists():
            continue
        if attempt > 1:
            _describe(folder, metadata | {"name": name})
        try:
            return folder.rename(place)
        except OSError:
            if not place.exists():
                raise
    raise AssertionError("unreachable")
