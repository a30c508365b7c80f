"""TensorBoard's event files: their names, and the events in them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from instrument.base.files import open_to_append


def append_scalars(
    target: Path, wall_time_s: float, step: int, values: Iterable[tuple[str, float]]
) -> None:
    """Append scalars to an event file; create the file if it is missing.

    If writing fails with an OSError, the file is cut back to its earlier size.
    """
    with open_to_append(target) as raw:
        size = raw.seek(0, os.SEEK_END)
        try:
            if size == 0:
                write_event(raw, wall_time_s, file_version="brain.Event:2")
            write_event(raw, wall_time_s, step=step, scalars=values)
            raw.flush()
        except OSError:
            os.truncate(target, size)
            raise


def event_file_name(started_s: float, host: str, pid: int, name: str) -> str:
    """The name of an event file, in TensorBoard's form.

    TensorBoard reads the event files of a folder once, in the order of their names. So a name
    begins with the start time. TensorBoard's own EventFileWriter is not used, because it writes on
    a thread, and because its file names end in a counter: the name of file 10 sorts before 9.
    """
    return f"events.out.tfevents.{int(started_s):010d}.{host}.{pid}.{name}"


def write_event(
    raw: IO[bytes],
    wall_time_s: float,
    *,
    scalars: Iterable[tuple[str, float]] = (),
    report: Iterable[Any] = (),
    **fields: Any,
) -> None:
    """Append one event to an open event file; `fields` are fields of TensorBoard's `Event`."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped]

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
    values += report
    summary = {"summary": Summary(value=values)} if values else {}
    event = Event(wall_time=wall_time_s, **fields, **summary)
    record_writer.RecordWriter(raw).write(event.SerializeToString())
