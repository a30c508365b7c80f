"""Limits of CI: conditions such as `syncs>0`, and the verdict on each.

A condition describes what must not happen. The verdict is "fail" if the condition is true, "pass"
if it is false, and "undecided" if it is not known whether it is true: the counter was not recorded
or varies between steps, or the times of the windows vary too much.

docs/ci.md lists the forms of conditions: a counter, the answer to a query in SQL over the tables of
events and segments, or a time. Times vary from run to run, so a condition on a time needs at least
three windows on each side.
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
from instrument.read.compare.counters import (
    COUNTERS,
    KIND,
    RECORD,
    Call,
    Count,
    Counters,
    counter_of,
)
from instrument.read.compare.statistics import is_higher
from instrument.read.compare.sums import Sums
from instrument.read.facts.collective_records import COLLECTIVE_KINDS
from instrument.read.views.views import Views

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
    r"(?:\((?P<query>.+)\)|(?:range:(?P<range>.+)\.)?(?P<name>\w+(?:\.\w+)?)) *"
    r"(?P<operator>[<>]=?) *(?P<sign>\+?)(?P<value>[\d.]+ *\w*)(?P<percent> *%)?",
    re.DOTALL,
)


class Condition(NamedTuple):
    """A condition on a counter, on the answer to a query, or on a time.

    Attributes:
        text: what the user wrote.
        range: a pattern for names or paths of ranges; None for the whole step.
        name: the counter, the time, or the query.
        operator: ">", ">=", "<" or "<=".
        value: the limit. If `kind` is "percent", it is a share of the value before the change.
        kind: what is compared with the limit. "value": the value after the change. "difference":
            this value minus the value before. "percent": the difference as a share of the value
            before.
        is_query: whether `name` is a query in SQL.
    """

    text: str
    range: str | None
    name: str
    operator: str
    value: Fraction
    kind: Literal["value", "difference", "percent"] = "value"
    is_query: bool = False

    @property
    def is_time(self) -> bool:
        """Whether the condition judges a time."""
        return self.name in _TIMES or self.name == _STEP

    @property
    def limit(self) -> str:
        """The limit as the user wrote it."""
        return self.text.rpartition(self.operator)[2].strip()

    def shown(self, value: float) -> str:
        """A value of what the condition judges, as text."""
        if self.is_query:
            return f"{value:,}"
        return duration(value) if self.is_time else amount_of(self.name)(int(value))


class Window(NamedTuple):
    """What conditions judge of one window. Of a baseline, only the counters are known.

    Attributes:
        counters: the counters.
        answers: the answers to queries; None if an answer is null.
        step_ns: the mean step; None for a baseline.
        ranges: `range` and the times of `_TIMES` per step, without the ranges inside each range.
    """

    counters: Counters
    answers: Mapping[str, float | None] = {}
    step_ns: int | None = None
    ranges: pl.DataFrame = pl.DataFrame({"range": []}, {"range": pl.String})


class Increase(NamedTuple):
    """A range in which a counter is higher than before.

    Attributes:
        path: the path of the range.
        before, after: the highest value that the counter has in a step.
    """

    path: str
    before: int
    after: int


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
            "'syncs>0', 'operators>+5%', 'range:attention.total>5%' or '(select …)>0'."
        )
    where, name, percent = found["range"], found["query"] or found["name"], found["percent"]
    is_query = bool(found["query"])
    if where is not None and f".{where}".endswith(f".{KIND[:-1]}"):
        where, name = where.removesuffix(KIND[:-1]).removesuffix("."), f"{KIND}{name}"
    name = _SHORT.get(name, name)
    times = _TIMES if where else (_STEP,)
    known = [*COUNTERS, *(KIND + kind for kind in COLLECTIVE_KINDS), *times]
    if name in _TIMES and where is None:
        raise ConfigError(
            f"{text!r} names no range: write 'range:NAME.{name}>5%', or '{_STEP}>5%' for the step."
        )
    if not is_query and name not in known:
        raise ConfigError(f"{text!r} names no counter{did_you_mean(name, known)}")
    if name in times and not percent:
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
    kind: Literal["value", "difference", "percent"] = "difference" if found["sign"] else "value"
    if percent:
        kind, value = "percent", value / 100
    return Condition(text, where, name, found["operator"], value, kind, is_query)


def budget(given: Mapping[str, Any], conditions: Iterable[Any] = ()) -> list[Condition]:
    """The conditions that `perf_budget(…)` gives: the highest value of counters, and conditions.

    Raises:
        ConfigError: a counter does not exist or is a time, a limit has a wrong type or value, or a
            condition is not one.
    """
    written: list[str] = []
    limits = {name: given[name] for name in given if name != "collectives"}
    of_kinds = given.get("collectives", {})
    if not isinstance(of_kinds, Mapping):
        limits["collectives"], of_kinds = of_kinds, {}
    limits |= {KIND + kind: limit for kind, limit in of_kinds.items()}
    for name, value in limits.items():
        if name in {_STEP, *_TIMES}:
            raise _time_in_budget(name)
        is_limit = isinstance(value, int | str) and not isinstance(value, bool)
        if not is_limit or str(value).startswith("-"):
            raise ConfigError(
                f"perf_budget limits {name} to {value!r}: give a whole number of 0 or more, or "
                "text such as '2M' or '+5%'."
            )
        written.append(f"{name}>{value}")
    for each in conditions:
        if not isinstance(each, str):
            raise ConfigError(
                f"perf_budget has the argument {each!r} without a name: name the counter, such as "
                "syncs=0, or write a condition such as '(select …)>0'."
            )
        written.append(each)
    found = [*map(parse, written)]
    for condition in found:
        if condition.is_time:
            raise _time_in_budget(condition.text)
    return found


def _time_in_budget(text: str) -> ConfigError:
    return ConfigError(
        f"perf_budget limits {text!r}, which is a time and varies between runs of the same code: "
        "limit a counter, or compare times with `instrument diff`."
    )


def limits_of(stored: Counters) -> list[Condition]:
    """The conditions that no counter is above its value in a baseline.

    A counter that varies between the steps of the baseline has no condition.
    """
    return [
        parse(f"{name}>{count.per_step}")
        for name, count in stored.counts.items()
        if count is not None and count.per_step is not None
    ]


def window_of(
    capture: Views, counted: Counters, conditions: Iterable[Condition], sums: Sums | None = None
) -> Window:
    """What conditions judge of a capture: its counters, the answers to queries, and its times.

    Without `sums`, the times are not known.

    Raises:
        ConfigError: a query cannot be answered, or its answer is no single number.
    """
    answers = {each.name: _answer(capture, each.name) for each in conditions if each.is_query}
    if sums is None:
        return Window(counted, answers)
    times = [(pl.col(column) // sums.steps).alias(name) for name, column in _TIMES.items()]
    ranges = sums["ranges"].filter(pl.col("calls").is_not_null()).select("range", *times)
    return Window(counted, answers, sum(sums.steps_ns) // sums.steps, ranges)


def _answer(capture: Views, query: str) -> float | None:
    frame = capture.sql(query).frame
    if frame.shape != (1, 1) or not (frame.dtypes[0].is_numeric() or frame.dtypes[0] == pl.Null):
        raise ConfigError(
            f"The answer to {query!r} is no single number, which a condition needs: write a query "
            "such as select count(*) from events where kind = 'kernel' and counted."
        )
    found: float | None = frame.item()
    return found


def judge(condition: Condition, before: Sequence[Window], after: Sequence[Window]) -> Verdict:
    """Judge a condition.

    Raises:
        ConfigError: the condition is on a range, and no range of either side matches the condition.
    """
    pattern = condition.range
    if pattern is not None:
        windows = [*before, *after]
        paths = {path for each in windows for path in each.counters.ranges}
        paths.update(path for each in windows for path in each.ranges["range"])
        if not any(_fits_range(pattern, path) for path in paths):
            names = sorted({path.rpartition("/")[2] for path in paths})
            raise ConfigError(
                f"{condition.text!r} names no range of either side{did_you_mean(pattern, names)}"
            )
    return (_judge_time if condition.is_time else _judge_count)(condition, before, after)


def breaks_budget(verdict: Verdict, counted: Counters) -> bool:
    """Whether a test fails: not for a counter that is unknown because there is no device."""
    condition = verdict.condition
    is_unknown = not condition.is_query and counted.count(condition.name) is None
    without_device = is_unknown and counter_of(condition.name).needs == "a device"
    return verdict.result != "pass" and not without_device


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """The exit status of a command: `FAILED`, `UNDECIDED`, or 0 if all verdicts are "pass"."""
    results = {each.result for each in verdicts}
    return FAILED if "fail" in results else UNDECIDED if "undecided" in results else 0


def _judge_count(
    condition: Condition, before: Sequence[Window], after: Sequence[Window]
) -> Verdict:
    was, now = (_counted(condition, each) for each in (before, after))
    is_change = condition.kind != "value"
    reason = ""
    if is_change:
        nothing = "there is no baseline: `pytest --perf-update` writes it"
        reason = _unusable(condition, was, " before the change") if before else nothing
    reason = reason or _unusable(condition, now)
    if reason or now is None:
        return Verdict(condition, "undecided", reason=reason)
    old, new = (None if was is None else was.per_step), now.most
    value = Fraction(new - (old or 0) if is_change else new)
    limit = condition.value * Fraction(old or 0) if condition.kind == "percent" else condition.value
    if not _OPERATORS[condition.operator](value, limit):
        return Verdict(condition, "pass", old, new)
    ranges: list[Increase] = []
    if condition.range is None and before and not condition.is_query:
        ranges = increased_ranges(before[-1].counters, after[-1].counters, condition.name)
    return Verdict(condition, "fail", old, new, ranges=tuple(ranges[:_MOST_RANGES]))


def _counted(condition: Condition, windows: Sequence[Window]) -> Count | None:
    """The sum over the matching ranges, over all windows; None if one window lacks the counter."""
    found = [_in_window(condition, each) for each in windows]
    known = [count for count in found if count is not None]
    if not found or len(known) < len(found):
        return None
    total, least, most = zip(*known)
    return Count(sum(total), min(least), max(most))


def _in_window(condition: Condition, window: Window) -> Count | None:
    counted, name = window.counters, condition.name
    if condition.is_query:
        answer: Any = window.answers.get(name)
        return None if answer is None else Count(answer, answer, answer)
    if condition.range is None:
        return counted.count(name)
    fitting = {path for path in counted.ranges if _fits_range(condition.range, path)}
    outermost = [path for path in fitting if fitting.isdisjoint(_above(path))]
    every = [counted.count(name, path) for path in outermost or [condition.range]]
    known = [count for count in every if count is not None]
    return Count(*map(sum, zip(*known))) if len(known) == len(every) else None


def _above(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def _fits_range(pattern: str, path: str) -> bool:
    return fits(pattern, path, path.rpartition("/")[2])


def increased_ranges(before: Counters, after: Counters, counter: str) -> list[Increase]:
    """The innermost ranges in which a counter is higher than before, the largest change first."""
    found = {}
    for path in after.ranges:
        was, now = before.count(counter, path), after.count(counter, path)
        if was is not None and now is not None and now.most > was.most:
            found[path] = Increase(path, was.most, now.most)
    around = {above for path in found for above in _above(path)}
    innermost = [each for path, each in found.items() if path not in around]
    return sorted(innermost, key=lambda each: each.before - each.after)


def _unusable(condition: Condition, count: Count | None, where: str = "") -> str:
    """Why a counter or an answer cannot be judged; "" if it can."""
    if count is not None and count.per_step is not None:
        return ""
    if condition.is_query and count is None:
        return f"the query has no answer{where and f'{where}: a baseline has only counters'}"
    if count is None:
        how = RECORD[counter_of(condition.name).needs]
        return f"{condition.name} was not recorded{where}: {how}"
    name, unit = ("the answer", "windows") if condition.is_query else (condition.name, "steps")
    return (
        f"{name} varies between the {unit}{where}, from {count.least:,} to {count.most:,}, so "
        f"it can have no limit: make the {unit} alike, or leave out the condition"
    )


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
        if (pattern := condition.range) is None:
            found.append(window.step_ns)
            continue
        inside = [
            any(_fits_range(pattern, each) for each in (*_above(path), path))
            for path in window.ranges["range"]
        ]
        times = window.ranges[condition.name].filter(pl.Series(inside, dtype=pl.Boolean))
        if times.has_nulls():
            return None
        found.append(int(times.sum()))
    return found


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
    if not verdict.ranges and not verdict.condition.is_query:
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
