"""Hands finished windows to their sinks.

A window is written once, into a hidden folder beside its place, and appears under its name by one rename: whoever
lists captures sees a whole one or none. After that nothing can lose the trace: a sink that fails is logged, and the
others go on.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from loguru import logger

from instrument.capture import Capture
from instrument.config import ProfilerConfig
from instrument.errors import ConfigError, InstrumentError
from instrument.sinks.chrome_trace import rewrite


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


def staging_folder(output_dir: Path, name: str) -> Path:
    """A new hidden folder beside where the capture will be."""
    for attempt in count():
        folder = output_dir / f".{name}.{attempt}.partial"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def deliver(
    staging: Path, output_dir: Path, metadata: Mapping[str, Any], sinks: Mapping[str, Any], failed: set[str]
) -> Capture:
    """Turn a staged `trace.json` into a capture folder and run the sinks on it.

    The folder is named after `metadata["name"]`, with a number behind it where that is taken. `failed` are the sinks
    that have failed before in this run, which is said once.
    """
    # put in here and not by torch, whose export turns backslashes into slashes and the trace into what is no JSON
    rewrite(staging / "trace.json", staging / "trace.json.gz", metadata["user_metadata"])
    (staging / "trace.json").unlink()
    folder = _published(staging, output_dir, metadata)
    capture = Capture.load(folder)
    for name, sink in sorted(sinks.items(), key=lambda item: bool(getattr(item[1], "last", False))):
        _run(name, sink, capture, folder, failed)
    return Capture.load(folder)  # without the events that the sinks had it read


def _published(staging: Path, output_dir: Path, metadata: Mapping[str, Any]) -> Path:
    """Write `capture.json` and rename the folder to the first free name; renaming onto a folder with files fails."""
    for attempt in count(1):
        name = metadata["name"] if attempt == 1 else f"{metadata['name']}-{attempt}"
        (staging / "capture.json").write_text(
            json.dumps({**metadata, "name": name}, indent=2, default=repr), encoding="utf-8"
        )
        folder = output_dir / name
        if folder.exists():
            continue
        try:
            staging.rename(folder)
        except OSError:
            if folder.exists():  # another process took the name in between
                continue
            raise
        return folder
    raise AssertionError("unreachable")


def _run(name: str, sink: Any, capture: Capture, folder: Path, failed: set[str]) -> None:
    try:
        sink.write(capture, folder)
    except (Exception, SystemExit) as error:  # a sink may fail in any way; training and the other sinks go on
        if name in failed:
            return
        failed.add(name)
        # one of our own sentences says it all, anything else needs its traceback
        unexpected = None if isinstance(error, InstrumentError) else error
        logger.opt(exception=unexpected).error(
            "The {} sink failed on {}: {}. The trace is kept in {}, and further failures of this sink are not told.",
            name,
            folder.name,
            str(error).rstrip("."),
            folder,
        )
