"""`ProfilerConfig` holds all options. An option that torch also has keeps torch's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from instrument.base.errors import ConfigError, need_package
from instrument.base.globs import check_globs
from instrument.base.instantiate import as_mapping, build, by_name, for_any_process, instantiated
from instrument.base.options import Amount, Bytes, Count, Options
from instrument.base.peak_flops import check_peak_flops
from instrument.base.presets import preset
from instrument.base.redact import public, redact
from instrument.base.user_metadata import as_json
from instrument.record.config import activities, schedule
from instrument.record.config.activities import Activities

if TYPE_CHECKING:
    from instrument.record.config.keywords import ProfilerOptions

# the options that a trigger's `records` may replace
_OF_A_WINDOW = frozenset({
    "record_shapes", "profile_memory", "memory_categories", "with_stack", "with_flops",
    "profile_all_threads", "with_modules", "memory_snapshot",
    "execution_trace", "experimental_config", "max_stall_ms", "max_window_s",
    "max_window_memory",
})  # fmt: skip

# If none of these is given, the preset `summary` says when to record.
_SAY_WHEN = frozenset({
    "enabled", "active", "at_steps", "every_n_steps", "schedule", "timings", "triggers",
})  # fmt: skip


#: What stands for a config that was not given; LightningCLI copies it and writes it to a file.
NO_CONFIG: Mapping[str, Any] = {}


class ModulesConfig(Options, frozen=True):  # type: ignore[misc] # mypy: its base is not
    """Which submodules of the session's model get a range; see `instrument_model`."""

    _place = "profiler.modules"

    enabled: bool = True
    """Whether submodules get ranges."""

    depth: Count | None = Field(None, ge=0)
    """0: only the model itself; 1: also its children; None: no limit."""

    include: list[str] = Field(default_factory=list)
    """Globs over qualified names; empty: all."""

    exclude: list[str] = Field(default_factory=list)
    """Globs over qualified names to leave out."""

    types: list[str] = Field(default_factory=list)
    """Globs over class names; empty: all."""


class TimingsConfig(Options, frozen=True):  # type: ignore[misc] # mypy: its base is not
    """How the whole run is timed, independently of windows and without Kineto."""

    _place = "profiler.timings"

    every: Count = Field(100, ge=1)
    """Training steps between two summaries in the timings file."""

    device: bool = True
    """Also measure ranges on the CUDA device, if there is one."""

    modules: bool = False
    """Also time the submodules with ranges, in every step. If False, those to which
    `instrument_model` gives ranges have them only in windows."""

    tensorboard: bool = False
    """Also write each summary as TensorBoard scalars."""


class MetricsConfig(Options, frozen=True):  # type: ignore[misc] # mypy: its base is not
    """Where the timings are exported to while the run goes on: to Prometheus, by OTLP, or both."""

    _place = "profiler.metrics"

    prometheus_port: Count | None = Field(None, ge=0, le=65_535)
    """The port that Prometheus reads, plus the local rank; 0: any free port, see the log."""

    prometheus_host: str = "127.0.0.1"
    """The address of the port; 0.0.0.0: all of this machine's. Readers need no password."""

    otlp: bool = False
    """Send metrics by OTLP/HTTP, to where the variables OTEL_EXPORTER_OTLP_… say."""

    every_s: Amount = Field(15, ge=0.1, le=3600)
    """Seconds from one OTLP request to the next."""

    def check(self, timings: TimingsConfig | None) -> None:
        """Raise if something that these options need is missing."""
        if timings is None or not (self.otlp or self.prometheus_port is not None):
            raise ConfigError(
                "profiler.metrics needs profiler.timings={}, and prometheus_port or otlp=true."
            )
        if self.prometheus_port is not None:
            need_package("profiler.metrics.prometheus_port", "prometheus_client", "prometheus")
        if self.otlp:
            need_package("profiler.metrics.otlp", "opentelemetry.exporter.otlp.proto.http", "otlp")


