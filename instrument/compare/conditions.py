"""Conditions under which captures were recorded, and sentences on how two sides differ in them.

A difference is either said, or so large that a comparison would mislead: then `misleads` is True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instrument.analysis.coverage import losses
from instrument.analysis.views import Views
from instrument.compare.totals import Quantities, Totals
from instrument.runs.rank_summary import rank_of
from instrument.trace.capture_json import Environment

# Sides with less than this share of their operators' calls in common are different programs.
_ALIKE = 0.25
_SHOWN = 4


class Unlike(NamedTuple):
    """One way in which the two sides are unlike.

    Attributes:
        sentence: what differs, with the values of both sides.
        misleads: whether a comparison would mislead.
    """

    sentence: str
    misleads: bool


@dataclass(frozen=True)
class Conditions:
    """What is known of how one side was recorded; empty where the captures do not say.

    Attributes:
        facts: the values of each fact, such as "device", over all captures.
        has_device: whether any capture holds device work.
        recorded: what was recorded beside the operators, such as "input shapes".
        losses: the rows of the coverage that are too low, with the least share over the captures.
    """

    facts: dict[str, set[str]]
    has_device: bool
    recorded: set[str]
    losses: dict[str, float | None] = field(default_factory=dict)


# The facts by name, and whether a comparison misleads if they differ.
_FACTS: dict[str, bool] = {
    "device": True,
    "machine": False,
    "phase": True,
    "world size": True,
    "rank": False,
    "batch size": True,
    "loader workers": False,
}


def conditions(capture: Views) -> Conditions:
    """Collect the conditions of one capture."""
    about, events = capture.about, capture.events
    environment = about.environment or Environment()
    loaders = [
        loader
        for loader in environment.loaders or ()
        if (loader.phase or "train") == (about.window.phase or "train")
    ]
    devices = [device.name for device in events.devices] or about.devices or []
    world_size = events.world_size if about.world_size is None else about.world_size
    found: dict[str, Iterable[Any]] = {
        "device": devices,
        "machine": [about.host],
        "phase": [about.window.phase],
        "world size": [world_size],
        "rank": [rank_of(capture)],
        "batch size": [loader.batch_size for loader in loaders],
        "loader workers": [loader.workers for loader in loaders],
        **{f"version of {name}": [version] for name, version in about.versions.items()},
        **{f"setting {name}": [value] for name, value in _settings(environment)},
    }
    facts = {
        name: {str(value) for value in values if value is not None}
        for name, values in found.items()
    }
    has = {
        "input shapes": (events.shapes >= 0).any(),
        "memory": len(events.memory) > 0,
        "Python stacks": len(capture.links.frames) > 0 or (events.call_stack >= 0).any(),
    }
    return Conditions(
        facts=facts,
        has_device=len(capture.work.event) > 0,
        recorded={name for name, is_there in has.items() if is_there},
        losses={row["name"]: row["share"] for row in losses(capture)},
    )


def _settings(environment: Environment) -> Iterator[tuple[str, Any]]:
    names = (
        "grad_enabled",
        "anomaly_mode",
        "float32_matmul_precision",
        "allow_tf32",
        "cudnn_benchmark",
        "deterministic_algorithms",
    )
    yield from ((name, getattr(environment, name)) for name in names)
    if environment.threads is not None:
        yield "intra-op threads", environment.threads.intra_op
        yield "CPUs", environment.threads.cpus


def joined(every: Iterable[Conditions]) -> Conditions:
    """The conditions of several captures of one side."""
    listed = list(every)
    facts: dict[str, set[str]] = {}
    lost: dict[str, float | None] = {}
    for each in listed:
        for name, values in each.facts.items():
            facts.setdefault(name, set()).update(values)
        for name, share in each.losses.items():
            known = lost.get(name, 1.0)
            lost[name] = None if share is None or known is None else min(share, known)
    return Conditions(
        facts=facts,
        has_device=any(each.has_device for each in listed),
        recorded=set.union(*(each.recorded for each in listed)),
        losses=lost,
    )


def unlike(before: Conditions, after: Conditions, was: Totals, now: Totals) -> list[Unlike]:
    """Return how the two sides are unlike, those that mislead first."""
    found = [
        *_kinds(before, after, was, now),
        *_programs(was, now),
        *_facts(before, after),
        *_recorded(before, after),
        *_steps(was, now),
        *_losses(before, after),
    ]
    return sorted(found, key=lambda each: not each.misleads)


def _kinds(before: Conditions, after: Conditions, was: Totals, now: Totals) -> Iterator[Unlike]:
    if before.has_device != after.has_device:
        sides = ("BEFORE", "AFTER")
        one, other = sides if before.has_device else sides[::-1]
        yield Unlike(f"{one} holds work of a device, {other} holds none.", True)
    if was.what != now.what:
        sides = ("BEFORE", "AFTER")
        one, other = sides if was.what == "step" else sides[::-1]
        yield Unlike(
            f"{one} holds finished steps; {other} holds none, so its whole recording counts.", True
        )


def _programs(was: Totals, now: Totals) -> Iterator[Unlike]:
    share = _common(was, now, lambda totals: totals.operators)
    if share is not None and share < _ALIKE:
        yield Unlike(
            f"The programs differ: only {share:.0%} of the operators' calls in a step are common.",
            True,
        )
        return
    share = _common(was, now, lambda totals: totals.shapes)
    if share is not None and share < _ALIKE:
        yield Unlike(
            f"The inputs differ: only {share:.0%} of the operators' calls in a step have the same "
            "input shapes.",
            True,
        )


def _common(
    was: Totals, now: Totals, rows: Callable[[Totals], Mapping[Any, Quantities]]
) -> float | None:
    """The calls of a step that both sides have, as a share of all; None if one has no rows."""
    one, other = (
        {key: (row["calls"] or 0) / max(len(each.steps_ns), 1) for key, row in rows(each).items()}
        for each in (was, now)
    )
    if not one or not other:
        return None
    common = sum(min(number, other.get(key, 0.0)) for key, number in one.items())
    return common / (sum(one.values()) + sum(other.values()) - common)


def _facts(before: Conditions, after: Conditions) -> Iterator[Unlike]:
    for name in dict.fromkeys([*_FACTS, *sorted(before.facts | after.facts)]):
        one, other = before.facts.get(name, set()), after.facts.get(name, set())
        if one and other and one != other:
            yield Unlike(
                f"The {name} differs: {_listed(one)} before, {_listed(other)} after.",
                _FACTS.get(name, False),
            )


def _recorded(before: Conditions, after: Conditions) -> Iterator[Unlike]:
    for one, other, side in ((before, after, "BEFORE"), (after, before, "AFTER")):
        if only := sorted(one.recorded - other.recorded):
            yield Unlike(
                f"Only {side} was recorded with {' and '.join(only)}, which makes its steps longer.",
                False,
            )


def _steps(was: Totals, now: Totals) -> Iterator[Unlike]:
    one, other = len(was.steps_ns), len(now.steps_ns)
    if was.what == now.what == "step" and one != other:
        yield Unlike(
            f"The number of steps differs: {one} before, {other} after; times are means of a step.",
            False,
        )
    if was.what == now.what == "recording":
        yield Unlike(
            "There are no finished steps, so the whole recordings are compared, with what happened "
            "before and after the work.",
            False,
        )


def _losses(before: Conditions, after: Conditions) -> Iterator[Unlike]:
    for name in sorted(before.losses | after.losses):
        one, other = (_share(name, each) for each in (before, after))
        if one != other:
            yield Unlike(f"The coverage differs: {name}: {one} before, {other} after.", False)


def _share(name: str, side: Conditions) -> str:
    share = side.losses.get(name, 1.0)
    return "unknown" if share is None else "enough" if share == 1.0 else f"{share:.0%}"


def _listed(values: set[str]) -> str:
    shown = sorted(values)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
