"""A sink that decompresses, copies or removes a capture's trace file, or adds metadata to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from instrument.base.files import DETAIL_FILE
from instrument.base.redact import redact
from instrument.base.user_metadata import as_json
from instrument.export.sinks.sink import Sink
from instrument.read.trace.rewrite import rewrite

if TYPE_CHECKING:
    from instrument.read.capture import Capture


class ChromeTrace(Sink):
    """Rewrites, copies or removes the window's trace file after the other sinks have run.

    With the default options, this sink does nothing: every capture has `trace.json.gz` already.
    Perfetto opens plain and compressed traces; chrome://tracing opens only plain traces.

    With `keep=False`, the capture can no longer be shown or compared.

    Cost: one pass over the file, in constant memory, if `gzip` is false or `metadata` is given.
    `copy_to` costs another pass.
    """

    sink_name: ClassVar[str] = "chrome_trace"
    last: ClassVar[bool] = True

    gzip: bool = True
    """Whether the trace stays compressed; a plain one is about 10 times as large."""

    copy_to: str | None = None
    """A folder for a copy named `<capture name>.json` or `.json.gz`; created if missing."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Keys for the top level of the trace's JSON. Perfetto's info page shows them. A key that
    `profiler.metadata` or `Session.add_metadata` has already set keeps that value."""

    keep: bool = True
    """Whether the trace stays in the capture's folder. The copy in `copy_to` always stays."""

    @field_validator("metadata")
    @classmethod
    def _writable(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = redact(as_json(metadata, "The chrome_trace sink's metadata"))
        return hidden

    def write(self, capture: Capture, folder: Path) -> None:
        """Rewrite, copy or remove the trace as the options say, and update `capture.trace_path`.

        A trace outside `folder` stays as it is.

        Raises:
            CaptureError: the capture holds no trace.
            TraceError: there is metadata to add, but the file does not begin like a JSON object.
        """
        trace, folder = capture.require_trace().absolute(), folder.absolute()
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
            if not self.keep:
                (folder / DETAIL_FILE).unlink(missing_ok=True)
            capture.trace_path = wanted if self.keep else None
