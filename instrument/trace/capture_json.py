"""What `capture.json` says, in the types that its readers rely on.

A capture may come from anybody, so its metadata is checked once, here, when the capture is opened. Every key may be
missing: None, or empty, is then unknown. Keys that are not named here are nobody's business but the user's.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from instrument import files
from instrument.errors import CaptureError

METADATA_FILE = "capture.json"
# 2: `compiled_ranges`, which 1 calls `swallowed`.
FORMAT = 2
# More ranks are no job's but damage.
MOST_RANKS = 1_000_000
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Rank = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
WorldSize = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
# A count or a time in nanoseconds: a sum of thousands of them still fits into 64 bits.
Number = Annotated[int, Meta(ge=-(2**50), le=2**50)]
# Files are named after it.
Host = Annotated[str, Meta(max_length=255, pattern=r"^[^/\x00-\x1f\x7f-\x9f]*\Z")]


class Window(Struct):
    """Which steps were recorded, and what cut them short; see `instrument.record.metadata.facts`."""

    first_step: Number | None = None
    last_step: Number | None = None
    steps: Number | None = None
    planned_steps: Number | None = None
    truncated: bool | None = None
    reason: str | None = None
    phase: str | None = None


class Cost(Struct):
    """What recording cost the run; see `instrument.record.overhead.Cost.window`."""

    recorded_step_ns: Number | None = None
    unrecorded_step_ns: Number | None = None
    unrecorded_steps: Number | None = None
    start_ns: Number | None = None
    stop_ns: Number | None = None
    save_ns: Number | None = None
    export_ns: Number | None = None
    trace_bytes: Number | None = None
    packed_bytes: Number | None = None


class Config(Struct):
    """Those options of the recording that its readers look at."""

    activities: Any = None  # names, or mappings from them to chosen types
    profile_memory: bool | None = None
    with_flops: bool | None = None
    communication: list[str] = field(default_factory=list)
    ranks: str | list[Rank] | None = None
    sinks: dict[str, Any] = field(default_factory=dict)
    upload_to: str | None = None
    upload_options: dict[str, Any] = field(default_factory=dict)


class InRegion(Struct):
    """A range that torch.compile traced into a compiled region."""

    range: str
    region: str


class Metadata(Struct):
    """The content of `capture.json`, as far as it is read."""

    name: str | None = None
    window: Window = field(default_factory=Window)
    started_at: Annotated[str, Meta(max_length=64)] | None = None
    rank: Rank | None = None
    world_size: WorldSize | None = None
    pid: Number | None = None
    host: Host | None = None
    devices: list[str] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    cost: Cost = field(default_factory=Cost)
    compiled_ranges: list[InRegion] = field(default_factory=list)
    modules_not_seen: list[str] = field(default_factory=list)
    module_types: dict[str, str] = field(default_factory=dict)
    annotations_disabled: bool = False
    user_metadata: dict[str, Any] = field(default_factory=dict)
    sinks_inline: list[str] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)


def own_version() -> str:
    """The version of this package, which captures and kept columns name; "unknown" where it was never installed."""
    from importlib.metadata import (
        PackageNotFoundError,
        version,
    )  # 20 ms, which most readers can do without

    try:
        return version("torch-instrument")
    except PackageNotFoundError:
        return "unknown"


def read(folder: Path) -> dict[str, Any]:
    """The content of a folder's `capture.json`, whose known keys have the types of `Metadata`.

    Keys that an older version named otherwise have the names of today.

    Raises:
        CaptureError: there is none, or it is a link, no JSON, of other types, or of a newer version's format.
    """
    path = folder / METADATA_FILE
    try:
        content = msgspec.json.decode(files.read_bytes(path), type=dict[str, Any])
    except FileNotFoundError:
        inside = sorted(found.parent.name for found in folder.glob(f"[!.]*/{METADATA_FILE}"))
        hint = (
            f"; it holds captures: give one of them, such as {folder / inside[-1]}."
            if inside
            else "."
        )
        raise CaptureError(
            f"The folder {folder} is no capture: it has no {METADATA_FILE}{hint}"
        ) from None
    except OSError as error:
        raise CaptureError(f"The file {path} cannot be read: {error.strerror}.") from None
    except BAD_JSON as error:
        raise CaptureError(
            f"The file {path} cannot be read ({error}); record the capture again."
        ) from None
    written = content.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise CaptureError(
            f"The file {path} has format {written}, and this version of torch-instrument reads up to "
            f"{FORMAT}: upgrade it, or give the trace file alone."
        )
    if "swallowed" in content and written == 1:
        content["compiled_ranges"] = content.pop("swallowed")
    typed(content, path)
    return content


def typed(content: dict[str, Any], path: Path | None = None) -> Metadata:
    """Metadata in the types that its readers rely on; `path` is named where it cannot be had so.

    Raises:
        CaptureError: a key has a value of another type.
    """
    try:
        found = msgspec.convert(content, Metadata)
        unix_time(found.started_at)
    except (msgspec.ValidationError, ValueError) as error:
        where = f"The file {path}" if path else "The metadata of a capture"
        raise CaptureError(
            f"{where} cannot be understood ({error}): mend it, or give the trace file alone."
        ) from None
    return found


def unix_time(started_at: str | None) -> float | None:
    """The seconds since the epoch of an ISO time.

    Raises:
        ValueError: it is none, or of no year that a computer knows.
    """
    try:
        return None if started_at is None else datetime.fromisoformat(started_at).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{started_at!r} is no time") from None
