"""The conditions under which captures were recorded, and how those of two sides differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from instrument.base.units import few, percent
from instrument.read.compare.sums import KEYS, Sums
from instrument.read.trace.capture_json import DISTURBING_CPU_WAIT, Environment
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
        cpu_wait: the largest share of a window in which the thread of the steps was ready to run,
            but had no CPU; 0 if it is not known.
    """

    facts: dict[str, set[str]]
    recorded: set[str]
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
        "input shapes": events.records_inputs,
        "memory": len(events.memory) > 0,
        "Python stacks": len(capture.links.frames) > 0 or (events.call_stack >= 0).any(),
    }
    return Conditions(
        facts={name: {str(each) for each in facts[name] if each is not None} for name in facts},
        recorded={name for name, is_there in recorded.items() if is_there},
        cpu_wait=0.0 if wait is None else wait.share or 0.0,
    )


def joined(every: Iterable[Conditions]) -> Conditions:
    """The conditions under which several captures of one side were recorded."""
    listed = list(every)
    facts: dict[str, set[str]] = {}
    for each in listed:
        for name, values in each.facts.items():
            facts.setdefault(name, set()).update(values)
    return Conditions(
        facts=facts,
        recorded=set.union(*(each.recorded for each in listed)),
        cpu_wait=max(each.cpu_wait for each in listed),
    )


def unlike(before: Conditions, after: Conditions, was: Sums, now: Sums) -> list[Unlike]:
    """Return the differences between the two sides; those that make them misleading come first."""
    found = [
        *_kinds(before, after, was, now),
        *_programs(was, now),
        *_clocks(was, now),
        *_recordings(before, after),
        *_steps(was, now),
    ]
    return sorted(found, key=lambda each: not each.misleads)


def _kinds(before: Conditions, after: Conditions, was: Sums, now: Sums) -> Iterator[Unlike]:
    if (_DEVICE_WORK in before.recorded) != (_DEVICE_WORK in after.recorded):
        one, other = _SIDES if _DEVICE_WORK in before.recorded else _SIDES[::-1]
        yield Unlike(f"{one} holds work of a device, {other} holds none.", misleads=True)
    if was.what != now.what:
        one, other = _SIDES if was.what == "step" else _SIDES[::-1]
        yield Unlike(
            f"{one} holds finished steps; {other} holds none, so its whole recording counts.",
            misleads=True,
        )


def _programs(was: Sums, now: Sums) -> Iterator[Unlike]:
    share = _common(was, now, "operators")
    if share < _FEW_COMMON:
        paths = [set(side["parts"]["range"]) for side in (was, now)]
        has_common_range = any(not path.startswith("(") for path in paths[0] & paths[1])
        yield Unlike(
            f"The programs differ: {percent(share)} of the operators' calls in a step are the "
            "same.",
            misleads=share < _OTHER_PROGRAM and not has_common_range,
        )
    if min(len(was["shapes"]), len(now["shapes"])):
        both = was["operators"].join(now["operators"], "name", "semi")["name"].to_list()
        share = _common(was, now, "shapes", pl.col("name").is_in(both))
        if share < _OTHER_INPUTS:
            yield Unlike(
                "The inputs differ, for example in the batch size: among the operators that both "
                f"sides call, {percent(share)} of the calls have the same input shapes.",
                misleads=True,
            )


def _common(was: Sums, now: Sums, what: str, *chosen: pl.Expr) -> float:
    """The calls of a step that both sides have, as a share of all calls; 1 without calls."""
    calls = (
        side[what].filter(*chosen).select(*KEYS[what], calls=pl.col("calls") / side.steps)
        for side in (was, now)
    )
    found = pl.concat(calls).group_by(KEYS[what], maintain_order=True).agg("calls").select(
        least=pl.when(pl.col("calls").list.len() == 2).then(pl.col("calls").list.min()),
        most=pl.col("calls").list.max(),
    ).sum()  # fmt: skip
    least, most = found.row(0)
    return least / most if most else 1.0


def _clocks(was: Sums, now: Sums) -> Iterator[Unlike]:
    """Compare the times of the kernels that run equally often on both sides.

    What counts is the median of the factors by which their times change, weighted by the times
    before the change.
    """
    sides = (
        side["kernels"].filter(kind="kernel").select(
            "name", calls=pl.col("calls") / side.steps, ns=pl.col("device_ns") / side.steps
        )
        for side in (was, now)
    )  # fmt: skip
    alike = pl.min_horizontal("ns", "ns_right") > 0
    factors = next(sides).join(next(sides), ["name", "calls"]).filter(alike).select(
        "ns", factor=pl.col("ns_right") / pl.col("ns")
    ).sort("factor")  # fmt: skip
    if len(factors) < _ENOUGH_KERNELS:
        return
    is_middle = pl.col("ns").cum_sum() >= pl.col("ns").sum() / 2
    factor: float = factors.filter(is_middle)["factor"][0]
    if abs(factor - 1) >= _OTHER_CLOCK:
        yield Unlike(
            f"The kernels that run equally often on both sides take {percent(abs(factor - 1))} "
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


def _steps(was: Sums, now: Sums) -> Iterator[Unlike]:
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


def _listed(values: set[str]) -> str:
    shown = (each if len(each) <= _LONGEST else f"{each[:_LONGEST]}…" for each in sorted(values))
    return few(shown, _SHOWN)
