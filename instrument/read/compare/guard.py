"""Guards of CI: conditions such as `syncs>0`, and the verdict on each condition.

A condition describes what must not happen. The verdict is "fail" if the condition is true, "pass"
if it is false, and "undecided" if it is not known whether it is true: the counter was not recorded
or varies between steps, or the times of the windows vary too much.

docs/ci.md lists the forms of conditions. Times vary from run to run, so a condition on a time needs
at least three windows on each side.

`instrument diff --fail-on` compares two sides; each side is a list of `Window`. A baseline file is
one window without times. The pytest plugin compares a recording with the file of its test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any, Literal, NamedTuple

import polars as pl

from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.globs import fits
from instrument.base.prose import code, escaped, wrapped
from instrument.base.units import BYTES, COUNTS, duration, quantity
from instrument.read.compare.counters import COUNTERS, KIND, NEED_DEVICE, Count, Counters
from instrument.read.compare.increases import Call, Increase, increased_ranges
from instrument.read.compare.statistics import is_higher
from instrument.read.compare.sums import Sums
from instrument.read.facts.collective_records import COLLECTIVE_KINDS

Result = Literal["pass", "fail", "undecided"]

#: Exit statuses of commands. Errors have the status 2.
FAILED, UNDECIDED = 1, 3
#: What the keys of a verdict mean in JSON.
JSON_KEYS = {
    "condition": "the condition",
    "result": "`pass`, `fail` or `undecided`",
    "before": "the value before; `null` if it is not needed",
    "after": "the value after",
    "reason": "why the condition is undecided, and what to record",
    "ranges": "the innermost ranges in which the counter is higher than before",
}

_STEP = "step"
# The times of a range, with the columns of `Sums` that they sum over it and the ranges inside it.
_TIMES = {"total": "self_cpu_ns", "device": "self_device_ns"}
_SHORT = {"peak": "peak_bytes"}
# With fewer windows on each side, the test in `is_higher` cannot find any change.
_LEAST_WINDOWS, _MOST_WINDOWS = 3, 50
_MOST_RANGES = 5
_OPERATORS = {">=": ge, "<=": le, ">": gt, "<": lt}
_CONDITION = re.compile(
    r"(?:range:(?P<range>.+)\.)?(?P<name>\w+(?:\.\w+)?) *(?P<operator>[<>]=?) *"
    r"(?P<sign>\+?)(?P<value>[\d.]+ *\w*)(?P<percent> *%)?"
)
# How to record each counter that is not always recorded.
_RECORD = {
    **dict.fromkeys(
        ("allocations", "allocated_bytes", "peak_bytes"), "record with profile_memory=True"
    ),
    **dict.fromkeys(NEED_DEVICE, "record with a device among profiler.activities"),
    "flops": "record with with_flops=True",
    **dict.fromkeys(
        ("graph_breaks", "recompilations"), "record with a session, which writes capture.json"
    ),
}


class Condition(NamedTuple):
    """A condition on a counter or a time.

    Attributes:
        text: what the user wrote.
        range: a pattern for names or paths of ranges; None for the whole step.
        name: the counter or the time.
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
    kind: Literal["value", "difference", "percent"] = "value"

    @property
    def is_time(self) -> bool:
        """Whether the condition judges a time."""
        return self.name in _TIMES or self.name == _STEP

    @property
    def limit(self) -> str:
        """The limit as the user wrote it."""
        return self.text.partition(self.operator)[2].strip()

    def shown(self, value: float) -> str:
        """A value of what the condition judges, as text."""
        return duration(value) if self.is_time else amount_of(self.name)(int(value))


class Window(NamedTuple):
    """The counters and times of one window; a baseline has no times.

    `ranges_ns` has, for each path of a range, its times per step by their names, such as "total",
    without the ranges inside it.
    """

    counters: Counters
    step_ns: int | None = None
    ranges_ns: Mapping[str, Mapping[str, int | None]] = {}