class ProfilerConfig(Options, frozen=True):  # type: ignore[misc] # mypy: its base is not
    """What to record, when, and which sinks and triggers to run; torch's options keep their names.

    The schedule counts training steps. After `skip_first` steps, `repeat` cycles begin, each of
    `wait` steps without recording, `warmup` steps whose records are discarded, and `active`
    recorded steps: the window. Unlike in torch, `repeat` is 1 by default: one window.
    `active=None` records until the session stops. With triggers, `active=None` records only the
    windows that the triggers request; such a window has one step, unless its trigger requests more.
    If only timings are given, no window is recorded.
    If no option says when to record, a session takes the schedule of the preset `summary`.
    Instead of cycles, `at_steps` or `every_n_steps` gives the first step of each window; `wait` is
    then ignored.

    A config cannot be changed: `replace` makes another one.

    Raises:
        ConfigError: an option is unknown, has a value that cannot work, or conflicts with another
            option.
    """

    _place = "profiler"

    enabled: bool = True
    """False: the session does nothing, and most other options are not checked."""

    wait: Count = Field(0, ge=0)
    """Idle steps at the start of each cycle."""

    warmup: Count = Field(0, ge=0)
    """Steps recorded and discarded before a window; the first are slower."""

    active: Count | None = Field(None, ge=1)
    """Steps per window; None: until the end, or only windows of triggers."""

    repeat: Count = Field(1, ge=0)
    """Number of cycles; 0: without end."""

    skip_first: Count = Field(0, ge=0)
    """Steps before the first cycle."""

    at_steps: list[Annotated[Count, Field(ge=0)]] | None = None
    """The first steps of windows, in place of cycles; `[]`: only triggers. A warm-up is shorter
    than `warmup` if the previous window ends less than `warmup` steps earlier."""

    every_n_steps: Count | None = Field(None, ge=1)
    """In place of cycles: a window begins at each multiple of this, except 0."""

    total_steps: Count | None = Field(None, ge=1)
    """Steps of the whole run from 0 on, to warn of windows that do not fit."""

    phases: list[str] = Field(["train"], min_length=1)
    """The scheduled phases: train, or the name of a `session.phase`, such as validation or rollout.
    Each counts its own steps."""

    max_window_s: Amount | None = Field(None, gt=0)
    """Seconds of recording after which a window ends; None: no limit. It ends with the current
    step, and is labelled truncated; later windows are still recorded. If no step ends, as in a
    server without requests, it ends after twice the time if `profile_all_threads` is on. Otherwise
    only the thread that began the window can end it, when a step ends."""

    # an int: hydra-zen cannot build a default of the type ByteSize
    max_window_memory: Bytes | None = Field(4_000_000_000, gt=0)  # type: ignore[assignment]
    """Growth of memory in a window, in bytes or as "4GB"; None: no limit. When the process has
    grown by this, the window ends as with `max_window_s`. The limit is at most an eighth of the
    machine's memory: torch needs about six times the window's when it ends. Linux only."""

    max_stall_ms: Amount | None = Field(None, gt=0)
    """How long training may wait at the end of a window, in ms; None: as long as it takes. A window
    that would take longer is cut into parts, which follow each other without a missing step; the
    first has one step. Each is a capture of its own, with `part` in its `capture.json`. A step that
    alone takes longer is said."""

    activities: Activities | None = None
    """A list of cpu, cuda, xpu, mtia and hpu; None: all that this machine has. In place of a name,
    `{cuda: [GPU_MEMCPY]}` records only these types of events (torch 2.13). Steps and ranges are cpu
    events of the type USER_ANNOTATION."""

    record_shapes: bool = False
    """Record operators' input shapes. torch then takes 3 to 5 times as long to end a window."""

    profile_memory: bool = False
    """Record every allocation and free."""

    memory_categories: bool = False
    """Memory by category; turns on `record_shapes`, `profile_memory`, `with_stack`. torch's
    categories are parameters, gradients, activations, inputs, optimizer state, autograd detail and
    temporaries. Writes `memory_categories_DEVICE.json` and `.raw.json.gz`, the files of torch's
    `export_memory_timeline`. At the end of a window, training waits 0.2 to 0.3 ms per operator."""

    with_stack: bool = False
    """Record Python stacks, for the stacks sink; slows recording the most. torch then removes a
    profile hook of the program (`sys.setprofile`)."""

    with_flops: bool = False
    """Compute FLOPs from shapes, when a capture is read; turns on `record_shapes`."""

    profile_all_threads: bool = False
    """Record all threads, not only the one that begins the window; excludes `profile_memory`. For
    servers that compute on several threads: any thread may then call `session.step`. The end of a
    window waits 50 ms for the other threads, because torch would otherwise crash."""

    with_modules: bool = False
    """Record torch's module hierarchy, for TorchScript models only. Deprecated in torch 2.14."""

    communication: list[str] = Field(default_factory=list)
    """Globs of more kernels that count as communication: `["*my_kernel*"]`. A glob matches the
    whole name, in any case. Known kernels, such as NCCL's, always count. At most 20 globs of at
    most 100 characters, which the capture stores."""

    peak_flops: float | dict[str, float] | None = None
    """Peak FLOP/s of the devices, or `{bfloat16: 989e12}`; None: a built-in table. For
    `capture.efficiency`; the capture stores the value. A number is the peak of all precisions. A
    mapping has keys of float64, float32, tf32, float16, bfloat16, float8 and int8; what it lacks
    comes from the table."""

    memory_snapshot: bool = False
    """Write a snapshot of CUDA's allocator, for pytorch.org/memory_viz. `memory_snapshot.pickle`
    has the allocations and frees of the window. If the program records a memory history with
    `torch.cuda.memory`, the window ends that history."""

    execution_trace: bool = False
    """Write torch's execution trace (Chakra) of the window's steps. `execution_trace.json` is for
    replay and simulation. It costs about 8 µs and 1 kB per operator."""

    experimental_config: dict[str, Any] = Field(default_factory=dict)
    """Options of torch's `_ExperimentalConfig`, checked when the session starts."""

    emit: list[Literal["torch", "nvtx", "itt"]] = Field(["torch"], min_length=1)
    """The tools that receive ranges: torch, nvtx (Nsight Systems), itt (VTune)."""

    modules: ModulesConfig = Field(default_factory=lambda: ModulesConfig(depth=None))
    """Which submodules of the session's model get a range."""

    timings: TimingsConfig | None = None
    """How ranges and steps of the whole run are timed; None: not at all."""

    detail: Count = Field(0, ge=0)
    """Steps recorded after the first window of a phase for shapes, types and memory, which a window
    lacks without `record_shapes`. No time comes from them. Each window has them with `keep=1`; none
    has with `max_stall_ms`, or if the next window begins sooner."""

    lines: bool = False
    """Whether to sample, 100 times a second in the whole run, which lines of the code run."""

    metrics: MetricsConfig | None = None
    """Where the timings are exported to while the run goes on; None: nowhere."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Keys with JSON values for the trace and capture.json. See also `Session.add_metadata`."""

    output_dir: str | Path | None = None
    """The folder for captures; None: `profile/` in Hydra's or the current folder. INSTRUMENT_DIR in
    the environment replaces this option."""

    ranks: Literal["all", "first_per_node", "one_per_role"] | list[int] = "all"
    """Ranks that record: all, first_per_node, one_per_role, or a list such as [0, 3]. With
    one_per_role, all ranks record and write `summary.json`, but only the first rank of each
    data-parallel group keeps its trace and runs the sinks. On ranks that do not record, the session
    does nothing. If a trigger of a rank that records requests a window, all of them record it, at
    the same steps."""

    export: Literal["process", "inline"] = "process"
    """`process`: sinks run in another process; `inline`: at the end of each window. The other
    process also compresses traces, while training continues; `inline` suits short scripts and
    notebooks, and sinks whose class only the script itself can import."""

    export_timeout_s: Amount = Field(600, gt=0)
    """Seconds that the export of a window may take. `stop` waits at most as long for all
    windows."""

    keep: Count | None = Field(None, ge=1)
    """How many of the newest captures of this run and rank to keep; None: all."""

    disk_budget: Bytes | None = None
    """Bytes, or "2GB", for this run's and rank's captures; None: any number. The oldest is removed
    first; the newest stays."""

    upload_to: str | None = None
    """An fsspec URL for finished captures, such as s3://bucket/run; None: none. A capture becomes a
    folder there, named after the capture and its run. Until then, it is kept regardless of `keep`
    and `disk_budget`; `stop` waits for it up to `export_timeout_s`."""

    upload_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the URL's file system, such as `endpoint_url`; no credentials. Credentials belong
    in the environment: only options that cannot be secrets, such as addresses and booleans, are
    stored on disk. A later `instrument export` uses none of them, so the address must then be in
    the environment too."""

    preemption_grace_s: Amount | None = Field(30, gt=0)
    """Seconds from SIGTERM until the kill; None: SIGTERM is not handled. An open window is saved
    within half of this time."""

    sinks: dict[str, Any] = Field(default_factory=dict)
    """What to write from each capture: a mapping from names to sinks. A sink is an instance, or a
    mapping with `_target_`, which built-in sinks do not need."""

    on_capture: dict[str, Any] = Field(default_factory=dict)
    """What to call in the training process with each capture: a function, or a mapping from names
    to functions. A function gets the capture's folder and the numbers of its `scalars.json`:
    `rank`, `step`, and the scalars of the TensorBoard sink by tag. It is called at the next end of
    a step outside windows, or by `stop`; training waits for it. In place of a function, give a
    mapping with `_target_`, which the built-in `wandb` and `mlflow` do not need."""

    triggers: dict[str, Any] = Field(default_factory=dict)
    """What may request a window after a step: a mapping from names to triggers. A trigger is an
    instance, or a mapping with `_target_`, which built-in triggers do not need."""

    _notes: list[str] = PrivateAttr(default_factory=list)
    # the results of `for_any_process`, by the name of the sink
    _sink_mappings: dict[str, dict[str, Any] | None] = PrivateAttr(default_factory=dict)
    # options of windows that triggers request, by the name of the trigger
    _of_triggers: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    def __init__(self, **options: Any) -> None:
        if "on_trace_ready" in options:
            raise ConfigError(
                "profiler.on_trace_ready is not an option: choose sinks instead, which process "
                "each window, as in sinks=[chrome_trace], or read session.captures."
            )
        if "schedule" in options:
            raise ConfigError(
                "profiler.schedule is not an option: give the numbers of torch.profiler.schedule "
                "as options, such as wait=1, warmup=1, active=3, repeat=1."
            )
        super().__init__(**options)

    def replace(self, **options: Unpack[ProfilerOptions]) -> ProfilerConfig:
        """A config with other values for some options; it is checked like a new one."""
        return as_config(self, **options)

    @property
    def notes(self) -> list[str]:
        """Sentences about options that were changed or are ignored, for the session's log."""
        return list(self._notes)

    def of_trigger(self, name: str | None) -> ProfilerConfig:
        """The options of the windows that a trigger requests; None stands for the schedule."""
        update = self._of_triggers.get(name or "")
        return self.model_copy(update=update) if update else self

    @property
    def sinks_for_exporter(self) -> dict[str, dict[str, Any]]:
        """`_target_` mappings of the sinks that any process can build; may hold secrets."""
        return {name: each for name, each in self._sink_mappings.items() if each is not None}

    @field_validator("active", mode="before")
    @classmethod
    def _at_least_one_step(cls, value: Any) -> Any:
        if type(value) is int and value < 1:
            raise ConfigError(f"profiler.active is {value}, but a window needs at least one step.")
        return value

    @field_validator("ranks", mode="before")
    @classmethod
    def _known_ranks(cls, value: Any) -> Any:
        numbers = isinstance(value, Iterable) and not isinstance(value, str) and list(value)
        if value in ("all", "first_per_node", "one_per_role") or (
            numbers and all(type(each) is int and each >= 0 for each in numbers)
        ):
            return numbers or value
        raise ConfigError(
            f"profiler.ranks is {value!r}, but it must be all, first_per_node, one_per_role, or a "
            "list of ranks such as [0, 3]."
        )

    @field_validator("phases")
    @classmethod
    def _fit_for_a_folder(cls, phases: list[str]) -> list[str]:
        for each in phases:
            if not each.isidentifier():
                raise ConfigError(
                    f"profiler.phases holds {each!r}, but the name of a phase consists of letters, "
                    "digits and underscores, such as train, validation or rollout."
                )
        return phases

    @field_validator("metadata")
    @classmethod
    def _without_secrets(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = redact(as_json(metadata, "profiler.metadata"))
        return hidden

    @field_validator("upload_options", mode="before")
    @classmethod
    def _known_upload_options(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):  # the error must not show a value that may be a secret
            raise ConfigError(
                f"profiler.upload_options is of type {type(options).__name__}, but it must be a "
                "mapping from names to values."
            )
        return as_json(options, "profiler.upload_options")

    @field_validator("communication")
    @classmethod
    def _valid_globs(cls, communication: list[str]) -> list[str]:
        return list(check_globs(communication, "profiler.communication"))

    @field_validator("peak_flops", mode="before")
    @classmethod
    def _valid_peaks(cls, peak_flops: Any) -> Any:
        return check_peak_flops(peak_flops, "profiler.peak_flops")

    @field_validator("sinks", "triggers", "on_capture", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "on_capture" and callable(value):
            name = getattr(value, "__name__", type(value).__name__)
            return {name if name.isidentifier() else "function": value}
        return by_name(str(info.field_name), value)

    @model_validator(mode="after")
    def _consistent(self) -> ProfilerConfig:
        if not self.enabled:
            return self
        if conflict := schedule.conflict(self) or activities.conflict(self):
            raise ConfigError(conflict)
        if self.with_flops:
            self._turn_on(
                ["record_shapes"],
                "profiler.with_flops=true turned profiler.record_shapes on: FLOPs are computed "
                "from shapes.",
            )
        if self.memory_categories:
            self._turn_on(
                ["record_shapes", "profile_memory", "with_stack"],
                "profiler.memory_categories=true turned profiler.record_shapes, profile_memory and "
                "with_stack on: torch needs their data to classify memory.",
            )
        if self.timings is not None and self.timings.tensorboard:
            need_package("profiler.timings.tensorboard=true", "tensorboard", "tensorboard")
        if self.metrics is not None:
            self.metrics.check(self.timings)
        if self.upload_to is not None:
            from instrument.base import storage

            storage.check(self.upload_to, "profiler.upload_to")
        for name, given in self.triggers.items():
            self.triggers[name] = build("trigger", name, given)
        if ignored := schedule.ignored_options(self):
            self._notes.append(ignored)
        for name, given in self.sinks.items():
            self.sinks[name] = sink = build("sink", name, given)
            self._sink_mappings[name] = for_any_process(sink, given)
            if self._sink_mappings[name] is None and self.export == "process":
                raise ConfigError(
                    f"profiler.sinks.{name} is a {type(sink).__qualname__} that the export process "
                    "cannot build: give a subclass of instrument.Sink from a module that can be "
                    "imported, or set profiler.export=inline, or give a function to call in this "
                    "process: on_capture=lambda folder, scalars: …"
                )
            for option in getattr(sink, "needs", ()):
                if not getattr(self, option):
                    raise ConfigError(
                        f"The {name} sink needs profiler.{option}=true, but it is false."
                    )
        for name, given in self.on_capture.items():
            self.on_capture[name] = build("callback", name, given)
        for name, trigger in self.triggers.items():
            if records := getattr(trigger, "records", None):
                self._of_triggers[name] = _checked_records(name, records)
        return self

    def _turn_on(self, needed: list[str], note: str) -> None:
        if not all(getattr(self, name) for name in needed):
            self.__dict__.update(dict.fromkeys(needed, True))
            self.model_fields_set.update(needed)
            self._notes.append(note)

    def plain(self) -> dict[str, Any]:
        """The options as JSON values; sinks, triggers and callbacks become `_target_` mappings.

        Values that may be secrets are left out: most of `upload_options`, and the values that
        `redact.redact` hides.
        """
        options = self.model_dump(mode="json", exclude={"sinks", "triggers", "on_capture"})
        options["sinks"] = {
            name: self._sink_mappings.get(name) or as_mapping(value, value)
            for name, value in self.sinks.items()
        }
        for group in ("triggers", "on_capture"):
            options[group] = {name: as_mapping(each) for name, each in getattr(self, group).items()}
        # these hold no secrets
        kept = {"upload_options": public(self.upload_options), "upload_to": self.upload_to}
        plain: dict[str, Any] = redact(options) | kept
        return plain


def _checked_records(name: str, records: Any) -> dict[str, Any]:
    if not isinstance(records, Mapping) or not records.keys() <= _OF_A_WINDOW:
        raise ConfigError(
            f"The {name} trigger's records are {records!r}, but they must be a mapping with keys "
            f"of {', '.join(sorted(_OF_A_WINDOW))}."
        )
    checked = ProfilerConfig(**records)  # which may turn on more options than these
    return {option: getattr(checked, option) for option in checked.model_fields_set}


def as_config(source: Any = NO_CONFIG, /, **options: Any) -> ProfilerConfig:
    """Make a `ProfilerConfig` from a preset's name, a mapping, a Hydra config or a dataclass.

    Each of the `options` replaces the option of the same name in `source`. If `source` is None, as
    `cfg.get("profiler")` is for an application without a profiler, nothing is recorded. If no
    option says when to record, the preset `summary` does, and `source` and `options` override it.

    Raises:
        ConfigError: an option is wrong, there is no such preset, or `source` has another type.
    """
    if isinstance(source, ProfilerConfig):
        given: Any = {name: getattr(source, name) for name in source.model_fields_set}
        if not options and given.keys() & _SAY_WHEN:
            return source
        if source.enabled and "sinks" in given:  # a disabled config has not built its sinks
            given["sinks"] = source.sinks | source.sinks_for_exporter
    elif isinstance(source, str):
        given = preset(source)
    elif source is None:
        given, options = {}, options | {"enabled": False}
    elif isinstance(source, DictConfig):
        given = _resolved(source)
    elif is_dataclass(source):
        given = _resolved(OmegaConf.structured(source, flags={"allow_objects": True}))
    else:
        given = source
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"The profiler config is {source!r}, but it must be a mapping, a preset's name or a "
            "ProfilerConfig."
        )
    if "profiler" in given:
        raise ConfigError(
            'The profiler config has the key "profiler", as the config of a whole application '
            'has: give only what this key holds, as in Session(cfg["profiler"]).'
        )
    if "_target_" in given:  # a mapping that describes a ProfilerConfig: build it
        return as_config(instantiated("profiler", given), **options)
    given = {str(key): value for key, value in given.items()} | options
    if not given.keys() & _SAY_WHEN:
        given = preset("summary") | given
    return ProfilerConfig(**given)


def _resolved(source: DictConfig) -> Any:
    """The config as dicts and lists. Interpolations may refer to any part of the whole config."""
    try:
        return OmegaConf.to_container(source, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"The profiler config has a value that OmegaConf cannot resolve: {error}"
        ) from None


# hydra-zen reads the signature of `__init__`, not the signature of the class.
_self = Parameter("self", Parameter.POSITIONAL_ONLY)
_parameters = [_self, *signature(ProfilerConfig).parameters.values()]
ProfilerConfig.__init__.__signature__ = Signature(_parameters)  # type: ignore[attr-defined]

__all__ = ["ProfilerConfig", "as_config"]
