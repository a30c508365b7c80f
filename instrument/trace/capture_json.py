"""The content of `capture.json`, in the types that its readers rely on.

Anybody can have written a capture. So its metadata is checked once, here, when the capture is
opened. Each key may be missing: the value is then None, or empty. Other keys are kept for the user
and not read.
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
# Format 2 has `compiled_ranges`, which format 1 calls `swallowed`.
FORMAT = 2
# No job has more ranks: a larger number is damage.
MOST_RANKS = 1_000_000
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Rank = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
WorldSize = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
# A count or a time in nanoseconds: a sum of thousands of them still fits into 64 bits.
Number = Annotated[int, Meta(ge=-(2**50), le=2**50)]
# Files have this in their names.
Host = Annotated[str, Meta(max_length=255, pattern=r"^[^/\x00-\x1f\x7f-\x9f]*\Z")]


class Window(Struct):
    """Which steps were recorded, and why fewer than planned."""

    first_step: Number | None = None
    last_step: Number | None = None
    steps: Number | None = None
    planned_steps: Number | None = None
    truncated: bool | None = None
    reason: str | None = None
    phase: str | None = None


class Cost(Struct):
    """What recording cost the run, in nanoseconds and bytes."""

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
    """The options of the recording that readers use."""

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
    """The keys of `capture.json` that are read."""

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
    """The version of this package; "unknown" if it is not installed."""
    # Imported here because it takes 20 ms and most readers do not need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch-instrument")
    except PackageNotFoundError:
        return "unknown"


def read(folder: Path) -> dict[str, Any]:
    """The content of the `capture.json` in a folder, whose known keys have the types of `Metadata`.

    Keys that an older version gave other names have the names of today.

    Raises:
        CaptureError: the file is missing, a link, not JSON, of a newer format, or a key has a value
            of another type.
    """
    path = folder / METADATA_FILE
    try:
        content = msgspec.json.decode(files.read_bytes(path), type=dict[str, Any])
    except FileNotFoundError:
        inside = sorted(found.parent.name for found in folder.glob(f"[!.]*/{METADATA_FILE}"))
        hint = "."
        if inside:
            hint = f"; it holds captures: give one of them, such as {folder / inside[-1]}."
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
            f"The file {path} has format {written}, and this version of torch-instrument reads up "
            f"to {FORMAT}: upgrade torch-instrument, or give the trace file alone."
        )
    if "swallowed" in content and written == 1:
        content["compiled_ranges"] = content.pop("swallowed")
    typed(content, path)
    return content


def typed(content: dict[str, Any], path: Path | None = None) -> Metadata:
    """Convert metadata to the types that its readers rely on; errors name `path`.

    Raises:
        CaptureError: a key has a value of another type.
    """
    try:
        found = msgspec.convert(content, Metadata)
        unix_time(found.started_at)
    except (msgspec.ValidationError, ValueError) as error:
        where = f"The file {path}" if path else "The metadata of a capture"
        raise CaptureError(
            f"{where} cannot be understood ({error}): correct it, or give the trace file alone."
        ) from None
    return found


def unix_time(started_at: str | None) -> float | None:
    """The seconds since the epoch of a time in ISO format; None for None.

    Raises:
        ValueError: it is not a time, or its year is out of range.
    """
    try:
        return None if started_at is None else datetime.fromisoformat(started_at).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{started_at!r} is not a time") from None
