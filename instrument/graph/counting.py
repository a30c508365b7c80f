"""FLOPs of each node, by the rules that the range tree has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from instrument import emit
from instrument.capture import Capture
from instrument.config import ProfilerConfig
from instrument.errors import CaptureError
from instrument.names import to_trace
from instrument.recorder import Recorder


def counted_flops(run: Callable[[], object], names: Sequence[str]) -> list[int | None]:
    """The FLOPs of each node of a graph, of which `run` runs every one in its range, once.

    None for a node none of whose operators has a rule, and for all where something else records in this process.
    """
    with TemporaryDirectory() as folder:
        config = ProfilerConfig(record_shapes=True)
        recorder = Recorder(config, ["cpu"], emit.torch_backend, Path(folder))
        try:
            recorder.start()
        except CaptureError:
            return [None] * len(names)
        try:
            run()
        finally:
            recorder.stop()
        trace = Path(folder, "window", "trace.json")
        trace.parent.mkdir()
        recorder.save(trace)
        found = {row.name: row.flops for row in Capture.load(trace).ranges.where(depth=0)}
    return [found.get(to_trace(name)) for name in names]
