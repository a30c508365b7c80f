"""Increases: the ranges and calls that make a counter higher than before, and their stacks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.analysis.places import users_source
from instrument.analysis.views import Views
from instrument.compare.counters import Count, Counters, Occurred
from instrument.links.groupby import groupby
from instrument.trace.events import split_overload

#: The number of frames of a stack that are shown.
FRAMES = 5


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
    """A call that adds to a counter, such as the number of allocations.

    The call is the outermost operator that contains the counted event or is this event. If the
    event is in no operator, the call is the event itself.

    Attributes:
        name: the name of the operator or event.
        before, after: how often a step makes this call in the same range, in the earlier and in the
            later capture. If the steps differ, the highest number of a step. Calls in inner ranges
            do not count. `before` is None if the number of the earlier capture is not known. In
            this case, `after` can be the mean number of counted events per step, rounded down.
        event: the position of the first such call in the table of events of the later capture.
    """

    name: str
    before: int | None
    after: int
    event: int


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
    """The calls that a counter counts in a range, or in the whole step if `path` is None.

    Only calls that a step makes more often than in `before` are returned. If there are no such
    calls, or if `before` is None, all calls are returned. The call that adds most to the counter
    comes first.
    """
    found = occurred.of(counter)
    if found is None:
        return []
    events, paths = occurred.views.events, occurred.views.links.scopes.paths
    own = occurred.paths_of(found)
    is_in_range = np.array([path is None or each == path for each in paths.texts], np.bool_)
    inside = np.append(paths.at_or_below(is_in_range), path is None)[own]
    inside &= (occurred.steps_of(found) >= 0) & (found.event >= 0)
    called, own, weight = occurred.callers_of(found)[inside], own[inside], found.weight[inside]
    keys, groups = groupby((own + 1) * len(events.names) + events.name[called])
    firsts = called[groups.sorted_by(events.start_ns[called]).row(0)]
    calls = []
    for k in np.argsort(-groups.sum(weight), kind="stable").tolist():
        code, name = divmod(int(keys[k]), len(events.names))
        text = paths.texts[code - 1] if code else ""
        operator = split_overload(events.names[name])[0]
        now = after.calls.get(text, {}).get(operator)
        number = int(groups.size[k]) // after.steps if now is None else now.most
        earlier = None
        if before is not None and now is not None:
            earlier = before.calls.get(text, {}).get(operator, Count(0, 0, 0)).most
        calls.append(Call(operator, earlier, number, int(firsts[k])))
    new = [call for call in calls if call.before is None or call.after > call.before]
    return new or calls


def stack_of(views: Views, event: int) -> list[str]:
    """The Python frames of the user's code around an event, the innermost first.

    A frame is a text such as "model.py:31 in forward". The result is empty if the trace holds no
    Python frames around the event. For example, the backward pass runs on a thread without Python
    frames.
    """
    events, frames = views.events, views.links.frames
    at = np.array([event])
    node = int(frames.node_at(events.thread[at], events.start_ns[at])[0])
    found: list[str] = []
    while node >= 0 and len(found) < FRAMES:
        source = users_source(events.names[events.name[frames.index[node]]])
        found += [source] if source is not None else []
        node = int(frames.parent[node])
    return found
