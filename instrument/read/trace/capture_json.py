"""Read `capture.json` and check the types of its values, because a stranger may have written it.

docs/capture-json.md says what the keys mean. Every key may be missing; its value is then None or
empty. Unknown keys are kept for the user and not checked.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.base.files import FORMAT, METADATA_FILE

TRACE_FILES = ("trace.json.gz", "trace.json")
# No job has more ranks than this. A larger number means that the file is damaged.
MOST_RANKS = 1_000_000
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Rank = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
WorldSize = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
# A count, or a time in nanoseconds. A sum of thousands of such numbers fits into 64 bits.
Number = Annotated[int, Meta(ge=-(2**50), le=2**50)]
Count = Annotated[int, Meta(ge=0, le=2**50)]
# Floating-point operations per second, or milliseconds.
Rate = Annotated[float, Meta(gt=0, le=1e24)]
# The host name becomes a part of file names.
Host = Annotated[str, Meta(max_length=255, pattern=r"^[^/\x00-\x1f\x7f-\x9f]*\Z")]


class RecordedSteps(Struct):
    """The steps that were recorded, and the reason if they are fewer than planned."""

    first_step: Number | None = None
    last_step: Number | None = None
    steps: Number | None = None
    planned_steps: Number | None = None
    truncated: bool | None = None
    reason: str | None = None
    trigger: str | None = None
    trigger_reason: str | None = None
    phase: str | None = None
    part: Number | None = None
    part_of_step: Number | None = None


class Cost(Struct):
    """What recording cost the run, in nanoseconds and bytes."""

    recorded_step_ns: Number | None = None
    unrecorded_step_ns: Number | None = None
    unrecorded_steps: Number | None = None
    start_ns: Number | None = None
    stop_ns: Number | None = None
    save_ns: Number | None = None
    stall_ns: Number | None = None
    export_ns: Number | None = None
    trace_bytes: Number | None = None
    packed_bytes: Number | None = None


class Calls(Struct, array_like=True):
    """Calls of torch's functions in a row; a repair keeps the share `kept` of their work."""

    step: Count
    start_unix_ns: Annotated[int, Meta(ge=0, lt=2**62)]
    end_unix_ns: Annotated[int, Meta(ge=0, lt=2**62)]
    kept: Annotated[float, Meta(ge=0, le=1)]


class Repair(Struct):
    """Needless work of one kind at one place; the longest functions come first."""

    kind: str
    spans: list[Calls]
    source: str | None = None
    functions: list[str] = field(default_factory=list)


class Padding(Struct):
    """Rows of numbers: how many are no padding, and how many in rows cut to the longest."""

    what: str
    step: Count
    rows: Annotated[int, Meta(ge=1, le=2**40)]
    length: Annotated[int, Meta(ge=1, le=2**40)]
    valid: Count
    to_longest: Count
    source: str | None = None


class Embedding(Struct):
    """A table of which a step indexes some of its rows."""

    indexed: Count
    rows: Annotated[int, Meta(ge=1, le=2**40)]
    numbers: Count
    source: str | None = None


class Observed(Struct):
    """What a detail window saw of the values of tensors; see `instrument.record.observe`."""

    repairs: list[Repair] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)


class Detail(Struct):
    """The detail window: the steps after the window, and whether memory was recorded."""

    first_step: Number | None = None
    steps: Number | None = None
    memory: bool | None = None
    observed: Observed | None = None


class Config(Struct):
    """Those options of the recording session that are needed to read the capture."""

    max_stall_ms: Rate | None = None
    activities: Any = None  # names, or mappings from a name to chosen types
    profile_memory: bool | None = None
    with_flops: bool | None = None
    communication: list[str] = field(default_factory=list)
    peak_flops: Rate | dict[str, Rate] | None = None
    ranks: str | list[Rank] | None = None
    sinks: dict[str, Any] = field(default_factory=dict)
    upload_to: str | None = None
    upload_options: dict[str, Any] = field(default_factory=dict)


class InRegion(Struct):
    """A range inside code that torch.compile has compiled, and torch's id of the region."""

    range: str
    region: str


class Threads(Struct):
    """The number of torch's threads, of the CPUs they may use, and of the job's local processes."""

    intra_op: Count | None = None
    inter_op: Count | None = None
    cpus: Count | None = None
    local_ranks: Count | None = None


class Dynamo(Struct):
    """What torch.compile did within the window: graph breaks by reason, failed guards by guard."""

    graphs: Count | None = None
    graph_breaks: dict[str, Count] | None = None
    recompilations: Count | None = None
    failed_guards: dict[str, Count] | None = None


class GarbageCollection(Struct):
    """The runs of Python's garbage collector within the window, on all threads."""

    collections: Count | None = None
    total_ns: Count | None = None
    longest_ns: Count | None = None


#: A window is disturbed if the thread of its steps waits for a CPU for this share of the window.
DISTURBING_CPU_WAIT = 0.1


class CpuWait(Struct):
    """How long the thread that began the window was ready to run, but had no CPU."""

    waited_ns: Count | None = None
    ran_ns: Count | None = None
    workers_waited_ns: Count | None = None
    window_ns: Count | None = None

    @property
    def share(self) -> float | None:
        """The part of the window in which the thread waited for a CPU; None if it is not known."""
        if self.waited_ns is None or not self.window_ns:
            return None
        return self.waited_ns / self.window_ns

    @property
    def slowdown(self) -> float:
        """How many times as long something takes because the thread waits; 1 if not known."""
        return 1 + (self.waited_ns or 0) / self.ran_ns if self.ran_ns else 1.0


