"""A sink for TensorBoard: scalars, a report, and traces for TensorBoard's profiler plugin."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from instrument.base.errors import need_package
from instrument.base.event_file import event_file_name, write_event
from instrument.base.files import make_folder, replacing
from instrument.base.prose import code
from instrument.base.units import percent
from instrument.export.sinks.sink import Sink
from instrument.export.sinks.window_scalars import last_step, scalars
from instrument.read.trace.capture_json import unix_time
from instrument.read.trace.rewrite import rewrite

if TYPE_CHECKING:
    from instrument.read.capture import Capture


class TensorBoard(Sink):
    """Writes the traces and scalars of all windows into one folder, so that scalars become curves.

    TensorBoard shows the scalars as curves, the verdict and the range tree as text, and the parts
    of a step as a bar in an image. With the plugin `torch-tb-profiler`, it also shows the traces.
    The files are in a subfolder with the name of the run. Inside this subfolder, `rank1` holds the
    scalars of rank 1, and so on. TensorBoard shows each of these folders as a run.

    Cost: reading the trace for the scalars, a diagnosis for the report, and a copy of the trace.
    With `use_gzip=False`, the copy is decompressed.

    Raises:
        MissingPackage: the package `tensorboard` is not installed.
    """

    sink_name: ClassVar[str] = "TensorBoard"

    dir: str | None = None
    """TensorBoard's log folder; None: `tensorboard` beside the captures."""

    run: str | None = None
    """The run's name, a subfolder of `dir`; None: that of the captures' folder. If that is
    `profile`, None means the two folders above it, which Hydra names after the day and the time."""

    worker_name: str | None = None
    """The beginning of a trace's file name; None: `<host>_<pid>`, as in torch. It must differ
    between processes."""

    use_gzip: bool = False
    """Whether to compress traces."""

    trace: bool = True
    """Whether to write traces."""

    scalars: bool = True
    """Whether to write scalars."""

    report: bool = True
    """Whether to write verdict, range tree and parts of a step; needs `scalars`."""

    def model_post_init(self, _: Any, /) -> None:
        """Raise MissingPackage before the first step if the package is missing."""
        if self.scalars:
            need_package("The TensorBoard sink", "tensorboard", "tensorboard")

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the window's files; each gets its final name once it is complete.

        Raises:
            CaptureError: the capture holds no trace.
        """
        beside = folder.absolute().parent
        run = self.run or run_name(beside)
        into = (
            make_folder(beside, "tensorboard", run)
            if self.dir is None
            else make_folder(Path(self.dir).expanduser(), run)
        )
        if self.trace:
            ending = ".pt.trace.json.gz" if self.use_gzip else ".pt.trace.json"
            worker = self.worker_name or "{}_{}".format(*_process(capture))
            rewrite(capture.require_trace(), into / f"{worker}.{_started_ns(capture)}{ending}", {})
        if self.scalars:
            write_scalars(capture, into, report=self.report)


def run_name(recorded_into: Path) -> str:
    """Return a name for the run that records into a folder; see `TensorBoard.run`."""
    names = [name for name in recorded_into.parts if name != recorded_into.anchor]
    if len(names) > 1 and names[-1] == "profile":
        return "_".join(names[-3:-1])
    return names[-1] if names else "run"


def write_scalars(capture: Capture, into: Path, *, report: bool = True) -> Path:
    """Write an event file with the window's scalars and report; return the path of the file.

    An earlier event file of the same window is replaced.
    """
    rank = capture.about.rank
    into = make_folder(into, f"rank{rank}") if rank else make_folder(into)
    started_s = _started_ns(capture) / 1e9
    host, pid = _process(capture)
    target = into / event_file_name(started_s, host, pid, capture.name)
    with replacing(target) as raw:
        write_event(raw, started_s, file_version="brain.Event:2")
        step = last_step(capture)
        write_event(raw, started_s, step=step, scalars=scalars(capture))
        if report:
            write_event(raw, started_s, step=step, report=_report(capture))
    return target


def _report(capture: Capture) -> Iterator[Any]:
    """Yield the verdict, the range tree and the parts of a step, for TensorBoard's `Summary`."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    from instrument.read.show.step_split import COLOURS, bar_png, step_split
    from instrument.read.show.text import capture_parts
    from instrument.read.show.verdict import markdown_of
    from instrument.read.views.layout import plain

    # In Markdown, indented lines are code, and code has no markup.
    table = plain(capture_parts(capture, operators=False)).split("\n")
    yield _text("window/verdict", markdown_of(capture))
    yield _text("window/ranges", "\n".join(f"    {line}" for line in table))
    if parts := step_split(capture):
        legend = (
            f"- {colour}: {percent(share)} {code(name)}"
            for colour, (name, share) in zip(COLOURS, parts)
        )
        yield _text("window/step_split", "\n".join(legend))
        image = bar_png([share for _, share in parts])
        yield Summary.Value(
            tag="window/step_split_bar",
            image=Summary.Image(colorspace=3, encoded_image_string=image),
        )


def _text(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
    from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode("utf-8", "replace")])
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _process(capture: Capture) -> tuple[str, int]:
    """The host and the id of the process that recorded; if unknown, those of this process."""
    return capture.about.host or socket.gethostname(), capture.about.pid or os.getpid()


def _started_ns(capture: Capture) -> int:
    started_s = unix_time(capture.about.started_at)
    if started_s is None:  # unknown
        return capture.require_trace().stat().st_mtime_ns
    return round(started_s * 1e6) * 1000
