"""What torch can be asked to record: activities, and of one activity some of its types only.

As an option: a list of names, in which a mapping such as `{cuda: [GPU_MEMCPY]}` keeps just these types of an activity.
The types bear Kineto's names, which differ by device and version: torch itself judges them when a session starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from instrument.errors import ConfigError

ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")

Activities: TypeAlias = list[str | dict[str, list[str]]]

# Each option with the experimental flag that loses it, and the type of the cpu's that it needs.
_LOST_BY = (
    ("with_stack", "trace_only", "PYTHON_FUNCTION"),
    ("profile_memory", "profile_all_threads", "CPU_INSTANT_EVENT"),
)


class Asked(Protocol):
    """The options that are looked at here."""

    activities: Activities | None
    experimental_config: dict[str, Any]


def checked(given: Any) -> Activities:
    """The option in its one form: names in lower case, each once; types as they were written.

    Raises:
        ConfigError: it is no such list, is empty, or names an activity that does not exist, or with types and without.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(
            f"profiler.activities is {given!r}, but it must be a list such as [cpu, cuda]."
        )
    found: dict[str, list[str] | None] = {}
    for each in given:
        for name, types in _named(each):
            if found.setdefault(name, types) != types:
                raise ConfigError(
                    f"profiler.activities holds {name!r} twice, not alike: name each activity once."
                )
    if not found:
        raise ConfigError(
            "profiler.activities is empty, but a window needs at least one: name one, or use profiler=disabled."
        )
    return [name if types is None else {name: types} for name, types in found.items()]


def names(activities: Activities) -> list[str]:
    """The activities themselves."""
    return [name for each in activities for name in ([each] if isinstance(each, str) else each)]


def chosen_types(activities: Activities | None) -> dict[str, list[str]]:
    """Of the activities that are recorded in part, the types that are."""
    return {
        name: types
        for each in activities or ()
        if isinstance(each, dict)
        for name, types in each.items()
    }


def contradiction(config: Asked) -> str | None:
    """What a config asks for and has torch lose, in one sentence; None: nothing."""
    cpu_types = chosen_types(config.activities).get("cpu")
    for option, flag, cpu_type in _LOST_BY:
        if not getattr(config, option):
            continue
        if config.experimental_config.get(flag):
            return (
                f"profiler.experimental_config.{flag} is true, with which torch loses what profiler.{option}=true "
                "asks for: leave one of the two out."
            )
        if cpu_types is not None and cpu_type not in cpu_types:
            return (
                f"profiler.activities holds the types {cpu_types} for cpu, but profiler.{option}=true needs "
                f"{cpu_type} among them."
            )
    return None


def _named(each: Any) -> list[tuple[str, list[str] | None]]:
    if isinstance(each, Mapping):
        return [(_known(name), _types(name, types)) for name, types in each.items()]
    return [(_known(each), None)]


def _known(given: Any) -> str:
    name = str(getattr(given, "name", given)).lower()
    if name not in ACTIVITIES:
        raise ConfigError(
            f"profiler.activities holds {name!r}, which is no activity: choose from {', '.join(ACTIVITIES)}, "
            "or leave it null for what this machine has."
        )
    return name


def _types(name: Any, given: Any) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            f"profiler.activities holds the types {given!r} for {name}, but they must be a list such as [GPU_MEMCPY]."
        )
    return [str(each) for each in given]
