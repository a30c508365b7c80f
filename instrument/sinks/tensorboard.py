"""A sink for TensorBoard: scalars, and traces for TensorBoard's profiler plugin."""

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
    """Writes the traces and scalars of all windows into one folder, so that scalars become curves.

    `tensorboard --logdir` shows the scalars, and with the plugin `torch-tb-profiler` the traces.
    The scalars of rank 1 are in the subfolder `rank1`, and so on; TensorBoard shows each subfolder
    as a run.

    Cost: the scalars need one reading of the trace. Traces are copied, and decompressed unless
    `use_gzip` is true.

    Raises:
        MissingPackage: the package `tensorboard` is not installed. The error is raised when the
            sink is created.
    """

    sink_name: ClassVar[str] = "TensorBoard"

    dir: str | None = None
    """TensorBoard's log folder; None means the folder `tensorboard` beside the captures."""

    worker_name: str | None = None
    """The beginning of a trace's file name; it must differ between processes. None means
    `<host>_<pid>`, as in torch."""

    use_gzip: bool = False
    """Whether to compress traces."""

    trace: bool = True
    """Whether to write traces."""

    scalars: bool = True
    """Whether to write scalars."""

    def model_post_init(self, _: Any, /) -> None:
        """Raise MissingPackage before the first step if the package is missing."""
        if self.scalars:
            need_package("The TensorBoard sink", "tensorboard", "tensorboard")

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the window's files; each gets its final name once it is complete.

        Raises:
            CaptureError: the trace was removed.
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
    """Write an event file with the window's scalars, and return the path of the file.

    An earlier file of the same window is replaced. The global step of each scalar is the window's
    last step.
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
    """Append scalars to an event file; create the file if it is missing.

    If writing fails with an OSError, the file is cut back to its earlier size.
    """
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
    """The name of an event file, in TensorBoard's form.

    TensorBoard reads the event files of a folder once, in the order of their names, so a name
    begins with the start time. TensorBoard's own EventFileWriter is not used: its file names end in
    a counter, where 10 sorts before 9, and it writes on a thread.
    """
    return f"events.out.tfevents.{int(started_s):010d}.{host}.{pid}.{name}"


def _write_event(
    raw: IO[bytes], wall_time_s: float, *, scalars: Iterable[tuple[str, float]] = (), **fields: Any
) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped]

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
    summary = {"summary": Summary(value=values)} if values else {}
    event = Event(wall_time=wall_time_s, **fields, **summary)
    record_writer.RecordWriter(raw).write(event.SerializeToString())


def _process(capture: Capture) -> tuple[str, int]:
    """The host and the id of the process that recorded; if unknown, those of this process."""
    return capture.about.host or socket.gethostname(), capture.about.pid or os.getpid()


def _started_ns(capture: Capture) -> int:
    """The start of the recording in Unix time; if unknown, when the trace file was last changed."""
    started_s = unix_time(capture.about.started_at)
    if started_s is None:
        return trace_of(capture).stat().st_mtime_ns
    return round(started_s * 1e6) * 1000
