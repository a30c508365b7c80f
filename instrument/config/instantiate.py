"""Sinks and triggers from their `_target_` mappings, and the mappings of those that are built.

`_target_`, the import path of a class, is the only registry; those that ship may be called by their names. A config's
mapping is built by Hydra, since it may hold interpolations and further `_target_` mappings. The command line and the
job of a worker hold neither, and are built by `sink_of_class`, which calls nothing but classes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel

from instrument.config.presets import shipped
from instrument.errors import ConfigError, InstrumentError, suggestion

_METHODS = {
    "sink": ("write", "write(self, capture, folder)"),
    "trigger": ("fires", "fires(self, step) -> bool"),
}


def build(kind: Literal["sink", "trigger"], name: str, given: Any) -> Any:
    """Build what `profiler.sinks.NAME` or `profiler.triggers.NAME` describes.

    Args:
        kind: which of the two.
        name: its name in the config.
        given: a `_target_` mapping, the options of one that ships, or an instance, which is returned as it is.

    Raises:
        ConfigError: it is none of these, cannot be built, or lacks the method that its kind must have.
    """
    path, (method, signature) = f"profiler.{kind}s.{name}", _METHODS[kind]
    if isinstance(given, Mapping):
        if "_target_" not in given:
            known = shipped(f"{kind}s")
            if name not in known:
                raise ConfigError(
                    f"{path} is no {kind} that ships (those are {', '.join(known)}), and has no _target_"
                    f"{suggestion(name, known) or ', the class to build.'}"
                )
            given = {"_target_": known[name], **given}
        given = instantiated(path, given)
    if inspect.isclass(given):
        raise ConfigError(
            f"{path} is the class {given.__name__}: give an instance, {given.__name__}()."
        )
    if not callable(getattr(given, method, None)):
        raise ConfigError(f"{path} is {given!r}, but it must have a method {signature}.")
    return given


def instantiated(path: str, given: Mapping[str, Any]) -> Any:
    """What a `_target_` mapping at a path of the config describes, with everything in it that has one built first.

    Raises:
        ConfigError: it cannot be built.
    """
    from hydra.errors import (
        InstantiationException,
    )  # 0.3 s: only where something is built from a config
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
    """Build a sink without Hydra, for the command line and the worker: only a class that can be a sink is called.

    Args:
        target: the name of a sink that ships, or the import path of a class.
        options: the keyword arguments of the class.

    Raises:
        ConfigError: there is no such class, it has no method `write`, or an option cannot work.
        MissingPackage: the sink needs a package that is not installed.
    """
    known, (method, signature) = shipped("sinks"), _METHODS["sink"]
    if target not in known and "." not in target:
        hint = suggestion(target, known) or "; give one of these, or the import path of a class."
        raise ConfigError(f"{target!r} is no sink that ships (those are {', '.join(known)}){hint}")
    try:
        found = _found(known.get(target, target))
        if not inspect.isclass(found) or not callable(getattr(found, method, None)):
            raise ConfigError(
                f"{target!r} is no class of a sink, which must have a method {signature}."
            )
        return found(**options)
    except InstrumentError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The sink {target} cannot be built: {' '.join(str(error).split())}"
        ) from error


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
            raise ConfigError(
                f"The option {text!r} cannot be read; write key=value, as in rows=30."
            ) from None
    plain = OmegaConf.to_container(options)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def as_mapping(instance: Any, given: Any = None) -> dict[str, Any]:
    """The `_target_` mapping that describes a sink or trigger, which was built from `given`.

    Of a plain object that the user made it holds the class alone.
    """
    target = f"{type(instance).__module__}.{type(instance).__qualname__}"
    if isinstance(instance, BaseModel):
        with suppress(Exception):  # a field of the user's that JSON cannot hold
            return {"_target_": target, **instance.model_dump(mode="json")}
    return dict(given) if isinstance(given, Mapping) else {"_target_": target}


def for_any_process(sink: Any, given: Any) -> Any:
    """The mapping from which any process builds the same sink; the sink itself where only this process can run it."""
    kind = type(sink)
    if getattr(sink, "inline", False) or kind.__module__ == "__main__":
        return sink
    try:
        mapping = as_mapping(sink, given)
        options = {name: value for name, value in mapping.items() if name != "_target_"}
        written = json.dumps(options)
        if isinstance(sink, BaseModel):
            same = bool(kind(**options) == sink)
        else:  # from a mapping without anything that only Hydra understands
            same = isinstance(given, Mapping) and not any(name.startswith("_") for name in options)
            same = same and '"_target_"' not in written
        return mapping if same and _found(mapping["_target_"]) is kind else sink
    except Exception:  # whatever a class of the user's does
        return sink


def _found(target: str) -> Any:
    """What an import path leads to.

    Raises:
        ImportError, AttributeError: nothing is there.
        Exception: whatever the module raises while it loads.
    """
    module, _, attribute = target.rpartition(".")
    return getattr(import_module(module), attribute)
