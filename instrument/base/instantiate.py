"""Builds sinks and triggers from `_target_` mappings, and makes mappings from instances.

`_target_` is the import path of a class; built-in classes also have short names. Hydra builds the
objects of a config, because its mappings may hold interpolations and nested `_target_` mappings.
The mappings of the command line and the export process hold neither: `sink_of_class` builds a sink
from them without Hydra, and calls only classes of sinks.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel

from instrument.base.errors import ConfigError, InstrumentError, suggestion
from instrument.base.presets import shipped

# For each kind of object: the option that holds it, its method, and how it is called.
_METHODS = {
    "sink": ("sinks", "write", "a method write(self, capture, folder)"),
    "trigger": ("triggers", "fires", "a method fires(self, step) -> bool"),
    "callback": ("on_capture", "__call__", "a function (folder, scalars)"),
}


def by_name(group: str, given: Any) -> Any:
    """Turn a list of names into a mapping; in a mapping, remove entries with the value null.

    Raises:
        ConfigError: `given` is text, or the list holds something other than names.
    """
    if isinstance(given, Mapping):
        return {name: each for name, each in given.items() if each is not None}
    if isinstance(given, str):
        raise ConfigError(
            f"profiler.{group} is the text {given!r}, but it must be a list of names or a mapping: "
            f'write {group}=["{given}"].'
        )
    if isinstance(given, BaseModel) or not isinstance(given, Iterable):
        return given
    names = list(given)
    for each in names:
        if not isinstance(each, str):
            raise ConfigError(
                f"profiler.{group} is a list that holds {each!r}, but a list may hold only names "
                f"of built-in {group}: give a mapping instead, whose keys are names that you "
                "choose."
            )
    return {name: {} for name in names}


def build(kind: Literal["sink", "trigger", "callback"], name: str, given: Any) -> Any:
    """Build what `profiler.sinks.NAME`, `triggers.NAME` or `on_capture.NAME` describes.

    `given` is a `_target_` mapping, the options of a built-in class, or an instance, which is
    returned.

    Raises:
        ConfigError: `given` has another form or cannot be built, or the result lacks the method of
            a sink (`write`) or of a trigger (`fires`), or cannot be called.
    """
    option, method, signature = _METHODS[kind]
    path = f"profiler.{option}.{name}"
    if isinstance(given, Mapping):
        if "_target_" not in given:
            known = shipped(option)
            if name not in known:
                hint = suggestion(name, known) or ": give the class to build."
                if name in shipped("on_capture"):
                    hint = f": it is one of profiler.on_capture, as in on_capture=[{name}]."
                raise ConfigError(
                    f"{path} is none of the built-in {kind}s ({', '.join(known)}), and has no "
                    f"_target_{hint}"
                )
            given = {"_target_": known[name], **given}
        given = instantiated(path, given)
    if inspect.isclass(given):
        raise ConfigError(
            f"{path} is the class {given.__name__}: give an instance, {given.__name__}()."
        )
    if not callable(getattr(given, method, None)):
        raise ConfigError(f"{path} is {given!r}, but it must have {signature}.")
    return given


def instantiated(path: str, given: Mapping[str, Any]) -> Any:
    """Build the object that a `_target_` mapping describes; build nested mappings first.

    `path` is the mapping's place in the config, for the error.

    Raises:
        ConfigError: the mapping cannot be built.
    """
    # Hydra takes 0.3 s to import.
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(dict(given), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, InstrumentError):
            raise cause from None
        reason = " ".join(str(cause or error).split())
        raise ConfigError(
            f"{path}._target_ is {given['_target_']!r}, which cannot be built: {reason}"
        ) from error


def sink_of_class(target: str, options: Mapping[str, Any]) -> Any:
    """Build a sink without Hydra, for the command line and the export process.

    `target` is the name of a built-in sink or the import path of a class. What is not a class of
    sinks is refused, and not called.

    Raises:
        ConfigError: there is no such class, it has no method `write`, or an option is wrong.
        MissingPackage: the sink needs a package that is not installed.
    """
    path, (_, method, signature) = target, _METHODS["sink"]
    if "." not in target:
        known = shipped("sinks") | shipped("on_capture")
        if target not in known:
            hint = (
                suggestion(target, known) or "; give one of these, or the import path of a class."
            )
            raise ConfigError(
                f"{target!r} is none of the built-in sinks ({', '.join(known)}){hint}"
            )
        path = known[target]
    try:
        kind = _imported(path)
        if not inspect.isclass(kind) or not callable(getattr(kind, method, None)):
            raise ConfigError(f"{target!r} is not a sink class: a sink class has {signature}.")
        return kind(**options)
    except InstrumentError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"The sink {target} cannot be built: {reason}") from error


def parse_options(given: Iterable[str]) -> dict[str, Any]:
    """Parse options of the form `key=value`, with YAML values and dots in nested keys.

    Raises:
        ConfigError: an option does not have this form.
    """
    if not (given := [*given]):
        return {}
    from omegaconf import OmegaConf  # see `presets`

    options = OmegaConf.create()
    for text in given:
        try:
            options.merge_with_dotlist([text])
        except Exception:  # the errors of OmegaConf and YAML have no common base class
            raise ConfigError(
                f"The option {text!r} cannot be read; write key=value, as in rows=30."
            ) from None
    plain = OmegaConf.to_container(options)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def as_mapping(instance: Any, given: Any = None) -> dict[str, Any]:
    """The `_target_` mapping of a sink, trigger or callback that was built from `given`.

    The mapping holds all options of a pydantic model, else those in `given` if it is a mapping.
    """
    kind = instance if inspect.isroutine(instance) else type(instance)
    target = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(instance, BaseModel):
        with suppress(Exception):  # a field may not be serializable
            return {"_target_": target, **instance.model_dump(mode="json")}
    return dict(given) if isinstance(given, Mapping) else {"_target_": target}


def for_any_process(sink: Any, given: Any) -> dict[str, Any] | None:
    """A `_target_` mapping from which any process can build `sink`; None if there is none.

    `given` is the value in the config from which the sink was built.
    """
    kind = type(sink)
    if kind.__module__ == "__main__":
        return None
    try:
        mapping = as_mapping(sink, given)
        options = {name: value for name, value in mapping.items() if name != "_target_"}
        written = json.dumps(options)
        if isinstance(sink, BaseModel):
            same = bool(kind(**options) == sink)
        else:  # the export process builds the sink without Hydra
            same = isinstance(given, Mapping) and not any(name.startswith("_") for name in options)
            same = same and '"_target_"' not in written
        return mapping if same and _imported(mapping["_target_"]) is kind else None
    except Exception:  # a user's class may raise anything
        return None


def _imported(target: str) -> Any:
    module, _, attribute = target.rpartition(".")
    return getattr(import_module(module), attribute)