class Loader(Struct):
    """The settings of a `DataLoader` from which the program read batches within the window."""

    phase: str | None = None
    workers: Count | None = None
    batch_size: Count | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: Count | None = None
    iterable: bool | None = None


class Environment(Struct):
    """Facts about a window that its trace does not hold; None stands for unknown."""

    threads: Threads | None = None
    grad_enabled: bool | None = None
    anomaly_mode: bool | None = None
    float32_matmul_precision: str | None = None
    allow_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic_algorithms: bool | None = None
    dynamo: Dynamo | None = None
    garbage_collection: GarbageCollection | None = None
    cpu_wait: CpuWait | None = None
    loaders: list[Loader] | None = None


class Owner(Struct):
    """Who trains the parameters of a submodule: its optimizer (None: none), by its first step.

    `changed` is whether they changed in the window, `gradients` how many of them require gradients,
    `differentiates` whether an input of a call may require gradients, and `is_copy` whether a
    trained submodule has parameters of the same shapes.
    """

    optimizer: Count | None = None
    changed: bool = False
    gradients: Count = 0
    differentiates: bool = True
    is_copy: bool = False


class RecordingMachine(Struct):
    """The machine of a run."""

    cpus: Count | None = None
    memory_bytes: Count | None = None
    processor: str | None = None


class Metadata(Struct):
    """The keys of `capture.json` that this package reads."""

    name: str | None = None
    run: Annotated[str, Meta(max_length=64)] | None = None
    window: RecordedSteps = field(default_factory=RecordedSteps)
    started_at: Annotated[str, Meta(max_length=64)] | None = None
    rank: Rank | None = None
    world_size: WorldSize | None = None
    pid: Number | None = None
    host: Host | None = None
    machine: RecordingMachine = field(default_factory=RecordingMachine)
    command: list[str] = field(default_factory=list)
    devices: list[str] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    cost: Cost = field(default_factory=Cost)
    detail: Detail | None = None
    compiled_ranges: list[InRegion] = field(default_factory=list)
    modules_not_seen: list[str] = field(default_factory=list)
    threads_not_recorded: list[str] = field(default_factory=list)
    module_types: dict[str, str] = field(default_factory=dict)
    eval_calls: dict[str, Count] = field(default_factory=dict)
    parameter_types: dict[str, Count] = field(default_factory=dict)
    repeated_calls: dict[str, Count] = field(default_factory=dict)
    owners: dict[str, Owner] | None = None
    optimizer_steps: list[Count] | None = None
    environment: Environment | None = None
    annotations_disabled: bool = False
    user_metadata: dict[str, Any] = field(default_factory=dict)
    sinks_run: list[str] = field(default_factory=list)

    @property
    def dynamo(self) -> Dynamo | None:
        """What torch.compile did within the window; None if that is not known."""
        return None if self.environment is None else self.environment.dynamo

    @property
    def cpu_wait(self) -> CpuWait | None:
        """How long the thread of the window waited for a CPU; None if that is not known."""
        return None if self.environment is None else self.environment.cpu_wait


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the `capture.json` in a folder, and check the types of the keys in `Metadata`.

    Raises:
        CaptureError: the file is missing, is a symbolic link, is not JSON or has a newer format, or
            the value of a key has the wrong type.
    """
    path = folder / METADATA_FILE
    try:
        content = files.read_bytes(path)
    except FileNotFoundError:
        inside = sorted(found.parent.name for found in folder.glob(f"[!.]*/{METADATA_FILE}"))
        traces = [folder / name for name in TRACE_FILES if files.is_regular(folder / name)]
        hint = "."
        if traces:
            hint = f". To read its trace, give the file {traces[0]}."
        elif inside:
            hint = f". It contains captures: give one of them, such as {folder / inside[-1]}."
        raise CaptureError(
            f"The folder {folder} is no capture: it has no {METADATA_FILE}{hint}"
        ) from None
    except OSError as error:
        raise CaptureError(f"The file {path} cannot be read: {error.strerror}.") from None
    return decode_metadata(content, path)


def decode_metadata(file: bytes, path: Path | str) -> dict[str, Any]:
    """Decode a `capture.json`; `path` is its path or URL, for error messages.

    Raises:
        CaptureError: as `read_metadata`.
    """
    try:
        content = msgspec.json.decode(file, type=dict[str, Any])
    except BAD_JSON as error:
        raise CaptureError(
            f"The file {path} cannot be read ({error}); record the capture again."
        ) from None
    written = content.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise CaptureError(
            f"The file {path} has format {written}, but this version of torch-instrument reads "
            f"formats up to {FORMAT}: upgrade torch-instrument, or give the path of the trace file."
        )
    typed(content, path)
    return content


def typed(content: dict[str, Any], path: Path | str | None = None) -> Metadata:
    """Convert the decoded JSON of a `capture.json` to `Metadata`.

    Raises:
        CaptureError: the value of a key has the wrong type.
    """
    try:
        found = msgspec.convert(content, Metadata)
        unix_time(found.started_at)
    except (msgspec.ValidationError, ValueError) as error:
        where = f"The file {path}" if path else "The metadata of a capture"
        raise CaptureError(
            f"{where} cannot be understood ({error}): correct it, or give the path of the trace "
            "file."
        ) from None
    return found


def unix_time(started_at: str | None) -> float | None:
    """Convert a time in ISO format to seconds since the epoch; None gives None.

    Raises:
        ValueError: the text is not a time, or its year is out of range.
    """
    try:
        return None if started_at is None else datetime.fromisoformat(started_at).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{started_at!r} is not a time") from None
