"""Budgets of tests: limits of counters, and the counters that exceed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from instrument.analysis.collectives import KINDS
from instrument.analysis.step_parts import waits_for_data
from instrument.analysis.views import Views
from instrument.compare.counters import COUNTERS, KIND, NEED_DEVICE, Counters, Occurred
from instrument.compare.gate import RECORD, SHORT, STEP, TIMES, amount_of, fits_range, units_of
from instrument.compare.increases import calls_behind, increased_ranges, stack_of
from instrument.errors import ConfigError, did_you_mean
from instrument.links.intervals import merged
from instrument.units import quantity

_DATA = "data"
# How many ranges and calls a failure names.
_SHOWN = 3


@dataclass(frozen=True)
class Budget:
    """The limits of a test.

    Attributes:
        limits: the highest allowed value in a step for each limited counter, by the counter's name.
        shares: the highest allowed share of the step's time for each limited range, by the range's
            name.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


class Excess(NamedTuple):
    """A counter or a share of time that is above its limit, or a counter that cannot be judged.

    Attributes:
        counter: the name of the counter; "" for a share of time.
        sentence: what is wrong.
    """

    counter: str
    sentence: str


def budget_of(given: Mapping[str, Any]) -> Budget:
    """Check the arguments of `perf_budget`, and return the limits.

    Raises:
        ConfigError: a counter does not exist or is a time, or a limit has a wrong type or value.
    """
    limits: dict[str, int] = {}
    shares: dict[str, float] = {}
    for name, value in given.items():
        if name == "share":
            shares = _shares(value)
        elif name == "collectives" and isinstance(value, Mapping):
            for kind, limit in value.items():
                if kind not in KINDS:
                    raise ConfigError(
                        f"perf_budget has the collective {kind!r}, which does not exist"
                        f"{did_you_mean(kind, KINDS)}"
                    )
                limits[KIND + kind] = _limit(f"collectives of {kind}", KIND + kind, limit)
        else:
            counter = SHORT.get(name, name)
            if counter in {STEP, *TIMES} or counter.endswith("_ns"):
                raise ConfigError(
                    f"perf_budget limits {name!r}, which is a time and varies between runs of the "
                    "same code: limit a counter, or compare times with `instrument diff`."
                )
            if counter not in COUNTERS:
                known = [*COUNTERS, *SHORT, "share"]
                raise ConfigError(
                    f"perf_budget limits {name!r}, which is no counter{did_you_mean(name, known)}"
                )
            limits[counter] = _limit(name, counter, value)
    return Budget(limits, shares)


def _limit(name: str, counter: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return quantity(value, units_of(counter))
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigError(
        f"perf_budget limits {name} to {value!r}: give a whole number of 0 or more, or text such "
        f"as '2{[*units_of(counter)][2]}'."
    )


def _shares(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"perf_budget has share={value!r}: give the range and its share, such as "
            "share={'data': 0.1}."
        )
    for name, share in value.items():
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ConfigError(
                f"perf_budget limits the share of {name!r} to {share!r}: give a number from 0 to 1."
            )
    return dict(value)


def stored_limits(stored: Counters) -> Budget:
    """The limits for a test that sets no limits itself: the values of the counters in its baseline.

    A counter that varies between the steps of the baseline gets no limit.
    """
    known = {name: count for name, count in stored.counts.items() if count is not None}
    return Budget(
        {name: count.per_step for name, count in known.items() if count.per_step is not None}
    )


def excesses(budget: Budget, capture: Views, counted: Counters) -> Iterator[Excess]:
    """Yield an `Excess` for each counter or range that exceeds the budget.

    A range exceeds the budget if its share of the step's time is above its limit. A counter with a
    limit is yielded too if it varies between steps or is not known. The counters in `NEED_DEVICE`
    are an exception: if such a counter is not known, it is skipped.
    """
    for name, limit in budget.limits.items():
        count, text = counted.count(name), amount_of(name)
        if count is None and name not in NEED_DEVICE:
            advice = RECORD.get(name, "record it with the fixture profile_session")
            yield Excess(name, f"{name} is not known: {advice}.")
        elif count is not None and count.per_step is None:
            yield Excess(
                name,
                f"{name} varies between the steps, from {text(count.least)} to {text(count.most)}, "
                "so it cannot have a budget: make the steps alike, or remove its limit.",
            )
        elif count is not None and count.most > limit:
            yield Excess(name, f"{name} is {text(count.most)}, and the budget is {text(limit)}.")
    for name, most in budget.shares.items():
        share = share_of(capture, name)
        if share > most:
            yield Excess("", f"{name} takes {share:.1%} of the step, and the budget is {most:.1%}.")


def share_of(capture: Views, name: str) -> float:
    """The share of the steps' time in the ranges with this name or path; 0 if there are none.

    For the name "data", the waits for batches of a `DataLoader` count too.
    """
    ranges, events = capture.links.scopes, capture.events
    chosen = np.array([fits_range(name, text) for text in ranges.paths.texts], np.bool_)
    inside = ranges.ranges.index[np.append(chosen, False)[ranges.opened]]
    if name == _DATA:
        inside = np.union1d(inside, waits_for_data(capture))
    return capture.links.counted_steps.covered(
        *merged(events.start_ns[inside], events.end_ns[inside])
    )


def what_is_new(
    counter: str, occurred: Occurred, before: Counters | None, after: Counters
) -> list[str]:
    """Make lines that name the ranges in which a counter is higher than in `before`.

    Below each range are the additional calls, each with the stack of its first occurrence. If no
    range has a higher counter, or if `before` is None, the lines name the calls of the whole step.
    """
    text, lines = amount_of(counter), list[str]()
    ranges = [] if before is None else increased_ranges(before, after, counter)[:_SHOWN]
    for each in ranges:
        lines.append(f"  in {each.path}: {text(each.after)}, before {text(each.before)}")
        lines += _calls(counter, occurred, before, after, each.path)
    return lines or _calls(counter, occurred, before, after, None)


def _calls(
    counter: str, occurred: Occurred, before: Counters | None, after: Counters, path: str | None
) -> list[str]:
    lines = []
    for call in calls_behind(counter, occurred, before, after, path)[:_SHOWN]:
        was = "" if call.before is None else f", before {call.before:,}"
        lines.append(f"    {call.name}: {call.after:,} in each step{was}")
        lines += [f"      {source}" for source in stack_of(occurred.views, call.event)]
    return lines
