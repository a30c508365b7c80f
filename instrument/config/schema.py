"""`ProfilerConfig`: every option, with torch's own names, and the presets that ship."""

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
from instrument.patterns import check_pattern
from instrument.redact import public, redact


class ModulesConfig(BaseModel):
    """Which submodules of the session's model get a range; the options of `instrument_model`, and `enabled`."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    depth: Count | None = Field(None, ge=0)
    include: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)
    types: list[str] = Field(default_factory=list)


class TimingsConfig(BaseModel):
    """How the whole run is timed, beside windows and without Kineto.

    Attributes:
        every: steps from one write to the next.
        device: time ranges on the CUDA device too, where there is one.
        modules: time the submodules of `instrument_model` on every step; else their ranges are open in windows alone.
        tensorboard: write each summary as TensorBoard scalars too.
    """

    model_config = ConfigDict(extra="forbid")

    every: Count = Field(100, ge=1)
    device: bool = True
    modules: bool = False
    tensorboard: bool = False


class ProfilerConfig(BaseModel):
    """What to record, when, and what to make of it. Flat, with torch's own names where torch has one.

    The schedule counts training steps: after `skip_first` steps come `repeat` cycles (0: without end) of `wait` idle,
    `warmup` discarded and `active` recorded steps; `skip_first_wait` other than 0 leaves out the first cycle's wait.
    `active=None` records until the session stops or, where triggers may ask for windows, only what they ask for, a step
    each unless they say more. Unlike torch, `repeat` is 1 unless given: one window. In place of cycles, `at_steps` or
    `every_n_steps` name the first steps of windows, and `wait` is not looked at.

    Attributes:
        enabled: False: the session does nothing, and the other options are not looked at further.
        at_steps: a window of `active` steps from each of these on, warmed up for where there is room; an empty list: no
            window but those that triggers ask for.
        every_n_steps: the same from each multiple of this number on, without end.
        schedule: in place of all these numbers, `torch.profiler.schedule(…)` or any other function from a step to
            torch's `ProfilerAction`, or a `_target_` mapping that makes one. It must depend on the step alone: each is
            asked for once, at least a thousand steps ahead and to the end of the next four windows at the start;
            torch's takes 0.4 µs. A window of more than 10,000 steps lasts until the session stops.
        total_steps: how many steps the run has, counted from 0, where that is known; the session warns at its start of
            a window that has no room in it.
        phases: in which phases the schedule is followed, of train, validation, test and predict; each counts its own
            steps.
        max_window_s: a window that has recorded for so many seconds ends with the step that runs then, labelled
            truncated; later windows still come. Where no step ends, as in a server without requests, it ends after
            twice the time, but not on a thread that cannot (`profile_memory`). None: no such limit.
        max_window_memory: the same for a window during which the process grows by so many bytes, as a number or as in
            "4GB"; but no more than an eighth of the machine's memory, as torch takes six times as much when it stops.
            Linux only.
        activities: of cpu, cuda, xpu, mtia, hpu; None: what this machine has. `{cuda: [GPU_MEMCPY]}` in place of a
            name keeps only these types of it (torch 2.13). Steps and ranges are cpu's USER_ANNOTATION.
        record_shapes: keep the operators' input shapes.
        profile_memory: keep every allocation and release.
        memory_categories: what memory was for (parameters, gradients, activations, inputs, optimizer state, autograd's
            detail, temporaries) as torch classifies it, in `memory_categories_DEVICE.json` and `.raw.json.gz`, which
            are those of torch's `export_memory_timeline`; turns on what it needs, `record_shapes`, `profile_memory` and
            `with_stack`. Training waits for it at the end of the window: 0.2 to 0.3 ms for each operator.
        with_stack: keep the Python stack; needed by the stacks sink. The costliest option while recording.
        with_flops: compute FLOPs from the shapes when the capture is read; turns `record_shapes` on.
        with_modules: torch's module hierarchy, which it records for TorchScript models only.
        capture_overload_names: write operators with their overload, `aten::add.Tensor`, so that they can be grouped by
            it; tables name them without it as ever.
        communication: regular expressions for names of kernels that count as communication, in any case, besides those
            that are known to be; they are kept with the capture, and whoever reads it counts so.
        memory_snapshot: put the snapshot of CUDA's allocator, with its allocations and frees during the window, into
            the capture as memory_snapshot.pickle (pytorch.org/memory_viz opens it). A history that the program has
            `torch.cuda.memory` record itself ends with the window.
        execution_trace: torch's execution trace (Chakra) of the window's steps, as execution_trace.json in the
            capture: for replay and simulation; costly, some 8 µs and a kB for each operator.
        experimental_config: options of torch's `_ExperimentalConfig`, checked against this torch's at the start.
        emit: which tools see the ranges: of torch, nvtx (Nsight Systems) and itt (VTune).
        modules: which submodules of the session's model get a range.
        timings: how ranges and steps are timed in the whole run; None: not at all.
        metadata: keys with JSON values for the trace's top level and capture.json; see also `Session.add_metadata`.
        output_dir: the folder for captures; None: `profile/` in Hydra's run folder, else in the current one.
        ranks: which ranks of a job record: all, first_per_node, or a list of global ranks; on the others a session does
            nothing. What a trigger of one asks for, all of them record, at the same steps.
        export: `process`: another process compresses the traces and runs the sinks while training goes on; `inline`:
            the session does, at the end of each window, as short scripts and notebooks want it.
        export_queue: windows that may wait for that process; further ones are dropped.
        export_timeout_s: seconds that one window may take there, and that `stop` waits for what is left.
        keep: captures of this run and rank that are kept, the last ones; None: all.
        disk_budget: bytes that they may take, as a number or as in "2GB": the oldest go first, the last stays.
        upload_to: a URL that fsspec knows, as s3://bucket/run, below which each finished capture is sent, into a folder
            of its name; another run's of that name stays, and the new one is called NAME-2. None: not sent. What has
            not arrived is kept, whatever `keep` and `disk_budget` say; `stop` waits `export_timeout_s` for it.
        upload_options: for that file system, as `endpoint_url`. Credentials are best left to the environment: of these
            options capture.json keeps only addresses and what is true or false, and `instrument export`, which sends
            what is left, knows no others.
        preemption_grace_s: seconds from SIGTERM until the process is killed, of which half may pass before an open
            window is saved; None: SIGTERM is left alone.
        sinks: name -> what writes something from each capture: an instance, or a mapping with `_target_`; the sinks
            that ship need no `_target_`.
        triggers: name -> what may ask for a window after any step; given as sinks are.

    Raises:
        ConfigError: an option is unknown, has a value that cannot work, or contradicts another.
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
    max_window_memory: Bytes | None = Field(4_000_000_000, gt=0)  # type: ignore[assignment] # a ByteSize is no default that hydra-zen can build
    activities: Activities | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    memory_categories: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    capture_overload_names: bool = False
    communication: list[str] = Field(default_factory=list)
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
    _portable: dict[str, Any] = PrivateAttr(default_factory=dict)  # of each sink `for_any_process`

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**{name: unwrapped(value) for name, value in options.items()})
        except ValidationError as error:
            raise ConfigError(_sentence(error.errors()[0])) from None

    @property
    def notes(self) -> list[str]:
        """What was changed on the user's behalf or is not looked at; the session says these sentences at its start."""
        return list(self._notes)

    @property
    def sinks_for_worker(self) -> dict[str, dict[str, Any]]:
        """The `_target_` mappings, by name, of the sinks that another process can build; they may hold secrets."""
        return {
            name: dict(each) for name, each in self._portable.items() if isinstance(each, Mapping)
        }

    @property
    def inline_sinks(self) -> list[str]:
        """The sinks that only this process can run: they ask for it, or another could not build the same."""
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
            f"profiler.ranks is {value!r}, but it must be all, first_per_node, or a list of ranks such as [0, 3]."
        )

    @field_validator("metadata")
    @classmethod
    def _writable(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = redact(as_json(metadata, "profiler.metadata"))
        return hidden

    @field_validator("upload_options", mode="before")
    @classmethod
    def _untold(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):  # told without its value, which may be a secret
            kind = type(options).__name__
            raise ConfigError(
                f"profiler.upload_options is of type {kind}, but it must be a mapping from names to values."
            )
        return as_json(options, "profiler.upload_options")

    @field_validator("communication")
    @classmethod
    def _regular(cls, communication: list[str]) -> list[str]:
        for names in communication:
            check_pattern(names)
        return communication

    @field_validator("sinks", "triggers", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: ValidationInfo) -> Any:
        """A list of names stands for those that ship, as they ship; what is null is left out."""
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping | BaseModel):
            names = list(value)
            for given in names:
                if not isinstance(given, str):
                    raise ConfigError(
                        f"profiler.{info.field_name} is a list that holds {given!r}, but a list holds names of those "
                        "that ship: give a mapping from a name of yours to it."
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
        if contradiction := schedule.contradiction(self) or activities.contradiction(self):
            raise ConfigError(contradiction)
        if self.with_flops and not self.record_shapes:
            self.record_shapes = True
            self._notes.append(
                "profiler.with_flops=true turned profiler.record_shapes on: FLOPs come from shapes."
            )
        needed = ("record_shapes", "profile_memory", "with_stack")
        if self.memory_categories and not all(getattr(self, name) for name in needed):
            self.record_shapes = self.profile_memory = self.with_stack = True
            what = "profiler.record_shapes, profile_memory and with_stack on: torch tells the categories by them"
            self._notes.append(f"profiler.memory_categories=true turned {what}.")
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
        if overlooked := schedule.overlooked(self):
            self._notes.append(overlooked)
        for name, sink in self.sinks.items():
            for option in getattr(sink, "needs", ()):
                if not getattr(self, option):
                    raise ConfigError(
                        f"The {name} sink needs profiler.{option}=true, but it is false."
                    )
        return self

    def plain(self) -> dict[str, Any]:
        """The options as JSON can hold them; sinks and triggers that are models become `_target_` mappings.

        What may be a secret is left out: most of `upload_options`, and what `redact.redact` hides.
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
        }  # checked, and read again
        plain: dict[str, Any] = redact(options) | kept
        return plain


def as_config(source: Any = MappingProxyType({}), /, **options: Any) -> ProfilerConfig:
    """Make a `ProfilerConfig` of whatever a user has: a preset's name, a mapping, a Hydra config, a dataclass.

    `options` win over what `source` says, each as a whole. None, as `cfg.get("profiler")` gives where an application's
    config has no profiler, means that nothing is recorded.

    Raises:
        ConfigError: as `ProfilerConfig`, or the source is of no kind that can be read, or no such preset ships.
    """
    if isinstance(source, ProfilerConfig):
        if not options:
            return source
        # a disabled one has built none
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
            f"The profiler config is {source!r}, but it must be a mapping, a preset's name or a ProfilerConfig{hint}."
        )
    if "_target_" in given:  # a ProfilerConfig that Hydra has not built yet
        return as_config(instantiated("profiler", given), **options)
    return ProfilerConfig(**{str(key): value for key, value in given.items()} | options)


def _resolved(source: DictConfig) -> Any:
    """The config as plain dicts and lists, its interpolations looked up from the root of the application's config."""
    try:
        return OmegaConf.to_container(source, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"The profiler config has a value that OmegaConf cannot tell: {error}"
        ) from None


# hydra-zen looks at the constructor's signature, and not at that of the class.
_self = Parameter("self", Parameter.POSITIONAL_ONLY)
_parameters = [_self, *signature(ProfilerConfig).parameters.values()]
ProfilerConfig.__init__.__signature__ = Signature(_parameters)  # type: ignore[attr-defined]

# What follows "is not an option" where a name is known, though it is none of ours.
_HINTS = {
    "profiler.graph": f" any more: {NO_GRAPH}",
    "profiler.on_trace_ready": ": what is done with each window, sinks do: choose some, as sinks=[chrome_trace], or "
    "write one; session.captures holds the windows, too.",
}
_MODELS: dict[str, type[BaseModel]] = {
    "": ProfilerConfig,
    "modules": ModulesConfig,
    "timings": TimingsConfig,
}


def _sentence(error: ErrorDetails) -> str:
    """One sentence for the first thing that pydantic found wrong."""
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
