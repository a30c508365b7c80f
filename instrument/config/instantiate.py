"""What a config names by `_target_`: built, described so that another process can build its like, and built again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel

from instrument.config.presets import shipped
from instrument.errors import ConfigError, InstrumentError, suggestion

_SINK_METHOD = ("write", "write(self, capture, folder)")


def sink_of(name: str, given: Any) -> Any:
    """The sink that `profiler.sinks.NAME` describes: an instance, a `_target_` mapping, the options of one that ships.

    Raises:
        ConfigError: it is none of these, or cannot be built.
    """
    return _built(f"profiler.sinks.{name}", _with_target("sink", name, given), *_SINK_METHOD)


def trigger_of(name: str, given: Any) -> Any:
    """The trigger that `profiler.triggers.NAME` describes, in any of the ways in which a sink is.

    Raises:
        ConfigError: as for a sink.
    """
    given = _with_target("trigger", name, given)
    return _built(f"profiler.triggers.{name}", given, "fires", "fires(self, step) -> bool")


def _with_target(kind: str, name: str, given: Any) -> Any:
    """What was given, with the `_target_` that one which ships needs not name."""
    if not isinstance(given, Mapping) or "_target_" in given:
        return given
    known = shipped(f"{kind}s")
    if name not in known:
        raise ConfigError(
            f"profiler.{kind}s.{name} is no {kind} that ships (those are {', '.join(known)}), and has no _target_"
            f"{suggestion(name, known) or ', the class to build.'}"
        )
    return {"_target_": known[name], **given}


def _built(path: str, given: Any, method: str, signature: str) -> Any:
    """The instance that a `_target_` mapping describes, or the instance given; checked for the method it must have."""
    instance = instantiated(path, given) if isinstance(given, Mapping) else given
    if inspect.isclass(instance):
        raise ConfigError(
            f"{path} is the class {instance.__name__}: give an instance, {instance.__name__}()."
        )
    if not callable(getattr(instance, method, None)):
        raise ConfigError(f"{path} is {instance!r}, but it must have a method {signature}.")
    return instance


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


def build_sink(name: str, options: Mapping[str, Any]) -> Any:
    """A sink that ships, by its name, or one of anybody's by its import path, with these options; without Hydra.

    Raises:
        ConfigError: there is no such sink, it has no method `write`, or an option cannot work.
        MissingPackage: the sink needs a package that is not installed.
    """
    known = shipped("sinks")
    target = known.get(name, name)
    module, _, attribute = target.rpartition(".")
    if not module:
        hint = suggestion(name, known) or "; give one of these, or the import path of a class."
        raise ConfigError(f"{name!r} is no sink that ships (those are {', '.join(known)}){hint}")
    try:
        return _built(
            f"The sink {name}", getattr(import_module(module), attribute)(**options), *_SINK_METHOD
        )
    except InstrumentError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The sink {name} cannot be built: {' '.join(str(error).split())}"
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


def described(instance: Any, given: Any = None) -> dict[str, Any]:
    """What `_target_` mapping makes the like of a sink or trigger; of a plain object made elsewhere, only its class."""
    target = _path_of(type(instance))
    if isinstance(instance, BaseModel):
        with suppress(Exception):  # a field of the user's that JSON cannot hold
            return {"_target_": target, **instance.model_dump(mode="json")}
    return dict(given) if isinstance(given, Mapping) else {"_target_": target}


def _can_be_rebuilt(sink: Any, given: Any) -> bool:
    """Whether another process can make the like of a sink that was built from `given`, or given as it is."""
    kind = type(sink)
    if getattr(sink, "inline", False) or kind.__module__ == "__main__":
        return False
    try:
        options = _options_of(about := described(sink, given))
        written = json.dumps(options)
        if isinstance(sink, BaseModel):
            same = bool(kind(**options) == sink)
        else:  # from a mapping without anything that only Hydra understands
            same = isinstance(given, Mapping) and not any(name.startswith("_") for name in options)
            same = same and '"_target_"' not in written
        return same and _found(about["_target_"]) is kind
    except Exception:  # whatever a class of the user's does
        return False


def like_of(sink: Any, given: Any) -> Any:
    """The mapping that makes the like of a sink in any process; the sink itself where none does."""
    return described(sink, given) if _can_be_rebuilt(sink, given) else sink


def rebuilt_sink(about: Mapping[str, Any]) -> Any:
    """A sink from its description in a job; nothing but a class that can be a sink is ever called.

    Raises:
        ConfigError: it cannot be found or built here.
    """
    target = str(about.get("_target_"))
    found = _found(target)
    if not inspect.isclass(found) or not callable(getattr(found, "write", None)):
        raise ConfigError(f"{target!r} is no class of a sink that can be imported here.")
    return found(**_options_of(about))


def _options_of(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name != "_target_"}


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _found(target: str) -> Any:
    """What an import path leads to; None: nothing."""
    module, _, attribute = target.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except Exception:  # what a module of the user's raises while it loads
        return None
