"""What torch can be asked to record: activities, and of one activity some of its types only.

As an option: a list of names, in which a mapping such as `{cuda: [GPU_MEMCPY]}` keeps just these types of an activity.
The types bear Kineto's names, which differ by device and version: torch itself judges them when a session starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from instrument.errors import ConfigError

ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")

Activities: TypeAlias = list[str | dict[str, list[str]]]


def checked(given: Any) -> Activities:
    """The option in its one form: names in lower case, each once; types as they were written.

    Raises:
        ConfigError: it is no such list, is empty, or names an activity that does not exist, or with types and without.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"profiler.activities is {given!r}, but it must be a list such as [cpu, cuda].")
    found: dict[str, list[str] | None] = {}
    for each in given:
        for name, types in _named(each):
            if found.setdefault(name, types) != types:
                raise ConfigError(f"profiler.activities holds {name!r} twice, not alike: name each activity once.")
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
    return {name: types for each in activities or () if isinstance(each, dict) for name, types in each.items()}


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
