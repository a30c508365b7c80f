"""Options on the trace that the session writes anyway: plain or gzip, metadata, a copy, dropping it."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from pydantic import Field, field_validator

from instrument.capture import Capture
from instrument.errors import CaptureError, ConfigError, TraceError
from instrument.files import encodable, replacing
from instrument.redact import blanked
from instrument.sinks import Sink
from instrument.trace.json_stream import with_one_sign

# What torch and Kineto write at the top level: a user's key of that name would be lost behind theirs.
_TAKEN = frozenset(
    {
        "DISABLE_CUPTI_LAZY_REINIT",
        "baseTimeNanoseconds",
        "cuda_driver_version",
        "cuda_runtime_version",
        "cupti_version",
        "deviceProperties",
        "displayTimeUnit",
        "distributedInfo",
        "hip_driver_version",
        "hip_runtime_version",
        "host_name",
        "profile_memory",
        "record_shapes",
        "roctracer_version",
        "schemaVersion",
        "traceEvents",
        "traceName",
        "trace_id",
        "with_flops",
        "with_modules",
        "with_stack",
    }
)

_CHUNK = 1 << 20
# What is looked at in one go; larger pieces leave the processor's cache. It adds a tenth to the time of a rewrite.
_LOOKED_AT = 1 << 17
_LONGEST_TIME = 64  # with its key
# A trace of 42 MB: level 3 takes 0.15 s and leaves a 13th, level 6 0.35 s and a 17th, level 9 1.15 s and a 19th.
_LEVEL = 3


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


def as_json(metadata: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Keys and values as they will stand at the top level of a trace; `whose` names them in the sentence.

    Raises:
        ConfigError: torch writes such a key itself, or JSON cannot hold a value.
    """
    taken = sorted(_TAKEN & metadata.keys())
    if taken:
        raise ConfigError(f"{whose} cannot hold {taken[0]!r}: torch writes that key.")
    return {encodable(str(key)): encodable(_as_json(key, value, whose)) for key, value in metadata.items()}


def _as_json(key: str, value: Any, whose: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        # only a number is shown: for a tensor's text torch would run operators and wait for the device
        shown = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
        raise ConfigError(f"{whose} {key!r} is {shown}, which JSON cannot hold; give it as text.") from None


def trace_of(capture: Capture) -> Path:
    """The path of the capture's trace.

    Raises:
        CaptureError: the trace has been dropped.
    """
    if capture.trace_path is None:
        raise CaptureError(f"The trace of {capture.name} has been dropped, so there is nothing to write from.")
    return capture.trace_path


def rewrite(source: Path, target: Path, metadata: Mapping[str, Any]) -> None:
    """Write the trace `source` as `target`, gzipped if that name ends in `.gz`, with keys put first.

    Where the clock was set back while it was recorded, negative times that torch writes as no JSON become JSON, so that
    Perfetto opens it; unless the file is only copied. The target appears whole or not at all, and may be the source.

    Raises:
        TraceError: there are keys to add and the file does not begin with an opening brace.
    """
    packed = _is_gzip(source)
    with replacing(target) as raw:
        if packed == (target.suffix == ".gz") and not metadata:
            with source.open("rb") as copied:
                shutil.copyfileobj(copied, raw, _CHUNK)
            return
        with gzip.open(source) if packed else source.open("rb") as before, writing(raw, target) as after:
            begun = _put_first(metadata, cast(IO[bytes], before), after, source) if metadata else b""
            _copy_times(begun, cast(IO[bytes], before), after)


def _copy_times(rest: bytes, before: IO[bytes], after: IO[bytes]) -> None:
    """Copy a trace, its negative times as JSON has them; no number holds a comma, so none is cut at one."""
    while chunk := before.read(_LOOKED_AT):
        chunk = rest + chunk
        end = chunk.rfind(b",") + 1 or (len(chunk) if len(chunk) > _LONGEST_TIME else 0)
        after.write(with_one_sign(chunk[:end]))
        rest = chunk[end:]
    after.write(with_one_sign(rest))


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _put_first(metadata: Mapping[str, Any], before: IO[bytes], after: IO[bytes], source: Path) -> bytes:
    """Write the document's beginning with the metadata; gives what was read behind it."""
    head = before.read(_LOOKED_AT).lstrip()  # torch begins with a line break
    if not head.startswith(b"{"):
        raise TraceError(f"{source} does not begin with '{{', so it is no trace that metadata can be added to.")
    rest = head[1:].lstrip()
    pairs = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in metadata.items())
    between = "\n" if rest.startswith(b"}") else ",\n  "
    after.write(b"{\n  " + pairs.encode() + between.encode())
    return rest


@contextmanager
def writing(raw: IO[bytes], target: Path) -> Iterator[IO[bytes]]:
    """What is to be written into a target's file: gzipped where its name ends in `.gz`."""
    if target.suffix != ".gz":
        yield raw
        return
    # No file name and no time inside: the same trace gives the same bytes.
    with gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as packed:
        yield cast(IO[bytes], packed)
