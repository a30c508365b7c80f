"""The option `activities`: which activities torch records (CPU, CUDA), and which of their events.

The option is a list of names. In place of a name, a mapping such as `{cuda: [GPU_MEMCPY]}` selects
some types of the activity's events. The types have Kineto's names, which depend on the device and
on Kineto's version. torch checks these names when a session starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from instrument.base.errors import ConfigError

if TYPE_CHECKING:
    from instrument.record.config.schema import ProfilerConfig

ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")

# For each option: torch's option that conflicts with it, and the type of cpu events that it needs.
_CONFLICTS = (
    ("with_stack", "trace_only", "PYTHON_FUNCTION"),
    ("profile_memory", "profile_all_threads", "CPU_INSTANT_EVENT"),
)


def checked(given: Any) -> list[str | dict[str, list[str]]]:
    """Check the value of the option `activities`; return it with one entry for each activity.

    An entry is a name in lower case, such as "cuda"; if types are selected, a mapping such as
    `{"cuda": ["GPU_MEMCPY"]}`. The names of the types are not checked.

    Raises:
        ConfigError: the value is not a list of activities, is empty, or names an activity twice
            with different types.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(
            f"profiler.activities is {given!r}, but it must be a list such as [cpu, cuda]."
        )
    chosen: dict[str, list[str] | None] = {}
    for each in given:
        for name, types in _types_by_name(each):
            if chosen.setdefault(name, types) != types:
                raise ConfigError(
                    f"profiler.activities holds {name!r} twice with different types: name each "
                    "activity once."
                )
    if not chosen:
        raise ConfigError(
            "profiler.activities is empty, but a window needs at least one activity: name one, or "
            "use profiler=disabled."
        )
    return [name if types is None else {name: types} for name, types in chosen.items()]


Activities: TypeAlias = Annotated[list[str | dict[str, list[str]]], BeforeValidator(checked)]


def names(activities: Activities) -> list[str]:
    """The names of the activities, without the event types that are selected for them."""
    return [name for each in activities for name in ([each] if isinstance(each, str) else each)]


def chosen_types(activities: Activities | None) -> dict[str, list[str]]:
    """A mapping from each activity of which types are selected to these types."""
    return {
        name: types
        for each in activities or ()
        if isinstance(each, dict)
        for name, types in each.items()
    }


def conflict(config: ProfilerConfig) -> str | None:
    """A sentence about two options that conflict; None if no options conflict."""
    cpu_types = chosen_types(config.activities).get("cpu")
    for option, flag, cpu_type in _CONFLICTS:
        if not getattr(config, option):
            continue
        own = getattr(config, flag, False)
        if own or config.experimental_config.get(flag):
            return (
                f"profiler.{'' if own else 'experimental_config.'}{flag} is true, so torch would "
                f"lose what profiler.{option}=true records: leave one of the two out."
            )
        if cpu_types is not None and cpu_type not in cpu_types:
            return (
                f"profiler.activities holds the types {cpu_types} for cpu, but "
                f"profiler.{option}=true needs {cpu_type} among them."
            )
    return None


def _types_by_name(each: Any) -> list[tuple[str, list[str] | None]]:
    if isinstance(each, Mapping):
        return [(_known(name), _types(name, types)) for name, types in each.items()]
    return [(_known(each), None)]


def _known(given: Any) -> str:
    name = str(getattr(given, "name", given)).lower()
    if name not in ACTIVITIES:
        raise ConfigError(
            f"profiler.activities holds {name!r}, which is no activity: choose from "
            f"{', '.join(ACTIVITIES)}, or set the option to null to record all that this machine "
            "has."
        )
    return name


def _types(name: Any, given: Any) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            f"profiler.activities holds the types {given!r} for {name}, but they must be a list "
            "such as [GPU_MEMCPY]."
        )
    return [str(each) for each in given]
