"""Match ranges whose path differs before and after a change.

If two ranges match, ranges directly inside them match if they have the same name. Any other range
matches the range of the other side with the most similar contents: the operators and ranges inside
it, with their calls per step. The similarity is the calls that both have, divided by the calls that
either has (of each name, the smaller and the larger number); it must be at least three quarters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from instrument.compare.totals import Totals

_ALIKE = 0.75
_MOST, _DEEPEST = 300, 200
# The number of calls per step of each name, in a range and all ranges inside it.
_Calls = Mapping[str, float]


def renamed(before: Totals, after: Totals) -> dict[str, str]:
    """Return the new path of each renamed range, by its old path.

    On each side, only the first 300 ranges without an equal path are matched, and contents more
    than 200 levels below a range do not count.
    """
    gone, new = _left_over(before, after), _left_over(after, before)
    if not gone or not new:
        return {}
    old_calls, new_calls = _contents(before, gone), _contents(after, new)
    below = {(after.contents[path].parent, after.contents[path].name): path for path in new}
    found: dict[str, str] = {}
    for path in gone:  # a range comes after the range around it
        own = before.contents[path]
        parent = own.parent if own.parent is None else found.get(own.parent, own.parent)
        match = below.get((parent, own.name)) or _most_alike(
            old_calls[path],
            new_calls,
            {each for each in new_calls if after.contents[each].name == own.name},
        )
        if match in new_calls:
            found[path] = match
            del new_calls[match]
    return found


def _left_over(totals: Totals, other: Totals) -> list[str]:
    ran = (path for path in totals.contents if path in totals.ranges)
    return [path for path in ran if path not in other.contents][:_MOST]


def _most_alike(calls: _Calls, others: Mapping[str, _Calls], preferred: set[str]) -> str | None:
    scores = {path: _likeness(calls, other) for path, other in others.items()}
    order = sorted(scores, key=lambda path: (-scores[path], path not in preferred))
    return order[0] if order and scores[order[0]] >= _ALIKE else None


def _likeness(one: _Calls, other: _Calls) -> float:
    fewer, more = sorted((sum(one.values()), sum(other.values())))
    if fewer < _ALIKE * more or not fewer:
        return 0.0
    common = sum(min(number, other.get(name, 0)) for name, number in one.items())
    return common / (fewer + more - common)


def _contents(totals: Totals, paths: list[str]) -> dict[str, _Calls]:
    found: dict[str, Counter[str]] = {path: Counter() for path in paths}
    for path, own in totals.contents.items():
        calls = Counter({f"operator {name}": number for name, number in own.calls.items()})
        if path in found:
            found[path].update(calls)
        calls[f"range {own.name}"] = totals.ranges.get(path, {}).get("calls") or 0
        for around in islice(_around(totals, path), _DEEPEST):
            if around in found:
                found[around].update(calls)
    steps = max(totals.counted_steps, 1)
    return {
        path: {name: number / steps for name, number in calls.items() if number}
        for path, calls in found.items()
    }


def _around(totals: Totals, path: str) -> Iterator[str]:
    parent = totals.contents[path].parent
    while parent is not None:
        yield parent
        parent = totals.contents[parent].parent
