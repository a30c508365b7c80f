"""Traces where TensorBoard's profiler plugin looks for them, and scalars that a plain TensorBoard shows."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, ClassVar

from instrument.capture import Capture
from instrument.errors import need_package
from instrument.files import make_folder, open_to_append, replacing
from instrument.sinks import Sink
from instrument.sinks.chrome_trace import trace_of
from instrument.sinks.scalars import last_step, scalars
from instrument.trace.capture_json import unix_time
from instrument.trace.rewrite import rewrite


class TensorBoard(Sink):
    """Writes each window's trace and its scalars into one folder, so that scalars become curves over the windows.

    `tensorboard --logdir` shows the scalars as it is, and the traces with the plugin `torch-tb-profiler`. Every rank
    but the first has its scalars in a folder of its own, `rank1` and so on: a run of its own in TensorBoard.

    Cost: reads the trace for the scalars; copies it, and unpacks it unless `use_gzip` is true.

    Raises:
        MissingPackage: the package `tensorboard` is not installed; when the sink is built.
    """

    sink_name: ClassVar[str] = "TensorBoard"

    dir: str | None = None
    """Where TensorBoard looks; None: the folder `tensorboard` beside the captures."""

    worker_name: str | None = None
    """What a trace's file name begins with, one for each process; None: `<host>_<pid>` as torch has it."""

    use_gzip: bool = False
    """Whether traces are compressed."""

    trace: bool = True
    """Whether traces are written."""

    scalars: bool = True
    """Whether scalars are written."""

    def model_post_init(self, _: Any, /) -> None:
        """Look for the package now, before the first step."""
        if self.scalars:
            need_package("The TensorBoard sink", "tensorboard", "tensorboard")

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the window's files under their final names, each whole or not at all.

        Raises:
            CaptureError: the trace has been dropped.
            TraceError: the trace cannot be read.
        """
        beside = folder.absolute().parent
        into = (
            make_folder(beside, "tensorboard")
            if self.dir is None
            else make_folder(Path(self.dir).expanduser())
        )
        if self.trace:
            ending = ".pt.trace.json.gz" if self.use_gzip else ".pt.trace.json"
            worker = self.worker_name or "{}_{}".format(*_process(capture))
            rewrite(trace_of(capture), into / f"{worker}.{_started_ns(capture)}{ending}", {})
        if self.scalars:
            write_scalars(capture, into)


def write_scalars(capture: Capture, into: Path) -> Path:
    """Write one event file with the window's scalars and return it; a second time replaces the first.

    The global step of each is the window's last step.
    """
    rank = capture.about.rank
    into = make_folder(into, f"rank{rank}") if rank else make_folder(into)
    started_s = _started_ns(capture) / 1e9
    host, pid = _process(capture)
    target = into / event_file_name(started_s, host, pid, capture.name)
    with replacing(target) as raw:
        _write_event(raw, started_s, file_version="brain.Event:2")
        _write_event(raw, started_s, step=last_step(capture), scalars=scalars(capture))
    return target


def append_scalars(
    target: Path, wall_time_s: float, step: int, values: Iterable[tuple[str, float]]
) -> None:
    """Add scalars to an event file, which is made where it is missing; what a full disk cuts short is taken back."""
    with open_to_append(target) as raw:
        size = raw.seek(0, os.SEEK_END)
        try:
            if size == 0:
                _write_event(raw, wall_time_s, file_version="brain.Event:2")
            _write_event(raw, wall_time_s, step=step, scalars=values)
            raw.flush()
        except OSError:
            os.truncate(target, size)
            raise


def event_file_name(started_s: float, host: str, pid: int, name: str) -> str:
    """A file name by which TensorBoard knows event files.

    It reads a folder's event files in the order of their names and never goes back, so the start comes first.
    EventFileWriter's names end in a counter, where 10 sorts before 9, and it writes them from a thread.
    """
    return f"events.out.tfevents.{int(started_s):010d}.{host}.{pid}.{name}"


def _write_event(
    raw: IO[bytes], wall_time_s: float, *, scalars: Iterable[tuple[str, float]] = (), **fields: Any
) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
    summary = {"summary": Summary(value=values)} if values else {}
    RecordWriter(raw).write(Event(wall_time=wall_time_s, **fields, **summary).SerializeToString())


def _process(capture: Capture) -> tuple[str, int]:
    """The host and process that recorded, to name files after; of this process where a bare trace does not say."""
    return capture.about.host or socket.gethostname(), capture.about.pid or os.getpid()


def _started_ns(capture: Capture) -> int:
    """When the recording began, in ns since the epoch; when the file was written where a bare trace does not say."""
    started_s = unix_time(capture.about.started_at)
    return (
        trace_of(capture).stat().st_mtime_ns if started_s is None else round(started_s * 1e6) * 1000
    )
