"""`ProfilerConfig` holds all options. An option that torch also has keeps torch's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from instrument.config import activities, schedule
from instrument.config.activities import Activities
from instrument.config.instantiate import as_mapping, build, for_any_process, instantiated
from instrument.config.options import Amount, Bytes, Count, must, unwrapped
from instrument.config.presets import NO_GRAPH, preset
from instrument.config.step_actions import StepActions
from instrument.config.user_metadata import as_json
from instrument.errors import ConfigError, need_package, suggestion
from instrument.globs import check_globs
from instrument.peak_flops import check_peak_flops
from instrument.redact import public, redact


class ModulesConfig(BaseModel):
    """Which submodules of the session's model get a range; see `instrument_model`."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    depth: Count | None = Field(None, ge=0)
    include: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)
    types: list[str] = Field(default_factory=list)


class TimingsConfig(BaseModel):
    """How the whole run is timed, independently of windows and without Kineto.

    Attributes:
        every: after how many training steps a summary is appended to the timings file.
        device: also measure the times of ranges on the CUDA device, if there is one.
        modules: also time the submodules to which `instrument_model` gives ranges, in every step.
            If False, these submodules have ranges only in windows.
        tensorboard: also write each summary as TensorBoard scalars.
    """

    model_config = ConfigDict(extra="forbid")

    every: Count = Field(100, ge=1)
    device: bool = True
    modules: bool = False
    tensorboard: bool = False


