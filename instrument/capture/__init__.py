"""Understanding a trace without torch: a capture's metadata, its events, and the views on them."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import msgspec

from instrument.capture import chrome
from instrument.capture.events import Events
from instrument.capture.operators import OperatorTable
from instrument.capture.operators import operators as _operators
from instrument.capture.ranges import ranges as _ranges
from instrument.capture.ranges import steps as _steps
from instrument.capture.stacks import Stack
from instrument.capture.stacks import stacks as _stacks
from instrument.capture.summary import to_html
from instrument.capture.table import Table
from instrument.errors import CaptureError

METADATA_FILE = "capture.json"
TRACE_FILES = ("trace.json.gz", "trace.json")

__all__ = ["Capture"]


class Capture:
    """One recorded window on one rank, or a bare trace file: its metadata and the views on its events.

    The trace is read at the first view and kept; a view is computed once. `folder` is None for a bare trace. In a
    notebook a capture shows its ranges and operators, and each view that is a `Table` shows itself.
    """

    def __init__(self, trace_path: Path | None, folder: Path | None, metadata: dict[str, Any]) -> None:
        self.trace_path = trace_path
        self.folder = folder
        self.metadata = metadata

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Capture:
        """Open a capture folder, or any Chrome/Kineto trace file; the events are read when a view asks for them.

        Raises:
            CaptureError: the path does not exist, or it is a folder without a readable capture.json.
        """
        path = Path(path)
        if path.is_dir():
            traces = (path / name for name in TRACE_FILES)
            return cls(next((t for t in traces if t.is_file()), None), path, _metadata(path))
        if not path.exists():
            raise CaptureError(f"There is no capture at {path}; give a capture folder or a trace file.")
        return cls(path, None, {})

    @property
    def name(self) -> str:
        """The capture's name: as recorded, or that of its folder or file."""
        if self.folder is None:
            return self.trace_path.name.removesuffix(".gz").removesuffix(".json") if self.trace_path else ""
        return str(self.metadata.get("name") or self.folder.name)

    @cached_property
    def events(self) -> Events:
        """Every event with a duration, and memory, as columns.

        Raises:
            CaptureError: the folder holds no trace.
            TraceError: the trace file cannot be read.
        """
        if self.trace_path is None:
            raise CaptureError(
                f"The capture {self.folder} holds no trace, as after chrome_trace.keep=false; record it with keep=true."
            )
        return chrome.read(self.trace_path)

    @cached_property
    def operators(self) -> OperatorTable:
        """The operator table, as torch's `key_averages()`; see `instrument.capture.operators`."""
        return _operators(self.events)

    @cached_property
    def ranges(self) -> Table:
        """The range tree of the annotations; see `instrument.capture.ranges`."""
        return _ranges(self.events)

    @cached_property
    def steps(self) -> Table:
        """The finished steps: `number start_ns duration_ns`."""
        return _steps(self.events)

    def stacks(self, metric: Literal["host", "device"] = "host") -> list[Stack]:
        """Call paths with the time that belongs to the last frame of each; see `instrument.capture.stacks`.

        Raises:
            CaptureError: the trace holds no Python frames, or, for `device`, nothing that ran on a device.
        """
        return _stacks(self.events, metric)

    def __repr__(self) -> str:
        where = self.folder or self.trace_path
        return f"<Capture {self.name!r} at {where}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: what was recorded, the range tree and the costliest operators; reads the trace."""
        return to_html(self)


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise CaptureError(f"The folder {folder} is no capture: it has no {METADATA_FILE}.") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CaptureError(f"The file {path} cannot be read ({error}); record the capture again.") from None
