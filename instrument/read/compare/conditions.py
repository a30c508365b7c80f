"""The conditions under which captures were recorded, and how those of two sides differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from instrument.base.units import few, percent
from instrument.read.compare.totals import Rows, Totals
from instrument.read.facts.device_work import KERNEL, KINDS
from instrument.read.trace.capture_json import DISTURBING_CPU_WAIT, Environment
from instrument.read.views.coverage import losses
from instrument.read.views.views import TRAIN, Views

# If the share of equal calls is below the first limit, a sentence says that the programs differ.
# Below the second limit, the comparison misleads. The second limit is small, because torch.compile
# replaces most operators of a program.
_FEW_COMMON, _OTHER_PROGRAM = 0.5, 0.05
# Below this share of calls with equal input shapes, the inputs count as different.
_OTHER_INPUTS = 0.25
# The times of kernels vary from run to run. If at least this many kernels run equally often, and
# their time changes by at least this share, the cause is probably the clock rate.
_ENOUGH_KERNELS, _OTHER_CLOCK = 10, 0.03
_SIDES = ("BEFORE", "AFTER")
_DEVICE_WORK = "device work"
# How many values are shown, and how many characters of each value. The longest host name has 64. If
# host names were cut, a redacted report would not find them, and so would not hide them.
_SHOWN, _LONGEST = 4, 64


class Unlike(NamedTuple):
    """A difference between the sides in one sentence, and whether the comparison misleads."""

    sentence: str
    misleads: bool = False


@dataclass(frozen=True)
class Conditions:
    """The conditions under which the captures of one side were recorded.

    Attributes:
        facts: for each fact, such as "device", the set of its values; empty if none is known.
        recorded: what was recorded in addition to the operators, such as "input shapes".
        losses: for each row of `capture.coverage` that reports missing data, the lowest share of
            the data that a capture holds; None if a share is not known.
        cpu_wait: the largest share of a window in which the thread of the steps was ready to run,
            but had no CPU; 0 if it is not known.
    """

    facts: dict[str, set[str]]
    recorded: set[str]
    losses: dict[str, float | None] = field(default_factory=dict)
    cpu_wait: float = 0.0


# The first facts that are compared, and whether a comparison misleads if they differ.
_FACTS: dict[str, bool] = {
    "device": True,
    "machine": False,
    "world size": True,
    "clock's resolution": False,
    "rank": False,
    "batch size": True,
    "number of loader workers": False,
}
_SETTINGS = (
    "grad_enabled",
    "anomaly_mode",
    "float32_matmul_precision",
    "allow_tf32",
    "cudnn_benchmark",
    "deterministic_algorithms",
)


def conditions(capture: Views) -> Conditions:
    """Collect the conditions under which a capture was recorded."""
    events, about = capture.events, capture.about
    environment, wait = about.environment or Environment(), about.cpu_wait
    loaders = [each for each in environment.loaders or () if (each.phase or TRAIN) == capture.phase]
    settings = {name: getattr(environment, name) for name in _SETTINGS}
    if (threads := environment.threads) is not None:
        settings |= {"intra-op threads": threads.intra_op, "CPUs": threads.cpus}
    resolution = None
    if len(events):
        times = (events.start_ns, events.end_ns)
        resolution = "1 µs" if all((time % 1000 == 0).all() for time in times) else "1 ns"
    # None stands for a value that is not known.
    facts: dict[str, Iterable[Any]] = {
        "device": [device.name for device in events.devices] or about.devices or (),
        "machine": [about.host],
        "world size": [events.world_size if about.world_size is None else about.world_size],
        "clock's resolution": [resolution],
        "rank": [capture.rank],
        "batch size": [loader.batch_size for loader in loaders],
        "number of loader workers": [loader.workers for loader in loaders],
        **{f"version of {name}": [version] for name, version in about.versions.items()},
        **{f"setting {name}": [value] for name, value in settings.items()},
    }
    recorded = {
        _DEVICE_WORK: len(capture.work.event) > 0,
        "input shapes": (events.shapes >= 0).any(),
        "memory": len(events.memory) > 0,
        "Python stacks": len(capture.links.frames) > 0 or (events.call_stack >= 0).any(),
    }
    return Conditions(
        facts={name: {str(each) for each in facts[name] if each is not None} for name in facts},
        recorded={name for name, is_there in recorded.items() if is_there},
        losses={row["name"]: row["share"] for row in losses(capture)},
        cpu_wait=0.0 if wait is None else wait.share or 0.0,
    )


def joined(every: Iterable[Conditions]) -> Conditions:
    """The conditions under which several captures of one side were recorded."""
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
        recorded=set.union(*(each.recorded for each in listed)),
        losses=lost,
        cpu_wait=max(each.cpu_wait for each in listed),
    )


def unlike(before: Conditions, after: Conditions, was: Totals, now: Totals) -> list[Unlike]:
    """Return the differences between the two sides; those that make them misleading come first."""
    found = [
        *_kinds(before, after, was, now),
        *_programs(was, now),
        *_clocks(was, now),
        *_recordings(before, after),
        *_steps(was, now),
        *_losses(before, after),
    ]
    return sorted(found, key=lambda each: not each.misleads)


def _kinds(before: Conditions, after: Conditions, was: Totals, now: Totals) -> Iterator[Unlike]:
    if (_DEVICE_WORK in before.recorded) != (_DEVICE_WORK in after.recorded):
        one, other = _SIDES if _DEVICE_WORK in before.recorded else _SIDES[::-1]
        yield Unlike(f"{one} holds work of a device, {other} holds none.", misleads=True)
    if was.what != now.what:
        one, other = _SIDES if was.what == "step" else _SIDES[::-1]
        yield Unlike(
            f"{one} holds finished steps; {other} holds none, so its whole recording counts.",
            misleads=True,
        )


def _programs(was: Totals, now: Totals) -> Iterator[Unlike]:
    one, other = _calls(was, was.operators), _calls(now, now.operators)
    share = _common(one, other)
    if share < _FEW_COMMON:
        has_common_range = any(not path.startswith("(") for path in was.ranges.keys() & now.ranges)
        yield Unlike(
            f"The programs differ: {share:.0%} of the operators' calls in a step are the same.",
            misleads=share < _OTHER_PROGRAM and not has_common_range,
        )
    names = one.keys() & other.keys()
    shapes = [
        {key: number for key, number in _calls(side, side.shapes).items() if key[0] in names}
        for side in (was, now)
    ]
    if min(map(len, shapes)) and (share := _common(*shapes)) < _OTHER_INPUTS:
        yield Unlike(
            "The inputs differ, for example in the batch size: among the operators that both sides "
            f"call, {share:.0%} of the calls have the same input shapes.",
            misleads=True,
        )


def _calls(totals: Totals, rows: Rows) -> dict[Any, float]:
    steps = max(len(totals.steps_ns), 1)
    return {key: (row["calls"] or 0) / steps for key, row in rows.items()}


def _common(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """The calls that both sides have, as a share of all calls; 1 if there are no calls."""
    common = sum(min(number, other.get(key, 0.0)) for key, number in one.items())
    every = sum(one.values()) + sum(other.values()) - common
    return common / every if every else 1.0


def _clocks(was: Totals, now: Totals) -> Iterator[Unlike]:
    """Compare the times of the kernels that run equally often on both sides.

    The factor of a kernel is its time after the change, divided by its time before. What counts is
    the median factor, weighted by the times before the change.
    """
    one, other = was.kernels, now.kernels
    steps = [max(len(side.steps_ns), 1) for side in (was, now)]
    factors = []
    for name, kind in one.keys() & other.keys():
        calls, device_ns = (
            [(rows[name, kind][column] or 0) / count for rows, count in zip((one, other), steps)]
            for column in ("calls", "device_ns")
        )
        if kind == KINDS[KERNEL] and calls[0] == calls[1] and min(device_ns) > 0:
            factors.append((device_ns[1] / device_ns[0], device_ns[0]))
    if len(factors) < _ENOUGH_KERNELS:
        return
    factors.sort()
    passed = [*accumulate(weight for _, weight in factors)]
    factor = next(each for (each, _), until in zip(factors, passed) if until >= passed[-1] / 2)
    if abs(factor - 1) >= _OTHER_CLOCK:
        yield Unlike(
            f"The kernels that run equally often on both sides take {abs(factor - 1):.0%} "
            f"{'longer' if factor > 1 else 'less time'} after the change: the clock rate of the "
            "device may differ."
        )


def _recordings(before: Conditions, after: Conditions) -> Iterator[Unlike]:
    for conditions, side in zip((before, after), _SIDES):
        if conditions.cpu_wait >= DISTURBING_CPU_WAIT:
            yield Unlike(
                f"For {percent(conditions.cpu_wait)} of a window of {side}, the thread of the "
                "steps was ready to run, but got no CPU: the steps may be shorter on an idle "
                "machine."
            )
    for name in dict.fromkeys([*_FACTS, *sorted(before.facts | after.facts)]):
        one, other = before.facts.get(name, set()), after.facts.get(name, set())
        if one and other and one != other:
            yield Unlike(
                f"The {name} differs: {_listed(one)} before, {_listed(other)} after.",
                _FACTS.get(name, False),
            )
    for own, others, side in zip((before, after), (after, before), _SIDES):
        if only := sorted(own.recorded - others.recorded - {_DEVICE_WORK}):
            yield Unlike(
                f"Only {side} was recorded with {' and '.join(only)}; this recording makes its "
                "steps longer."
            )


def _steps(was: Totals, now: Totals) -> Iterator[Unlike]:
    one, other = len(was.steps_ns), len(now.steps_ns)
    if was.what == now.what == "step" and one != other:
        yield Unlike(
            f"The number of steps differs: {one} before, {other} after; times are means per step."
        )
    if was.what == now.what == "recording":
        yield Unlike(
            "There are no finished steps, so the whole recordings are compared, from the first "
            "event to the last."
        )


def _losses(before: Conditions, after: Conditions) -> Iterator[Unlike]:
    for name in sorted(before.losses | after.losses):
        one, other = (_share(name, each) for each in (before, after))
        if one != other:
            yield Unlike(f"The coverage of {name!r} differs: {one} before, {other} after.")


def _share(name: str, side: Conditions) -> str:
    share = side.losses.get(name, 1.0)
    return "unknown" if share is None else "enough" if share == 1.0 else f"{share:.0%}"


def _listed(values: set[str]) -> str:
    shown = (each if len(each) <= _LONGEST else f"{each[:_LONGEST]}…" for each in sorted(values))
    return few(shown, _SHOWN)
