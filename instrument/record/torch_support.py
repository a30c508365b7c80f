"""Finds what this version of torch can record, by trying out what it accepts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, supported_activities
from torch.profiler.profiler import _KinetoProfile

from instrument.base.errors import ConfigError
from instrument.base.log import logger
from instrument.record.config import activities
from instrument.record.config.activities import Activities
from instrument.record.config.schema import ProfilerConfig

T = TypeVar("T")


def known(read: Callable[[], T]) -> T | None:
    """Call `read` and return its result; None if `read` raises, for example on an old torch."""
    try:
        return read()
    except Exception:
        return None


def available_activities() -> list[str]:
    """What this machine can record: `cpu`, and the devices that it has."""
    names = (activity.name.lower() for activity in supported_activities())
    return sorted(name for name in names if _is_available(name))


def usable_activities(wanted: Activities | None) -> list[str]:
    """The wanted activities (None: all) that this machine can record; cpu if it can none.

    A warning names the others.
    """
    available = available_activities()
    if wanted is None:
        return available
    named = activities.names(wanted)
    missing = [name for name in named if name not in available]
    usable = [name for name in named if name in available] or ["cpu"]
    if missing:
        logger.warning(
            "profiler.activities names {}, which this machine or this torch does not have: only {} "
            "will be recorded.",
            " and ".join(missing),
            " and ".join(usable),
        )
    return usable


def as_torch_takes(names: Sequence[str], types: Mapping[str, list[str]]) -> list[Any]:
    """Activities as members of `ProfilerActivity`, or mappings from one to its chosen types."""
    members = ProfilerActivity.__members__
    return [
        {members[name.upper()]: types[name]} if name in types else members[name.upper()]
        for name in names
    ]


def experimental_options(config: ProfilerConfig) -> dict[str, Any]:
    """The experimental options of a window: our defaults, overridden by the user's options.

    A default is left out if this version of torch does not have the option. `verbose` puts the call
    stack on every operator. `trace_only` skips events that this package never reads. With
    `profile_all_threads`, torch would lose the memory events that a trigger asks for.
    """
    ours = {
        "verbose" if config.with_stack else "trace_only": True,
        "profile_all_threads": config.profile_all_threads and not config.profile_memory,
    }
    return {
        name: value for name, value in ours.items() if value and _takes(name, value)
    } | config.experimental_config


def refuse_unknown(config: ProfilerConfig) -> None:
    """Check the options that depend on the version of torch.

    Raises:
        ConfigError: this version of torch lacks an experimental option, needs a value of another
            type for it, or cannot limit an activity to some types of events.
    """
    for name, value in config.experimental_config.items():
        if not _takes(name, value):
            raise ConfigError(_error_sentence(name, value))
    if activities.chosen_types(config.activities) and not _takes_types():
        raise ConfigError(
            "profiler.activities chooses types of an activity, which needs torch 2.13, but this is "
            f"torch {torch.__version__}: name the activities without types."
        )


def _is_available(name: str) -> bool:
    device = getattr(torch, name, None)
    return name == "cpu" or (device is not None and bool(device.is_available()))


def _takes(name: str, value: Any) -> bool:
    try:
        torch._C._profiler._ExperimentalConfig(**{name: value})
    except TypeError:
        return False
    return True


def _takes_types() -> bool:
    try:
        _KinetoProfile(activities=as_torch_takes(["cpu"], {"cpu": []}))
    except TypeError:
        return False
    return True


def _error_sentence(name: str, value: Any) -> str:
    option, version = f"profiler.experimental_config.{name}", torch.__version__
    signature = torch._C._profiler._ExperimentalConfig.__init__.__doc__ or ""
    known = dict(re.findall(r"(\w+): ([\w.\[\]]+) =", signature))
    if name in known:
        expected = {"bool": "true or false", "str": "text"}.get(known[name], "a list of text")
        return f"{option} is {value!r}, but torch {version} needs {expected}."
    return f"{option} is not an option of torch {version}: choose from {', '.join(sorted(known))}."
