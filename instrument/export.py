"""Hands finished windows to their sinks.

A window is written once, into a hidden folder beside its place, and appears under its name by one rename: whoever
lists captures sees a whole one or none. After that nothing can lose the trace: a sink that fails is logged, and the
others go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from loguru import logger

from instrument.capture import Capture
from instrument.errors import InstrumentError
from instrument.sinks.chrome_trace import rewrite


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


def deliver(staging: Path, output_dir: Path, metadata: Mapping[str, Any], sinks: Mapping[str, Any]) -> Capture:
    """Turn a staged `trace.json` into a capture folder and run the sinks on it.

    The folder is named after `metadata["name"]`, with a number behind it where that is taken.
    """
    rewrite(staging / "trace.json", staging / "trace.json.gz", {})
    (staging / "trace.json").unlink()
    folder = _published(staging, output_dir, metadata)
    capture = Capture.load(folder)
    for name, sink in sorted(sinks.items(), key=lambda item: bool(getattr(item[1], "last", False))):
        _run(name, sink, capture, folder)
    return capture


def _published(staging: Path, output_dir: Path, metadata: Mapping[str, Any]) -> Path:
    """Write `capture.json` and rename the folder to the first free name; renaming onto a folder with files fails."""
    for attempt in count(1):
        name = metadata["name"] if attempt == 1 else f"{metadata['name']}-{attempt}"
        (staging / "capture.json").write_text(json.dumps({**metadata, "name": name}, indent=2), encoding="utf-8")
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


def _run(name: str, sink: Any, capture: Capture, folder: Path) -> None:
    try:
        sink.write(capture, folder)
    except Exception as error:  # a sink may fail in any way; training and the other sinks go on
        # one of our own sentences says it all, anything else needs its traceback
        unexpected = None if isinstance(error, InstrumentError) else error
        logger.opt(exception=unexpected).error(
            "The {} sink failed on {}: {} The trace is kept in {}.", name, folder.name, error, folder
        )
