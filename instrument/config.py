"""`ProfilerConfig`: every option, with torch's own names, and the presets that ship."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from instrument import activities
from instrument.activities import Activities
from instrument.errors import ConfigError, InstrumentError
from instrument.sinks.chrome_trace import as_json

_PRESETS = files("instrument") / "conf" / "profiler"
_SINK_METHOD = ("write", "write(self, capture, folder)")


class ModulesConfig(BaseModel):
    """Which submodules of the session's model get a range; the options of `instrument_model`, and `enabled`."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    depth: int | None = Field(None, ge=0)
    include: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)
    types: list[str] = Field(default_factory=list)


class ProfilerConfig(BaseModel):
    """What to record, when, and what to make of it. Flat, with torch's own names where torch has one.

    The schedule counts training steps: after `skip_first` steps come `repeat` cycles (0: without end) of `wait` idle,
    `warmup` discarded and `active` recorded steps; `skip_first_wait` other than 0 leaves out the first cycle's wait.
    `active=None` records until the session stops. Unlike torch, `repeat` is 1 unless given: one window.

    Attributes:
        enabled: False: the session does nothing, and the other options are not looked at further.
        max_window_s: a window that has recorded for so many seconds ends with the step that runs then, labelled
            truncated; later windows still come. None: no such limit.
        activities: of cpu, cuda, xpu, mtia, hpu; None: what this machine has. `{cuda: [GPU_MEMCPY]}` in place of a
            name keeps only these types of it (torch 2.13). Steps and ranges are cpu's USER_ANNOTATION.
        record_shapes: keep the operators' input shapes.
        profile_memory: keep every allocation and release.
        with_stack: keep the Python stack; needed by the stacks sink. The costliest option.
        with_flops: compute FLOPs from the shapes when the capture is read; turns `record_shapes` on.
        with_modules: torch's module hierarchy, which it records for TorchScript models only.
        memory_snapshot: put the snapshot of CUDA's allocator, with its allocations and frees during the window, into
            the capture as memory_snapshot.pickle (pytorch.org/memory_viz opens it). A history that the program has
            `torch.cuda.memory` record itself ends with the window.
        execution_trace: torch's execution trace (Chakra) of the window's steps, as execution_trace.json in the
            capture: for replay and simulation; costly, some 8 µs and a kB for each operator.
        experimental_config: options of torch's `_ExperimentalConfig`, checked against this torch's at the start.
        emit: which tools see the ranges: of torch, nvtx (Nsight Systems) and itt (VTune).
        modules: which submodules of the session's model get a range.
        metadata: keys with JSON values for the trace's top level and capture.json; see also `Session.add_metadata`.
        output_dir: the folder for captures; None: `profile/` in Hydra's run folder, else in the current one.
        sinks: name -> what writes something from each capture: an instance, or a mapping with `_target_`; the sinks
            that ship need no `_target_`.
        triggers: name -> what may ask for a window after any step: an instance, or a mapping with `_target_`.

    Raises:
        ConfigError: an option is unknown, has a value that cannot work, or contradicts another.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_default=False)

    enabled: bool = True
    wait: int = Field(0, ge=0)
    warmup: int = Field(0, ge=0)
    active: int | None = Field(None, ge=1)
    repeat: int = Field(1, ge=0)
    skip_first: int = Field(0, ge=0)
    skip_first_wait: int = Field(0, ge=0)
    max_window_s: float | None = Field(None, gt=0)
    activities: Activities | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    memory_snapshot: bool = False
    execution_trace: bool = False
    experimental_config: dict[str, Any] = Field(default_factory=dict)
    emit: list[Literal["torch", "nvtx", "itt"]] = Field(["torch"], min_length=1)
    modules: ModulesConfig = Field(default_factory=lambda: ModulesConfig(depth=None))
    metadata: dict[str, Any] = Field(default_factory=dict)
    output_dir: str | Path | None = None
    sinks: dict[str, Any] = Field(default_factory=dict)
    triggers: dict[str, Any] = Field(default_factory=dict)

    _notes: list[str] = PrivateAttr(default_factory=list)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(_sentence(error.errors()[0])) from None

    @property
    def notes(self) -> list[str]:
        """What was changed on the user's behalf, a sentence each; the session says them at its start."""
        return list(self._notes)

    @field_validator("activities", mode="before")
    @classmethod
    def _known_activities(cls, value: Any) -> Any:
        return None if value is None else activities.checked(value)

    @field_validator("metadata")
    @classmethod
    def _writable(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        return as_json(metadata, "profiler.metadata")

    @field_validator("sinks", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A list of names stands for those sinks as they ship; a sink that is null is left out."""
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
            return {str(name): {} for name in value}
        return {name: sink for name, sink in value.items() if sink is not None} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _consistent(self) -> ProfilerConfig:
        if not self.enabled:
            return self
        if self.active is None and self.repeat != 1:
            raise ConfigError(
                f"profiler.repeat is {self.repeat}, but without profiler.active the first window has no end: "
                "set profiler.active to the steps of a window."
            )
        if self.with_flops and not self.record_shapes:
            self.record_shapes = True
            self._notes.append("profiler.with_flops=true turned profiler.record_shapes on: FLOPs come from shapes.")
        self._refuse_what_torch_would_lose()
        self.sinks = {name: _sink(name, given) for name, given in self.sinks.items()}
        self.triggers = {name: _trigger(name, given) for name, given in self.triggers.items()}
        for name, sink in self.sinks.items():
            for option in getattr(sink, "needs", ()):
                if not getattr(self, option):
                    raise ConfigError(f"The {name} sink needs profiler.{option}=true, but it is false.")
        return self

    def _refuse_what_torch_would_lose(self) -> None:
        experimental, host_types = self.experimental_config, activities.chosen_types(self.activities).get("cpu")
        for option, flag, host_type in (
            ("with_stack", "trace_only", "PYTHON_FUNCTION"),
            ("profile_memory", "profile_all_threads", "CPU_INSTANT_EVENT"),
        ):
            if getattr(self, option) and experimental.get(flag):
                raise ConfigError(
                    f"profiler.experimental_config.{flag} is true, with which torch loses what profiler.{option}=true "
                    "asks for: leave one of the two out."
                )
            if getattr(self, option) and host_types is not None and host_type not in host_types:
                raise ConfigError(
                    f"profiler.activities holds the types {host_types} for cpu, but profiler.{option}=true needs "
                    f"{host_type} among them."
                )

    def plain(self) -> dict[str, Any]:
        """The options as JSON can hold them; sinks and triggers that are models become `_target_` mappings."""
        options = self.model_dump(mode="json", exclude={"sinks", "triggers"})
        for group in ("sinks", "triggers"):
            options[group] = {name: _described(value) for name, value in getattr(self, group).items()}
        return options


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
        given: Any = {name: getattr(source, name) for name in source.model_fields_set}
    elif isinstance(source, str):
        given = preset(source)
    elif source is None:
        given = {} if options else {"enabled": False}
    elif isinstance(source, DictConfig):
        given = OmegaConf.to_container(source, resolve=True)
    elif is_dataclass(source):
        given = OmegaConf.to_container(OmegaConf.structured(source), resolve=True)
    else:
        given = source
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"The profiler config is {source!r}, but it must be a mapping, a preset's name or a ProfilerConfig."
        )
    return ProfilerConfig(**{str(key): value for key, value in given.items()} | options)


def build_sink(name: str, options: Mapping[str, Any]) -> Any:
    """A sink that ships, by its name, or one of anybody's by its import path, with these options; without Hydra.

    Raises:
        ConfigError: there is no such sink, it has no method `write`, or an option cannot work.
        MissingPackage: the sink needs a package that is not installed.
    """
    shipped = _shipped_sinks()
    target = shipped.get(name, name)
    module, _, attribute = target.rpartition(".")
    if not module:
        hint = _meant(name, shipped) or "; give one of these, or the import path of a class."
        raise ConfigError(f"{name!r} is no sink that ships (those are {', '.join(shipped)}){hint}")
    try:
        return _built(f"The sink {name}", getattr(import_module(module), attribute)(**options), *_SINK_METHOD)
    except InstrumentError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"The sink {name} cannot be built: {' '.join(str(error).split())}") from error


def parse_options(given: Iterable[str]) -> dict[str, Any]:
    """Options written as `key=value`, with values as YAML has them and dots in a key for what is nested.

    Raises:
        ConfigError: one of them cannot be read so.
    """
    options = OmegaConf.create()
    for text in given:
        try:
            options.merge_with_dotlist([text])
        except Exception:  # of OmegaConf's grammar or of YAML's, which have no base in common
            raise ConfigError(f"The option {text!r} cannot be read; write key=value, as in rows=30.") from None
    plain = OmegaConf.to_container(options)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def presets() -> list[str]:
    """The names of the presets that ship."""
    return sorted(p.name[:-5] for p in _PRESETS.iterdir() if p.name.endswith(".yaml") and not p.name.startswith("_"))


def preset(name: str) -> dict[str, Any]:
    """The options of a preset that ships, equal to what Hydra composes for `profiler=NAME`.

    Reads the same files without Hydra, whose composing needs its global state.

    Raises:
        ConfigError: no such preset ships.
    """
    if name not in presets():
        raise ConfigError(f"{name!r} is no preset (those are {', '.join(presets())}){_meant(name, presets()) or '.'}")
    return _composed(f"{name}.yaml")


def _composed(path: str) -> dict[str, Any]:
    """One file of the config group with its defaults list merged in, as far as our own files use such lists."""
    options = _yaml(path)
    merged: dict[str, Any] = {}
    for entry in options.pop("defaults", []):
        if entry == "_self_":
            continue
        if isinstance(entry, str):
            merged |= _composed(f"{entry}.yaml")
        else:
            for group, names in entry.items():
                merged[group] = {key: value for each in names for key, value in _yaml(f"{group}/{each}.yaml").items()}
    return _merged(merged, options)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _yaml(path: str) -> dict[str, Any]:
    loaded = OmegaConf.create((_PRESETS.joinpath(*path.split("/"))).read_text(encoding="utf-8"))
    options = OmegaConf.to_container(loaded)
    return {str(key): value for key, value in options.items()} if isinstance(options, dict) else {}


@cache
def _shipped_sinks() -> dict[str, str]:
    """Name -> `_target_` of the sinks that ship."""
    names = [p.name[:-5] for p in (_PRESETS / "sinks").iterdir() if p.name.endswith(".yaml")]
    return {name: _yaml(f"sinks/{name}.yaml")[name]["_target_"] for name in sorted(names)}


def _sink(name: str, given: Any) -> Any:
    shipped = _shipped_sinks()
    if isinstance(given, Mapping) and "_target_" not in given:
        if name not in shipped:
            raise ConfigError(
                f"profiler.sinks.{name} is no sink that ships (those are {', '.join(shipped)}), and has no _target_"
                f"{_meant(name, shipped) or ', the class to build.'}"
            )
        given = {"_target_": shipped[name], **given}
    return _built(f"profiler.sinks.{name}", given, *_SINK_METHOD)


def _trigger(name: str, given: Any) -> Any:
    return _built(f"profiler.triggers.{name}", given, "fires", "fires(self, step) -> bool")


def _built(path: str, given: Any, method: str, signature: str) -> Any:
    """The instance that a `_target_` mapping describes, or the instance given; checked for the method it must have."""
    instance = _instantiated(path, given) if isinstance(given, Mapping) else given
    if inspect.isclass(instance) or not callable(getattr(instance, method, None)):
        raise ConfigError(f"{path} is {instance!r}, but it must have a method {signature}.")
    return instance


def _instantiated(path: str, given: Mapping[str, Any]) -> Any:
    if "_target_" not in given:
        raise ConfigError(f"{path} is {dict(given)!r}, but it needs _target_, the class to build.")
    from hydra.errors import InstantiationException  # 0.3 s: only where something is built from a config
    from hydra.utils import instantiate

    try:
        return instantiate(dict(given), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, InstrumentError):
            raise cause from None
        reason = " ".join(str(cause or error).split())
        raise ConfigError(f"{path}._target_ is {given['_target_']!r}, which cannot be built: {reason}") from error


def _described(value: Any) -> Any:
    target = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, BaseModel):
        with suppress(Exception):  # a field of the user's that JSON cannot hold
            return {"_target_": target, **value.model_dump(mode="json")}
    return {"_target_": target} if not isinstance(value, Mapping) else dict(value)


def _meant(word: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _sentence(error: ErrorDetails) -> str:
    """One sentence for the first thing that pydantic found wrong."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    path = ".".join(("profiler", *map(str, error["loc"])))
    value = error["input"]
    if error["type"] == "extra_forbidden":
        *above, last = map(str, error["loc"])
        known = ModulesConfig.model_fields if above else ProfilerConfig.model_fields
        hint = _meant(last, known, ".".join(("profiler", *above, ""))) or f": choose from {', '.join(known)}."
        return f"{path} is not an option{hint}"
    if path == "profiler.active" and error["type"] == "greater_than_equal":
        return f"profiler.active is {value}, but a window needs at least one step."
    return f"{path} is {value!r}, but it {_must(error)}."


def _must(error: ErrorDetails) -> str:
    if error["type"] == "greater_than_equal":
        return f"must be {error['ctx']['ge']} or more"
    if error["type"] == "greater_than":
        return f"must be more than {error['ctx']['gt']:g}"
    expected = {
        "bool": "must be true or false",
        "int": "must be a whole number",
        "float": "must be a number",
        "string": "must be text",
        "dict": "must be a mapping from names to what each of them holds",
        "list": "must be a list",
        "model": "must hold options such as depth and include",
        "literal": "must be " + str(error.get("ctx", {}).get("expected")),
        "too": "needs at least one",
    }
    kind = error["type"].split("_")[0]
    return expected.get(kind, "cannot be used: " + error["msg"])


__all__ = ["ProfilerConfig", "as_config", "build_sink", "parse_options", "preset", "presets"]
