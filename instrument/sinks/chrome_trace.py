"""Options on the trace that the session writes anyway: plain or gzip, metadata, a copy, dropping it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from instrument.capture import Capture
from instrument.config.user_metadata import as_json
from instrument.errors import CaptureError
from instrument.redact import blanked
from instrument.sinks import Sink
from instrument.trace.rewrite import rewrite


class ChromeTrace(Sink):
    """Rewrites, copies or drops the window's trace file once the other sinks are done with it.

    With the options as they are it does nothing: `trace.json.gz` is there already. Perfetto opens both forms,
    chrome://tracing the plain one.

    Cost: one pass over the file, in constant memory, where `gzip` is false or `metadata` is given; a copy where
    `copy_to` is given. `keep=False` loses the trace: the capture can no longer be shown or compared.
    """

    sink_name: ClassVar[str] = "chrome_trace"
    last: ClassVar[bool] = True

    gzip: bool = True
    """False turns the file into a plain `trace.json`, about ten times as large."""

    copy_to: str | None = None
    """A folder that also gets the trace, as `<capture name>.json` or `.json.gz`; made where it is missing."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Keys written at the top level of the trace's JSON object, which Perfetto's info page shows; those that
    `profiler.metadata` or `Session.add_metadata` gave are there already, and stay as they are."""

    keep: bool = True
    """False removes the trace from the capture folder at the end; a copy stays."""

    @field_validator("metadata")
    @classmethod
    def _writable(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = blanked(as_json(metadata, "The chrome_trace sink's metadata"))
        return hidden

    def write(self, capture: Capture, folder: Path) -> None:
        """Bring the trace into the form asked for, copy it, drop it; `capture.trace_path` follows.

        A trace that lies elsewhere than in `folder` is left as it is.

        Raises:
            CaptureError: the trace has been dropped before.
            TraceError: metadata is to be added and the file does not begin as a JSON object does.
        """
        trace, folder = trace_of(capture).absolute(), folder.absolute()
        wanted = folder / ("trace.json.gz" if self.gzip else "trace.json")
        there = capture.about.user_metadata
        metadata = {key: value for key, value in self.metadata.items() if key not in there}
        if self.copy_to is not None:
            into = Path(self.copy_to).expanduser()
            into.mkdir(parents=True, exist_ok=True)
            rewrite(trace, into / wanted.name.replace("trace", capture.name, 1), metadata)
        if self.keep and (metadata or trace != wanted):
            rewrite(trace, wanted, metadata)
        if trace.parent == folder:
            if trace != wanted or not self.keep:
                trace.unlink()
            capture.trace_path = wanted if self.keep else None


def trace_of(capture: Capture) -> Path:
    """The path of the capture's trace.

    Raises:
        CaptureError: the trace has been dropped.
    """
    if capture.trace_path is None:
        raise CaptureError(
            f"The trace of {capture.name} has been dropped, so there is nothing to write from."
        )
    return capture.trace_path