class Verdict(NamedTuple):
    """The verdict on one condition.

    Attributes:
        condition: the condition.
        result: "fail", "pass" or "undecided"; see the module's docstring.
        before, after: the values of both sides; None if they are not known or not needed.
        reason: why the condition is undecided, and what to record; "" if it is decided.
        ranges: the innermost ranges in which the counter is higher than before, at most five. Empty
            unless `result` is "fail" and the condition is on a counter of the whole step.
    """

    condition: Condition
    result: Result
    before: float | None = None
    after: float | None = None
    reason: str = ""
    ranges: tuple[Increase, ...] = ()

    def __str__(self) -> str:
        """One line, such as "fail: syncs>0 (before 0, after 3)"."""
        values = [
            f"{when} {self.condition.shown(value)}"
            for when, value in (("before", self.before), ("after", self.after))
            if value is not None
        ]
        known = f" ({', '.join(values)})" if values else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.result}: {self.condition.text}{known}{why}"


def amount_of(counter: str) -> Callable[[int], str]:
    """The function that writes a counter's value as text, without rounding."""
    return ("{:,} bytes" if counter.endswith("_bytes") else "{:,}").format


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
    where, name, percent = found["range"], found["name"], found["percent"]
    if where is not None and f".{where}".endswith(f".{KIND[:-1]}"):
        where, name = where.removesuffix(KIND[:-1]).removesuffix("."), f"{KIND}{name}"
    name = _SHORT.get(name, name)
    known = [
        *COUNTERS,
        *(KIND + kind for kind in COLLECTIVE_KINDS),
        *(_TIMES if where else (_STEP,)),
    ]
    if name in _TIMES and where is None:
        raise ConfigError(
            f"{text!r} names no range: write 'range:NAME.{name}>5%', or '{_STEP}>5%' for the step."
        )
    if name not in known:
        raise ConfigError(f"{text!r} names no counter{did_you_mean(name, known)}")
    if (name in _TIMES or name == _STEP) and not percent:
        raise ConfigError(
            f"{text!r} judges a time: give its change in percent, such as '{_STEP}>5%'."
        )
    units = {} if percent else BYTES if name.endswith("_bytes") else COUNTS
    try:
        value = Fraction(found["value"].strip() if percent else quantity(found["value"], units))
    except ValueError:
        raise ConfigError(
            f"{text!r} has the limit {found['value']!r}: give a number"
            + (f" with one of the units {', '.join(units)}." if units else ".")
        ) from None
    if percent:
        return Condition(text, where, name, found["operator"], value / 100, "percent")
    kind: Literal["value", "difference"] = "difference" if found["sign"] else "value"
    return Condition(text, where, name, found["operator"], value, kind)


def budget(given: Mapping[str, Any]) -> list[Condition]:
    """The conditions that `perf_budget(…)` gives: each limit is the highest allowed value.

    Raises:
        ConfigError: a counter does not exist or is a time, or a limit has a wrong type or value.
    """
    found: list[Condition] = []
    for name, value in given.items():
        if name == "collectives" and isinstance(value, Mapping):
            found += [_limit(KIND + kind, limit) for kind, limit in value.items()]
        else:
            found.append(_limit(name, value))
    return found


def _limit(name: str, value: Any) -> Condition:
    if name in {_STEP, *_TIMES}:
        raise ConfigError(
            f"perf_budget limits {name!r}, which is a time and varies between runs of the same "
            "code: limit a counter, or compare times with `instrument diff`."
        )
    if not isinstance(value, int | str) or isinstance(value, bool) or str(value).startswith("-"):
        raise ConfigError(
            f"perf_budget limits {name} to {value!r}: give a whole number of 0 or more, or text "
            "such as '2M' or '+5%'."
        )
    return parse(f"{name}>{value}")


def limits_of(stored: Counters) -> list[Condition]:
    """The conditions that no counter is above its value in a baseline.

    A counter that varies between the steps of the baseline has no condition.
    """
    return [
        Condition(f"{name}>{count.per_step}", None, name, ">", Fraction(count.per_step))
        for name, count in stored.counts.items()
        if count is not None and count.per_step is not None
    ]