class ProfilerConfig(BaseModel):
    """What to record, when, and which sinks and triggers to run; torch's options keep their names.

    The schedule counts training steps. The cycles begin after `skip_first` steps. Each cycle has
    `wait` steps without recording, then `warmup` steps whose records are discarded, then `active`
    recorded steps: the window. There are `repeat` cycles; 0 means no end. Unlike in torch, `repeat`
    is 1 by default: one window. If `skip_first_wait` is not 0, the first cycle has no `wait` steps.
    `active=None` records until the session stops. With triggers, `active=None` records only the
    windows that the triggers request; such a window has one step, unless its trigger requests more.
    Instead of cycles, `at_steps` or `every_n_steps` gives the first step of each window; `wait` is
    then ignored.

    Attributes:
        enabled: if False, the session does nothing, and most other options are not checked.
        at_steps: the first step of each window. A window has `active` steps. Its warm-up has
            `warmup` steps, or fewer if the previous window ends less than `warmup` steps earlier.
            An empty list means that only triggers request windows.
        every_n_steps: a window begins at each multiple of this number except 0, until the run ends.
        schedule: a function from a step to torch's `ProfilerAction`, such as
            `torch.profiler.schedule(…)`, or a `_target_` mapping that builds such a function. Use
            it instead of cycles, `at_steps` and `every_n_steps`. The result must depend on the step
            alone. The function is called once per step, before training reaches the step. To find
            the next window, the session calls the function for all steps up to the end of that
            window. If 1,000 steps hold no window, the search pauses until training has passed these
            steps. At its start, the session looks for the first four windows, to log the plan. A
            call of torch's function takes 0.4 µs. The session looks for the end of a window in at
            most 10,000 steps. If the function gives a longer window, this window lasts until the
            session stops.
        total_steps: how many steps the run has, counted from step 0. If a window does not fit into
            the run, the session logs a warning when the session starts.
        phases: the phases to which the schedule applies: train, validation, test, predict. Each
            phase counts its own steps.
        max_window_s: a window that has recorded for this many seconds ends with the current step.
            The capture is labelled truncated, and later windows are still recorded. If no step
            ends, as in a server without requests, the window ends after twice the time. But
            with `profile_memory`, only the thread that began the window can end it, so the window
            stays open until a step ends. None means no limit.
        max_window_memory: by how many bytes the memory of the process may grow during a window: a
            number, or text such as "4GB". At this limit, the window ends as with `max_window_s`.
            The limit is never above an eighth of the machine's memory, because torch needs about
            six times the memory of the window when the window ends. Linux only. None means no
            limit.
        activities: what to record, a list of cpu, cuda, xpu, mtia and hpu; None means all that this
            machine has. In place of a name, a mapping such as `{cuda: [GPU_MEMCPY]}` records only
            these types of the activity's events (torch 2.13). Steps and ranges are cpu events of
            the type USER_ANNOTATION.
        record_shapes: record the operators' input shapes.
        profile_memory: record every allocation and free.
        memory_categories: write the memory of torch's categories (parameters, gradients,
            activations, inputs, optimizer state, autograd detail, temporaries) to
            `memory_categories_DEVICE.json` and `.raw.json.gz`, the files of torch's
            `export_memory_timeline`. Turns on `record_shapes`, `profile_memory` and `with_stack`.
            At the end of a window, training waits 0.2 to 0.3 ms for each operator.
        with_stack: record Python stacks, which the stacks sink needs. This option slows recording
            the most.
        with_flops: compute FLOPs from shapes when the capture is read; turns on `record_shapes`.
        with_modules: record torch's module hierarchy, which torch has for TorchScript models only.
            torch 2.14 warns that the option is deprecated.
        capture_overload_names: record operators with their overload, such as `aten::add.Tensor`.
            Tables can then group operators by name and overload; by default, they group by name.
        communication: globs for kernel names, such as `*my_all_reduce*`; case is ignored. A kernel
            whose whole name matches counts as communication. Known kernels, such as NCCL's, always
            count as communication. At most 20 globs of at most 100 characters. The capture stores
            the globs.
        peak_flops: the peak FLOP/s of the devices, for `capture.efficiency`: a number for all
            precisions, or a mapping such as `{bfloat16: 989e12}`. The precisions are float64,
            float32, tf32, float16, bfloat16, float8 and int8. The capture stores the value. Missing
            peaks come from a built-in table of devices. None means that all peaks come from this
            table.
        memory_snapshot: write `memory_snapshot.pickle` to the capture: the snapshot of CUDA's
            allocator, with the allocations and frees during the window. Open this file on
            pytorch.org/memory_viz. If the program records a memory history with
            `torch.cuda.memory`, the window ends that history.
        execution_trace: write `execution_trace.json` to the capture: torch's execution trace
            (Chakra) of the window's steps, for replay and simulation. Costs about 8 µs and 1 kB per
            operator.
        experimental_config: options of torch's `_ExperimentalConfig`, checked when the session
            starts.
        emit: the tools that receive the ranges: torch, nvtx (Nsight Systems), itt (VTune).
        modules: which submodules of the session's model get a range.
        timings: how ranges and steps of the whole run are timed. None means that they are not
            timed.
        metadata: keys with JSON values for the top level of the trace and capture.json; see also
            `Session.add_metadata`.
        output_dir: the folder for captures. None means `profile/` in Hydra's run folder, or in the
            current folder without Hydra. The environment variable INSTRUMENT_DIR, if it is set,
            replaces this option.
        ranks: which ranks of a job record: all, first_per_node, or a list of global ranks. On the
            other ranks a session does nothing. If a trigger of one recording rank requests a
            window, all recording ranks record that window, at the same steps.
        export: where captures are finished. With `process`, a separate export process compresses
            the traces and runs the sinks while training continues. With `inline`, the session does
            both at the end of each window, which suits short scripts and notebooks.
        export_queue: how many windows may wait for the export process; further windows are dropped.
        export_timeout_s: how many seconds the export process may take for one window. `stop` waits
            at most the same time for all unfinished windows.
        keep: how many captures of this run and rank are kept; the oldest captures are removed. None
            means all.
        disk_budget: how many bytes the captures of this run and rank may take: a number, or text
            such as "2GB". The oldest capture is removed first; the newest capture always stays.
        upload_to: an fsspec URL such as s3://bucket/run. Each finished capture is uploaded there,
            as a folder with the capture's name. If another run has uploaded a capture NAME to this
            URL, the new folder is called NAME-2. Captures that are not uploaded yet are kept
            regardless of `keep` and `disk_budget`; `stop` waits up to `export_timeout_s` for their
            upload. None means no upload.
        upload_options: options of the URL's file system, such as `endpoint_url`. Put credentials
            into the environment, not here. Only options that cannot be secrets, such as addresses
            and booleans, are stored on disk. A later upload by `instrument export` uses none of
            them: the server's address must then be in the environment.
        preemption_grace_s: seconds from SIGTERM until the process is killed. An open window is
            saved within half of this time. None means that SIGTERM is not handled.
        sinks: a mapping from names to sinks, which write files from each capture. A value is an
            instance, or a mapping with `_target_`; built-in sinks need no `_target_`.
        triggers: a mapping from names to triggers, which may request a window after a step. A value
            is an instance, or a mapping with `_target_`; built-in triggers need no `_target_`.

    Raises:
        ConfigError: an option is unknown, has a value that cannot work, or conflicts with another
            option.
    """

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    wait: Count = Field(0, ge=0)
    warmup: Count = Field(0, ge=0)
    active: Count | None = Field(None, ge=1)
    repeat: Count = Field(1, ge=0)
    skip_first: Count = Field(0, ge=0)
    skip_first_wait: Count = Field(0, ge=0)
    at_steps: list[Annotated[Count, Field(ge=0)]] | None = None
    every_n_steps: Count | None = Field(None, ge=1)
    schedule: Any = None
    total_steps: Count | None = Field(None, ge=1)
    phases: list[Literal["train", "validation", "test", "predict"]] = Field(["train"], min_length=1)
    max_window_s: Amount | None = Field(None, gt=0)
    # an int: hydra-zen cannot build a default of the type ByteSize
    max_window_memory: Bytes | None = Field(4_000_000_000, gt=0)  # type: ignore[assignment]
    activities: Activities | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    memory_categories: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    capture_overload_names: bool = False
    communication: list[str] = Field(default_factory=list)
    peak_flops: float | dict[str, float] | None = None
    memory_snapshot: bool = False
    execution_trace: bool = False
    experimental_config: dict[str, Any] = Field(default_factory=dict)
    emit: list[Literal["torch", "nvtx", "itt"]] = Field(["torch"], min_length=1)
    modules: ModulesConfig = Field(default_factory=lambda: ModulesConfig(depth=None))
    timings: TimingsConfig | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    output_dir: str | Path | None = None
    ranks: Literal["all", "first_per_node"] | list[int] = "all"
    export: Literal["process", "inline"] = "process"
    export_queue: Count = Field(8, ge=1)
    export_timeout_s: Amount = Field(600, gt=0)
    keep: Count | None = Field(None, ge=1)
    disk_budget: Bytes | None = None
    upload_to: str | None = None
    upload_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    preemption_grace_s: Amount | None = Field(30, gt=0)
    sinks: dict[str, Any] = Field(default_factory=dict)
    triggers: dict[str, Any] = Field(default_factory=dict)

    _notes: list[str] = PrivateAttr(default_factory=list)
    # the results of `for_any_process`, by the name of the sink
    _portable: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**{name: unwrapped(value) for name, value in options.items()})
        except ValidationError as error:
            raise ConfigError(_sentence(error.errors()[0])) from None

    @property
    def notes(self) -> list[str]:
        """Sentences about options that were changed or are ignored, for the session's log."""
        return list(self._notes)

    @property
    def sinks_for_worker(self) -> dict[str, dict[str, Any]]:
        """A mapping from names to `_target_` mappings, for sinks that the export process can build.

        The `_target_` mappings may hold secrets.
        """
        return {
            name: dict(each) for name, each in self._portable.items() if isinstance(each, Mapping)
        }

    @property
    def inline_sinks(self) -> list[str]:
        """The names of the sinks that only this process can run."""
        return [name for name, each in self._portable.items() if not isinstance(each, Mapping)]

    @field_validator("activities", mode="before")
    @classmethod
    def _known_activities(cls, value: Any) -> Any:
        return None if value is None else activities.checked(value)

    @field_validator("ranks", mode="before")
    @classmethod
    def _known_ranks(cls, value: Any) -> Any:
        numbers = isinstance(value, Iterable) and not isinstance(value, str) and list(value)
        if value in ("all", "first_per_node") or (
            numbers and all(type(each) is int and each >= 0 for each in numbers)
        ):
            return numbers or value
        raise ConfigError(
            f"profiler.ranks is {value!r}, but it must be all, first_per_node, or a list of ranks "
            "such as [0, 3]."
        )

    @field_validator("metadata")
    @classmethod
    def _without_secrets(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = redact(as_json(metadata, "profiler.metadata"))
        return hidden

    @field_validator("upload_options", mode="before")
    @classmethod
    def _known_upload_options(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):  # the error must not show a value that may be a secret
            kind = type(options).__name__
            raise ConfigError(
                f"profiler.upload_options is of type {kind}, but it must be a mapping from names "
                "to values."
            )
        return as_json(options, "profiler.upload_options")

    @field_validator("communication")
    @classmethod
    def _valid_globs(cls, communication: list[str]) -> list[str]:
        check_globs(communication, "profiler.communication")
        return communication

    @field_validator("peak_flops", mode="before")
    @classmethod
    def _valid_peaks(cls, peak_flops: Any) -> Any:
        return check_peak_flops(peak_flops, "profiler.peak_flops")

    @field_validator("sinks", "triggers", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn a list of names into a mapping; in a mapping, remove entries with the value null."""
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping | BaseModel):
            names = list(value)
            for given in names:
                if not isinstance(given, str):
                    raise ConfigError(
                        f"profiler.{info.field_name} is a list that holds {given!r}, but a list "
                        f"may hold only names of built-in {info.field_name}: give a mapping "
                        "instead, whose keys are names that you choose."
                    )
            return {name: {} for name in names}
        return (
            {name: sink for name, sink in value.items() if sink is not None}
            if isinstance(value, Mapping)
            else value
        )

    @model_validator(mode="after")
    def _consistent(self) -> ProfilerConfig:
        if not self.enabled:
            return self
        if self.schedule is not None and not isinstance(self.schedule, StepActions):
            self.schedule = StepActions(self.schedule)
        if conflict := schedule.conflict(self) or activities.conflict(self):
            raise ConfigError(conflict)
        if self.with_flops and not self.record_shapes:
            self.record_shapes = True
            self._notes.append(
                "profiler.with_flops=true turned profiler.record_shapes on: FLOPs are computed "
                "from shapes."
            )
        needed = ("record_shapes", "profile_memory", "with_stack")
        if self.memory_categories and not all(getattr(self, name) for name in needed):
            self.record_shapes = self.profile_memory = self.with_stack = True
            self._notes.append(
                "profiler.memory_categories=true turned profiler.record_shapes, profile_memory and "
                "with_stack on: torch needs their data to classify memory."
            )
        if self.timings is not None and self.timings.tensorboard:
            need_package("profiler.timings.tensorboard=true", "tensorboard", "tensorboard")
        if self.upload_to is not None:
            from instrument import storage

            storage.check(self.upload_to, "profiler.upload_to")
        given = self.sinks
        self.sinks = {name: build("sink", name, each) for name, each in given.items()}
        self._portable = {
            name: for_any_process(sink, given[name]) for name, sink in self.sinks.items()
        }
        self.triggers = {
            name: build("trigger", name, given) for name, given in self.triggers.items()
        }
        if ignored := schedule.ignored_options(self):
            self._notes.append(ignored)
        for name, sink in self.sinks.items():
            for option in getattr(sink, "needs", ()):
                if not getattr(self, option):
                    raise ConfigError(
                        f"The {name} sink needs profiler.{option}=true, but it is false."
                    )
        return self

    def plain(self) -> dict[str, Any]:
        """The options as JSON values; sinks and triggers become `_target_` mappings.

        Values that may be secrets are left out: most of `upload_options`, and the values that
        `redact.redact` hides.
        """
        options = self.model_dump(mode="json", exclude={"sinks", "triggers", "schedule"})
        options["schedule"] = None if self.schedule is None else self.schedule.described()
        options["sinks"] = {
            name: each if isinstance(each, Mapping) else as_mapping(each)
            for name, each in self._portable.items()
        }
        options["triggers"] = {name: as_mapping(value) for name, value in self.triggers.items()}
        kept = {
            "upload_options": public(self.upload_options),
            "upload_to": self.upload_to,
        }  # these values hold no secrets
        plain: dict[str, Any] = redact(options) | kept
        return plain


def as_config(source: Any = MappingProxyType({}), /, **options: Any) -> ProfilerConfig:
    """Make a `ProfilerConfig` from a preset's name, a mapping, a Hydra config or a dataclass.

    Each of the `options` replaces the option of the same name in `source`. If `source` is None
    and there are no options, nothing is recorded. So `cfg.get("profiler")` may be passed even if
    the application's config has no key `profiler`.

    Raises:
        ConfigError: an option is wrong, `source` has another type, or `source` names a preset that
            does not exist.
    """
    if isinstance(source, ProfilerConfig):
        if not options:
            return source
        # a disabled config has not built its sinks
        sinks = source._portable if source.enabled else source.sinks
        given: Any = {name: getattr(source, name) for name in source.model_fields_set} | {
            "sinks": sinks
        }
    elif isinstance(source, str):
        given = preset(source)
    elif source is None:
        given = {} if options else {"enabled": False}
    elif isinstance(source, DictConfig):
        given = _resolved(source)
    elif is_dataclass(source):
        given = _resolved(OmegaConf.structured(source, flags={"allow_objects": True}))
    else:
        given = source
    if not isinstance(given, Mapping):
        hint = " (a schedule is given as schedule=…)" if callable(given) else ""
        raise ConfigError(
            f"The profiler config is {source!r}, but it must be a mapping, a preset's name or a "
            f"ProfilerConfig{hint}."
        )
    if "_target_" in given:  # a mapping that describes a ProfilerConfig: build it
        return as_config(instantiated("profiler", given), **options)
    return ProfilerConfig(**{str(key): value for key, value in given.items()} | options)


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

# The end of the error "NAME is not an option", for options of torch or of an earlier version.
_HINTS = {
    "profiler.graph": f" any more: {NO_GRAPH}",
    "profiler.on_trace_ready": ": choose sinks instead, which process each window, as in "
    "sinks=[chrome_trace], or write your own; session.captures also holds the recorded windows.",
}
_MODELS: dict[str, type[BaseModel]] = {
    "": ProfilerConfig,
    "modules": ModulesConfig,
    "timings": TimingsConfig,
}


def _sentence(error: ErrorDetails) -> str:
    """One sentence about an error that pydantic found."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    path = ".".join(("profiler", *map(str, error["loc"])))
    value = error["input"]
    if error["type"] == "extra_forbidden":
        *above, last = map(str, error["loc"])
        known = _MODELS[above[0] if above else ""].model_fields
        hint = (
            suggestion(last, known, ".".join(("profiler", *above, "")))
            or f": choose from {', '.join(known)}."
        )
        return f"{path} is not an option{_HINTS.get(path, hint)}"
    if path == "profiler.active" and error["type"] == "greater_than_equal":
        return f"profiler.active is {value}, but a window needs at least one step."
    options = _MODELS.get(str(error["loc"][0]), BaseModel).model_fields
    return f"{path} is {value!r}, but it {must(error, options)}."


__all__ = ["ProfilerConfig", "as_config"]
