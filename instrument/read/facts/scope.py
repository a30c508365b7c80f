"""A part of a trace: some steps, or the events in a range, on a stream, or of a condition."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from instrument.base.errors import ConfigError
from instrument.base.globs import fits
from instrument.read.facts.expressions import expression, rows_where
from instrument.read.facts.facts import EVENTS, Facts
from instrument.read.facts.links import Links
from instrument.read.facts.schema import names_of
from instrument.read.trace.events import Events, Flags

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Scope:
    """Which events are asked about; None does not restrict them.

    Attributes:
        range: a glob for paths of ranges, such as `forward/*`; what lies inside a range counts too.
        stream: the stream of device events.
        where: a condition in SQL over the columns of `EVENTS`.
        within: a scope in which the events must be, too.
    """

    range: str | None = None
    stream: str | None = None
    where: str | None = None
    within: Scope | None = None

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in ("range", "stream", "where"))
        own = [f"{name} {value!r}" for name, value in given if value is not None]
        return ", ".join([*([str(self.within)] if self.within else []), *own])


def chosen_events(facts: Facts, scope: Scope) -> Flags:
    """Return a mask of the events in a scope.

    Raises:
        ConfigError: no range or stream fits, or the condition is not an expression of SQL.
    """
    chosen = (
        np.ones(len(facts.links.events), np.bool_)
        if scope.within is None
        else chosen_events(facts, scope.within)
    )
    if scope.range is not None:
        paths = facts.links.scopes.paths
        named = np.array([fits(scope.range, text) for text in paths.texts], np.bool_)
        if not named.any():
            raise ConfigError(
                f"No range fits {scope.range!r}; `instrument show --ranges` lists the ranges."
            )
        inside = np.append(paths.at_or_below(named), False)
        chosen &= inside[facts.path_codes]
    if scope.stream is not None:
        streams = facts.events("stream")["stream"]
        if scope.stream not in (known := streams.unique().drop_nulls().sort().to_list()):
            raise ConfigError(
                f"There is no stream {scope.stream!r}; device work ran on "
                f"{', '.join(known) or 'no stream'}."
            )
        chosen &= streams.eq_missing(scope.stream).to_numpy()
    if scope.where is not None:
        needed = expression(scope.where, names_of(EVENTS)).meta.root_names()
        columns = facts.events(*dict.fromkeys(["id", *needed]))
        chosen &= rows_where(scope.where, columns).to_numpy()
    return chosen


def parsed_steps(text: str) -> tuple[int, int]:
    """Read `3-5` or `3` as the first and the last step.

    Raises:
        ConfigError: the text is neither.
    """
    found = _STEPS.fullmatch(text)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise ConfigError(f"{text!r} is not a range of steps: write 3-5, or 3 for one step.")
    return int(found[1]), int(found[2] or found[1])


def only_steps(links: Links, first: int, last: int) -> Events:
    """Return the events of some steps; what reaches beyond them is cut at their borders.

    Device work belongs to the step in which it was launched, and is not cut. Work that an earlier
    step launched and that still runs is cut, without its launch, as in a recording of the steps.

    Raises:
        ConfigError: the trace has no finished step of these numbers.
    """
    events = links.events
    numbers = np.array(links.step_numbers, np.int64)
    spans, is_inside = links.finished_steps, (numbers >= first) & (numbers <= last)
    inside = links.steps[is_inside]
    if not len(inside):
        known = f"has the steps {numbers.min()}-{numbers.max()}" if len(numbers) else "has no steps"
        raise ConfigError(f"No finished step is in {first}-{last}: the trace {known}.")
    begin, end = int(spans.start_ns[is_inside][0]), int(spans.end_ns[is_inside][-1])
    device, launch = links.launches.device, links.launches.launch
    at = np.where(launch >= 0, events.start_ns[launch], events.start_ns[device])
    on_device = np.zeros(len(events), np.bool_)
    on_device[device] = True
    kept = ~on_device & (events.start_ns < end) & (events.end_ns > begin)
    kept |= ~on_device & (events.start_ns >= begin) & (events.end_ns < end)
    kept[links.steps] = False
    kept[inside] = True
    still_runs = (at < begin) & (events.end_ns[device] > begin)
    kept[device] = ((at >= begin) & (at < end)) | still_runs
    memory = events.memory
    then = (memory.time_ns >= begin) & (memory.time_ns < end)
    columns = {name: each[kept] for name, each in _columns(events, len(events)).items()}
    on_device[device[still_runs]] = False
    cut = ~on_device[kept]
    for name in ("start_ns", "end_ns"):
        columns[name][cut] = np.clip(columns[name][cut], begin, end)
    rows = {name: each[then] for name, each in _columns(memory, len(memory)).items()}
    every = {field.name: getattr(events, field.name) for field in fields(events)}
    return Events(**every | columns | {"memory": replace(memory, **rows)})


def _columns(table: Any, count: int) -> dict[str, Any]:
    every = ((field.name, getattr(table, field.name)) for field in fields(table))
    arrays = ((name, each) for name, each in every if isinstance(each, np.ndarray))
    return {name: each for name, each in arrays if len(each) == count}