def window_of(sums: Sums, counted: Counters) -> Window:
    """The counters and times of one window; a time of a range is without the ranges inside it."""
    columns = [(pl.col(column) // sums.steps).alias(name) for name, column in _TIMES.items()]
    ranges = (
        sums["ranges"].filter(pl.col("calls").is_not_null()).select("range", *columns).to_dicts()
    )
    return Window(
        counted, sum(sums.steps_ns) // sums.steps, {row.pop("range"): row for row in ranges}
    )


def judge(condition: Condition, before: Sequence[Window], after: Sequence[Window]) -> Verdict:
    """Judge a condition on a counter or a time.

    Raises:
        ConfigError: the condition is on a range, and no range of either side matches the condition.
    """
    pattern = condition.range
    if pattern is not None:
        windows = [*before, *after]
        paths = {path for each in windows for path in (*each.counters.ranges, *each.ranges_ns)}
        if not any(_fits_range(pattern, path) for path in paths):
            names = sorted({path.rpartition("/")[2] for path in paths})
            raise ConfigError(
                f"{condition.text!r} names no range of either side{did_you_mean(pattern, names)}"
            )
    return (_judge_time if condition.is_time else _judge_counter)(condition, before, after)


def judge_budget(
    conditions: Iterable[Condition], stored: Counters | None, counted: Counters
) -> list[Verdict]:
    """Judge the conditions of a test on its recording; `stored` are the counters in its file."""
    before, after = [] if stored is None else [Window(stored)], [Window(counted)]
    return [judge(each, before, after) for each in conditions]


def breaks_budget(verdict: Verdict, counted: Counters) -> bool:
    """Whether a test fails: not for a counter that is unknown because there is no device."""
    name = verdict.condition.name
    without_device = name in NEED_DEVICE and counted.count(name) is None
    return verdict.result != "pass" and not without_device


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """The exit status of a command: `FAILED`, `UNDECIDED`, or 0 if all verdicts are "pass"."""
    results = {each.result for each in verdicts}
    return FAILED if "fail" in results else UNDECIDED if "undecided" in results else 0


def _judge_counter(
    condition: Condition, before: Sequence[Window], after: Sequence[Window]
) -> Verdict:
    was, now = (_counted(condition, each) for each in (before, after))
    name, is_change = condition.name, condition.kind != "value"
    reason = ""
    if is_change:
        nothing = "there is no baseline: `pytest --perf-update` writes it"
        reason = _unusable(name, was, " before the change") if before else nothing
    reason = reason or _unusable(name, now)
    if reason or now is None:
        return Verdict(condition, "undecided", reason=reason)
    old, new = (None if was is None else was.per_step), now.most
    value = Fraction(new - (old or 0) if is_change else new)
    limit = condition.value * (old or 0) if condition.kind == "percent" else condition.value
    if not _OPERATORS[condition.operator](value, limit):
        return Verdict(condition, "pass", old, new)
    ranges: list[Increase] = []
    if condition.range is None and before:
        ranges = increased_ranges(before[-1].counters, after[-1].counters, condition.name)
    return Verdict(condition, "fail", old, new, ranges=tuple(ranges[:_MOST_RANGES]))


def _counted(condition: Condition, windows: Sequence[Window]) -> Count | None:
    """The sum over the matching ranges, over all windows; None if one window lacks the counter."""
    found = [_in_window(condition, each.counters) for each in windows]
    known = [count for count in found if count is not None]
    if not found or len(known) < len(found):
        return None
    total, least, most = zip(*known)
    return Count(sum(total), min(least), max(most))


def _in_window(condition: Condition, counted: Counters) -> Count | None:
    if condition.range is None:
        return counted.count(condition.name)
    paths = _outermost(condition.range, counted.ranges) or [condition.range]
    every = [counted.count(condition.name, path) for path in paths]
    known = [count for count in every if count is not None]
    return Count(*map(sum, zip(*known))) if len(known) == len(every) else None


def _outermost(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that match a pattern, without paths inside another matching path."""
    fitting = {path for path in paths if _fits_range(pattern, path)}
    return [
        path
        for path in fitting
        if not any(letter == "/" and path[:at] in fitting for at, letter in enumerate(path))
    ]


def _fits_range(pattern: str, path: str) -> bool:
    return fits(pattern, path, path.rpartition("/")[2])


def _unusable(name: str, count: Count | None, where: str = "") -> str:
    """Why a counter cannot be judged; "" if it can."""
    if count is None:
        return f"{name} was not recorded{where}: {_RECORD.get(name, 'record it again')}"
    if count.per_step is None:
        return (
            f"{name} varies between the steps{where}, from {count.least:,} to {count.most:,}, so "
            "it can have no limit: make the steps alike, or leave out the condition"
        )
    return ""


def _judge_time(condition: Condition, before: Sequence[Window], after: Sequence[Window]) -> Verdict:
    was, now = (_times(condition, each) for each in (before, after))
    if was is None or now is None:
        reason = f"the {condition.name} time is not known in at least one window"
        return Verdict(condition, "undecided", reason=reason)
    old, new = (sum(each) // len(each) if each else None for each in (was, now))
    limit = 1 + condition.value
    scaled = [limit * each for each in was]
    is_above = is_below = False
    if not was or not now:
        reason = "a baseline holds no times: give captures of both sides"
    elif min(len(was), len(now)) < _LEAST_WINDOWS:
        reason = (
            f"times vary from run to run: record at least {_LEAST_WINDOWS} windows on each side "
            "(profiler.repeat=3), and give the folders that hold them"
        )
    else:
        is_above, is_below = is_higher(now, scaled), is_higher(scaled, now)
        reason = (
            f"the times of the windows ({len(was)} before, {len(now)} after) vary too much: "
            "record more windows"
        )
    if not is_above and not is_below:
        return Verdict(condition, "undecided", old, new, reason)
    is_true = is_above if condition.operator.startswith(">") else is_below
    return Verdict(condition, "fail" if is_true else "pass", old, new)


def _times(condition: Condition, windows: Sequence[Window]) -> list[int] | None:
    """The time in each window, in ns per step; None if a window lacks it, [] for a baseline."""
    found = []
    for window in windows[:_MOST_WINDOWS]:
        if window.step_ns is None:
            return []
        if condition.range is None:
            found.append(window.step_ns)
            continue
        times = [times[condition.name] for path, times in window.ranges_ns.items()
                 if _is_inside(condition.range, path)]  # fmt: skip
        known = [each for each in times if each is not None]
        if len(known) < len(times):
            return None
        found.append(sum(known))
    return found


def _is_inside(pattern: str, path: str) -> bool:
    """Whether a path or a path above it matches a pattern."""
    ends = [at for at, letter in enumerate(path) if letter == "/"]
    return any(_fits_range(pattern, path[:at]) for at in [*ends, len(path)])


def as_lines(
    verdict: Verdict, calls: Callable[[str | None], Iterable[Call]] = lambda _: ()
) -> Iterator[str]:
    """Yield the verdict, the ranges in which its counter increased, and the calls behind this.

    Args:
        verdict: the verdict.
        calls: the calls behind the increase in a range, or in the whole step (None).
    """
    yield from wrapped(str(verdict), indent="    ")
    for each in verdict.ranges:
        yield from wrapped(f"in {each.path}: {_change(verdict, each)}", prefix="  ", indent="    ")
        yield from _call_lines(calls(each.path))
    if not verdict.ranges:
        yield from _call_lines(calls(None))


def _call_lines(calls: Iterable[Call]) -> Iterator[str]:
    for call in calls:
        was = "" if call.before is None else f", before {call.before:,}"
        yield f"    {call.name}: {call.after:,} in each step{was}"
        yield from (f"      {source}" for source in call.stack)


def _change(verdict: Verdict, increase: Increase) -> str:
    shown = verdict.condition.shown
    return f"{shown(increase.after)}, before {shown(increase.before)}"


def as_dicts(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as JSON values; docs/json.md describes the keys."""
    return [
        verdict._asdict()
        | {"condition": verdict.condition.text, "reason": verdict.reason or None}
        | {"ranges": [each._asdict() for each in verdict.ranges]}
        for verdict in verdicts
    ]


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return a list of the verdicts, for a comment on a pull request."""
    lines = []
    for verdict in verdicts:
        rest = str(verdict).partition(verdict.condition.text)[2]
        lines.append(f"- **{verdict.result}** {code(verdict.condition.text)}{escaped(rest)}")
        lines += [
            f"  - in {code(each.path)}: {escaped(_change(verdict, each))}"
            for each in verdict.ranges
        ]
    return "\n".join(lines)
