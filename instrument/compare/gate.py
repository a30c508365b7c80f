"""Conditions such as `syncs>0`, and the verdict on each condition.

A condition describes what must not happen. The verdict is "fail" if the condition is true, "pass"
if it is false, and "undecided" if it is not known whether it is true.

A condition has a name, a comparison sign such as `>`, and a value:

- `syncs>0`, `peak>2GB`: the value of the counter after the change.
- `operators>+5%`, `operators>+10`: the change of the counter.
- `range:attention.operators>0`: a counter of the ranges of this name or path; `*` matches any text.
- `step>5%`, `range:attention.total>5%`: the change of a time. Times vary from run to run, so a
  condition on a time is undecided if a side has fewer than three windows, or if the times of the
  windows vary too much.

A condition on a counter is undecided if the counter varies between steps or was not recorded.

The exit status of a command is 1 if at least one verdict is "fail". Otherwise, the exit status is 3
if at least one verdict is "undecided", and 0 if all verdicts are "pass".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Literal, NamedTuple

from instrument.analysis.collectives import KINDS
from instrument.analysis.views import TRAIN, Views
from instrument.compare.counters import COUNTERS, KIND, Count, Counters, counters
from instrument.compare.increases import Increase, increased_ranges
from instrument.compare.statistics import is_higher
from instrument.errors import ConfigError, did_you_mean
from instrument.globs import fits
from instrument.units import BYTES, COUNTS, duration, quantity

Result = Literal["pass", "fail", "undecided"]

#: Exit statuses of commands. Errors have the status 2.
FAILED, UNDECIDED = 1, 3
#: The names of times in a condition: those of a range, with their columns in `Capture.ranges`, and
#: that of the step.
TIMES = {"total": "total_ns", "cpu": "cpu_ns", "device": "device_ns"}
STEP = "step"
#: With fewer windows on each side, the test in `is_higher` cannot find any change.
LEAST_WINDOWS = 3

_MOST_WINDOWS = 50
_MOST_RANGES = 5
#: Short names of counters.
SHORT = {"peak": "peak_bytes"}
_OPERATORS = {">=": ge, "<=": le, ">": gt, "<": lt}
_CONDITION = re.compile(
    r"(?:range:(?P<range>.+)\.)?(?P<name>\w+(?:\.\w+)?) *(?P<operator>[<>]=?) *"
    r"(?P<sign>\+?)(?P<value>[\d.]+ *\w*)(?P<percent> *%)?"
)
#: For each counter that is not always recorded, how to record it.
RECORD = {
    **dict.fromkeys(
        ("allocations", "allocated_bytes", "peak_bytes"), "record with profile_memory=True"
    ),
    **dict.fromkeys(
        ("launches", "kernels", "copies", "copied_bytes"),
        "record with a device among profiler.activities",
    ),
    "flops": "record with with_flops=True",
    **dict.fromkeys(
        ("graph_breaks", "recompilations"), "record with a session, which writes capture.json"
    ),
}


class Condition(NamedTuple):
    """A parsed condition; the module's docstring describes the syntax.

    Attributes:
        text: what the user wrote.
        range: a pattern for names or paths of ranges; None for the whole step.
        name: the counter, or a time.
        operator: ">", ">=", "<" or "<=".
        value: the limit. If `kind` is "percent", it is a share of the value before the change.
        kind: what is compared with the limit. "value": the value after the change. "difference":
            this value minus the value before. "percent": the difference as a share of the value
            before.
    """

    text: str
    range: str | None
    name: str
    operator: str
    value: Fraction
    kind: Literal["value", "difference", "percent"]

    @property
    def is_time(self) -> bool:
        """Whether the condition judges a time."""
        return self.name in TIMES or self.name == STEP


class Verdict(NamedTuple):
    """The verdict on one condition.

    Attributes:
        condition: the condition.
        result: "fail" if the condition is true, because a condition describes what must not happen;
            "pass" if the condition is false; "undecided" if it is not known which of the two holds.
        before, after: the values of both sides; None if they are not known or not needed.
        reason: why the condition is undecided, and what to record; "" if it is decided.
        ranges: the innermost ranges in which the counter is higher than before, at most five. Empty
            unless `result` is "fail" and the condition is on a counter of the whole step.
    """

    condition: Condition
    result: Result
    before: int | None = None
    after: int | None = None
    reason: str = ""
    ranges: tuple[Increase, ...] = ()

    def __str__(self) -> str:
        """One line, such as "fail: syncs>0 (before 0, after 3)"."""
        shown = duration if self.condition.is_time else amount_of(self.condition.name)
        values = [
            f"{when} {shown(value)}"
            for when, value in (("before", self.before), ("after", self.after))
            if value is not None
        ]
        known = f" ({', '.join(values)})" if values else ""
        return f"{self.result}: {self.condition.text}{known}" + (
            f": {self.reason}" if self.reason else ""
        )


@dataclass(frozen=True)
class Side:
    """The counters and times of one side of a comparison.

    Attributes:
        counters: the counters of each window, or of a baseline.
        step_ns: the mean step of each window; empty for a baseline.
        ranges_ns: for each window and each path of a range, the times of the range per step. Each
            time has a key of `TIMES`, such as "total".
    """

    counters: Sequence[Counters]
    step_ns: Sequence[int] = ()
    ranges_ns: Sequence[Mapping[str, Mapping[str, int]]] = ()


def side(windows: Iterable[Views]) -> Side:
    """Return the counters and times of the windows of one side.

    Only training windows are used, or, if there are none, the windows of other phases. Of several
    ranks, only the lowest is used, because the times of several ranks in one window are not
    independent.
    """
    found: dict[tuple[bool, int], list[tuple[Counters, int, dict[str, dict[str, int]]]]] = {}
    for window in windows:
        span = window.links.counted_steps
        own = (counters(window), span.total_ns // span.count, _range_times(window))
        is_other = window.phase != TRAIN
        found.setdefault((is_other, window.rank or 0), []).append(own)
    chosen = found[min(found)]
    return Side(*([*column] for column in zip(*chosen)))


def _range_times(window: Views) -> dict[str, dict[str, int]]:
    steps = max(len(window.links.steps), 1)
    return {
        row.path: {
            name: getattr(row, column) // steps
            for name, column in TIMES.items()
            if getattr(row, column) is not None
        }
        for row in window.ranges
    }


def parse(text: str) -> Condition:
    """Parse a condition.

    Raises:
        ConfigError: the text is not a condition, or its counter or unit does not exist.
    """
    found = _CONDITION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"{text!r} is no condition: write a counter, a comparison and a number, such as "
            "'syncs>0', 'operators>+5%' or 'range:attention.total>5%'."
        )
    where, name = found["range"], found["name"]
    if where is not None and f".{where}".endswith(f".{KIND[:-1]}"):
        where, name = where.removesuffix(KIND[:-1]).removesuffix("."), f"{KIND}{name}"
    name = SHORT.get(name, name)
    known = [*COUNTERS, *(KIND + kind for kind in KINDS), *(TIMES if where else (STEP,))]
    if name in TIMES and where is None:
        raise ConfigError(
            f"{text!r} names no range: write 'range:NAME.{name}>5%', or '{STEP}>5%' for the step."
        )
    if name not in known:
        raise ConfigError(f"{text!r} names no counter{did_you_mean(name, known)}")
    units = {} if found["percent"] else units_of(name)
    is_time = name in TIMES or name == STEP
    if is_time and not found["percent"]:
        raise ConfigError(
            f"{text!r} judges a time: give its change in percent, such as '{STEP}>5%'."
        )
    try:
        amount = (
            Fraction(found["value"].strip())
            if found["percent"]
            else Fraction(quantity(found["value"], units))
        )
    except ValueError:
        raise ConfigError(
            f"{text!r} has the limit {found['value']!r}: give a number"
            + (f" with one of the units {', '.join(units)}." if units else ".")
        ) from None
    if found["percent"]:
        return Condition(text, where, name, found["operator"], amount / 100, "percent")
    kind: Literal["value", "difference"] = "difference" if found["sign"] else "value"
    return Condition(text, where, name, found["operator"], amount, kind)


def units_of(counter: str) -> Mapping[str, int]:
    """The units in which a limit of a counter can be given."""
    return BYTES if counter.endswith("_bytes") else COUNTS


def judge(condition: Condition, before: Side, after: Side) -> Verdict:
    """Judge one condition.

    Raises:
        ConfigError: the condition is on a range, and no range of either side matches the condition.
    """
    if condition.range is not None:
        paths = [path for one in (before, after) for each in one.counters for path in each.ranges]
        paths += [path for one in (before, after) for each in one.ranges_ns for path in each]
        if not any(fits_range(condition.range, path) for path in paths):
            names = sorted({path.rpartition("/")[2] for path in paths})
            raise ConfigError(
                f"{condition.text!r} names no range of either side"
                f"{did_you_mean(condition.range, names)}"
            )
    return (
        _judge_time(condition, before, after)
        if condition.is_time
        else _judge_counter(condition, before, after)
    )


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """The exit status of a command: 0, `FAILED` or `UNDECIDED`."""
    results = {each.result for each in verdicts}
    return FAILED if "fail" in results else UNDECIDED if "undecided" in results else 0


def _judge_counter(condition: Condition, before: Side, after: Side) -> Verdict:
    was, now = (_counted(condition, each) for each in (before, after))
    needed = [("after", now)] if condition.kind == "value" else [("before", was), ("after", now)]
    for when, count in needed:
        if (reason := _unusable(condition.name, when, count)) is not None:
            return Verdict(condition, "undecided", reason=reason)
    assert now is not None
    old, new = (None if was is None else was.per_step), now.most
    value = Fraction(new)
    if condition.kind != "value":
        value -= old or 0
    limit = condition.value * (old or 0) if condition.kind == "percent" else condition.value
    result: Result = "fail" if _OPERATORS[condition.operator](value, limit) else "pass"
    ranges = []
    if result == "fail" and condition.range is None:
        ranges = increased_ranges(before.counters[-1], after.counters[-1], condition.name)
    return Verdict(condition, result, old, new, ranges=tuple(ranges[:_MOST_RANGES]))


def _counted(condition: Condition, one: Side) -> Count | None:
    """The counter that a condition judges, on one side.

    The values of all matching ranges are added. Then the windows are joined: `total` is their sum,
    `least` the lowest and `most` the highest value. If a window does not hold the counter, the
    result is None.
    """
    found = [_in_window(condition, each) for each in one.counters]
    known = [count for count in found if count is not None]
    if not found or len(known) < len(found):
        return None
    return Count(
        sum(each.total for each in known),
        min(each.least for each in known),
        max(each.most for each in known),
    )


def _in_window(condition: Condition, counted: Counters) -> Count | None:
    if condition.range is None:
        return counted.count(condition.name)
    every = [counted.count(condition.name, path) for path in _outermost(condition, counted.ranges)]
    if not every:
        return counted.count(condition.name, condition.range)
    known = [count for count in every if count is not None]
    return Count(*map(sum, zip(*known))) if len(known) == len(every) else None


def _outermost(condition: Condition, paths: Mapping[str, object]) -> list[str]:
    """The paths that match a condition, without paths inside another matching path."""
    pattern = condition.range or ""
    fitting = {path for path in paths if fits_range(pattern, path)}
    return [
        path
        for path in fitting
        if not any(letter == "/" and path[:at] in fitting for at, letter in enumerate(path))
    ]


def fits_range(pattern: str, path: str) -> bool:
    """Whether a pattern equals or matches the path of a range, or the last name in the path."""
    return fits(pattern, path, path.rpartition("/")[2])


def _unusable(name: str, when: str, count: Count | None) -> str | None:
    """The reason why a counter cannot be judged; None if it can be judged."""
    if count is None:
        return f"{name} was not recorded {when} the change: {RECORD.get(name, 'record it again')}"
    if count.per_step is None:
        return (
            f"{name} varies between the steps {when} the change, from {count.least:,} to "
            f"{count.most:,}, so no limit can be judged: make the steps alike, or leave out the "
            "condition"
        )
    return None


def _judge_time(condition: Condition, before: Side, after: Side) -> Verdict:
    was, now = (_times(condition, each) for each in (before, after))
    if was is None or now is None:
        reason = f"the {condition.name} time is not known in at least one window"
        return Verdict(condition, "undecided", reason=reason)
    mean_was, mean_now = (sum(each) // len(each) if each else None for each in (was, now))
    if not was or not now:
        reason = "a baseline holds no times: give captures of both sides"
        return Verdict(condition, "undecided", mean_was, mean_now, reason)
    if min(len(was), len(now)) < LEAST_WINDOWS:
        return Verdict(
            condition,
            "undecided",
            mean_was,
            mean_now,
            f"times vary from run to run: record at least {LEAST_WINDOWS} windows on each side "
            "(profiler.repeat=3), and give the folders that hold them",
        )
    limit = 1 + condition.value
    scaled = [limit * each for each in was]
    is_above, is_below = is_higher(now, scaled), is_higher(scaled, now)
    if not is_above and not is_below:
        return Verdict(
            condition,
            "undecided",
            mean_was,
            mean_now,
            f"the times of the windows ({len(was)} before, {len(now)} after) vary too much: "
            "record more windows",
        )
    is_true = is_above if condition.operator.startswith(">") else is_below
    return Verdict(condition, "fail" if is_true else "pass", mean_was, mean_now)


def _times(condition: Condition, one: Side) -> list[int] | None:
    """The time that the condition judges in each window, in ns per step; None if not known."""
    if condition.range is None:
        return [*one.step_ns[:_MOST_WINDOWS]]
    found = []
    for times in one.ranges_ns[:_MOST_WINDOWS]:
        rows = [times[path] for path in _outermost(condition, times)]
        if any(condition.name not in row for row in rows):
            return None
        found.append(sum(row[condition.name] for row in rows))
    return found


def amount_of(counter: str) -> Callable[[int], str]:
    """The function that writes a counter's value as text, without rounding."""
    return ("{:,} bytes" if counter.endswith("_bytes") else "{:,}").format
