"""Increases: the ranges and calls that make a counter higher than before, and their stacks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.read.compare.counters import Count, Counters, Occurred
from instrument.read.facts.groupby import groupby
from instrument.read.facts.places import users_source
from instrument.read.trace.events import split_overload
from instrument.read.views.views import Views

# At most this many calls, and frames of their stacks, are shown.
_SHOWN, _FRAMES = 3, 5


class Increase(NamedTuple):
    """A range in which a counter is higher than before.

    Attributes:
        path: the path of the range.
        before, after: the highest value that the counter has in a step.
    """

    path: str
    before: int
    after: int


class Call(NamedTuple):
    """A call that adds to a counter: the outermost operator that contains the counted event.

    Attributes:
        name: the name of the operator; of the event itself, if it is in no operator.
        before, after: how often a step makes this call in the same range, in the earlier and in the
            later capture, without calls in inner ranges. If the steps differ, the highest number of
            a step. `before` is None if the number of the earlier capture is not known. In this
            case, `after` can be the mean number of counted events per step, rounded down.
        stack: the Python frames of the user's code around the first such call, the innermost first,
            such as "model.py:31 in forward"; empty if the trace holds none, as in the backward.
    """

    name: str
    before: int | None
    after: int
    stack: list[str]


def increased_ranges(before: Counters, after: Counters, counter: str) -> list[Increase]:
    """The innermost ranges in which a counter is higher than before, the largest change first."""
    found = {}
    for path in after.ranges:
        was, now = before.count(counter, path), after.count(counter, path)
        if was is not None and now is not None and now.most > was.most:
            found[path] = Increase(path, was.most, now.most)
    around = {path[:at] for path in found for at, letter in enumerate(path) if letter == "/"}
    innermost = [each for path, each in found.items() if path not in around]
    return sorted(innermost, key=lambda each: each.before - each.after)


def calls_behind(
    counter: str, occurred: Occurred, before: Counters | None, after: Counters, path: str | None
) -> list[Call]:
    """The three calls that add most to a counter in a range, or in the whole step (None).

    If some calls are more frequent than in `before`, only these are returned.
    """
    found = occurred.of(counter)
    if found is None:
        return []
    events, paths = occurred.events, occurred.paths
    own = occurred.paths_of(found)
    is_in_range = np.array([path is None or each == path for each in paths.texts], np.bool_)
    inside = np.append(paths.at_or_below(is_in_range), path is None)[own]
    inside &= (occurred.steps_of(found) >= 0) & (found.event >= 0)
    called, own, weight = occurred.callers_of(found)[inside], own[inside], found.weight[inside]
    keys, groups = groupby((own + 1) * len(events.names) + events.name[called])
    firsts = called[groups.sorted_by(events.start_ns[called]).row(0)]
    calls = []
    for k in np.argsort(-groups.sum(weight), kind="stable").tolist():
        code, of_name = divmod(int(keys[k]), len(events.names))
        text = paths.texts[code - 1] if code else ""
        operator = split_overload(events.names[of_name])[0]
        now = after.calls.get(text, {}).get(operator)
        number = int(groups.size[k]) // after.steps if now is None else now.most
        earlier = None
        if before is not None and now is not None:
            earlier = before.calls.get(text, {}).get(operator, Count(0, 0, 0)).most
        calls.append((operator, earlier, number, int(firsts[k])))
    new = [call for call in calls if call[1] is None or call[2] > call[1]]
    return [
        Call(name, earlier, number, _stack_of(occurred.views, first))
        for name, earlier, number, first in (new or calls)[:_SHOWN]
    ]


def _stack_of(views: Views, event: int) -> list[str]:
    events, frames = views.events, views.links.frames
    at = np.array([event])
    node = int(frames.node_at(events.thread[at], events.start_ns[at])[0])
    found: list[str] = []
    while node >= 0 and len(found) < _FRAMES:
        source = users_source(events.names[events.name[frames.index[node]]])
        found += [source] if source is not None else []
        node = int(frames.parent[node])
    return found
