"""The parts of the steps that take most time: ranges, and the backward of ranges.

Submodules of one class, in ranges of one class, are one part. Instead of a range, the ranges inside
it are parts if one of them takes most of its time, or if it takes most of the steps. A trace with
device work is split by the work that ranges launch; any other by the CPU time of the steps' thread,
and where no range is among its largest parts, operators are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from instrument.base.prose import shortened
from instrument.base.range_names import RECOMPUTED
from instrument.base.units import percent
from instrument.read.facts.groupby import groupby_rows
from instrument.read.facts.idle import device_time
from instrument.read.facts.segments import thread_of_steps, waits_for_data
from instrument.read.trace.events import called_operators, is_compiled_code
from instrument.read.views.views import Views

_NO_RANGE, _DATA = -1, -2
_MOST, _LARGE, _LEAST, _LEAST_OPERATOR = 0.75, 0.65, 0.05, 0.25
_LONGEST_NAME, _SHOWN = 44, 3
_NO_OPERATOR = "no operator"


def largest_parts(capture: Views) -> str:
    """Return a sentence with at most three parts, and their shares of the steps.

    The parts do not overlap. Beside a part is the operator with the most time of those that its
    ranges call, and its share, if this is a quarter of the part's.
    """
    links, types = capture.links, capture.about.module_types
    paths, has_device_work = links.scopes.paths, bool(capture.work.duration_ns.any())
    whole_ns = device_time(capture)["total_ns"] or links.counted_steps.total_ns
    # A tree of parts: ranges with the same part around them, and the same class or else name.
    numbers: dict[tuple[int, str], int] = {}
    part_of, names = list[int](), defaultdict[int, set[str]](set)
    inside = defaultdict[int, set[int]](set)
    for above, name in zip(paths.above.tolist(), paths.names):
        plain = name.removesuffix(RECOMPUTED)
        kind = types.get(plain, plain) + name[len(plain) :]
        key = (part_of[above] if above >= 0 else _NO_RANGE, kind)
        part_of.append(numbers.setdefault(key, len(numbers)))
        names[part_of[-1]].add(plain)
        inside[key[0]].add(part_of[-1])
    parts, classes = [*numbers], Counter(name for _, name in numbers)
    own, total = (defaultdict[tuple[int, int], Counter[str]](Counter) for _ in range(2))
    for path, back, operator, ns in _times(capture):
        part = part_of[path] if path >= 0 else path
        own[part, back][operator] += ns
        while part >= 0:
            total[part, back][operator] += ns
            part = parts[part][0]
    all_ns = sum(each.total() for each in own.values())
    if not all_ns or all_ns > whole_ns:  # several devices or streams work at the same time
        return ""
    if not has_device_work:
        own[_NO_RANGE, 0][_NO_OPERATOR] += whole_ns - all_ns
    waiting = {"waiting for data": Counter({"": own[_DATA, 0].total()})}
    outside = {
        "in no range": own[_NO_RANGE, 0],
        "in the backward of no range": own[_NO_RANGE, 1],
    }
    found = waiting | outside
    left = [(part, back) for part in inside[_NO_RANGE] for back in (0, 1)]
    while left:
        part, back = left.pop()
        inner, (around, kind) = [(each, back) for each in inside[part]], parts[part]
        name = kind.removesuffix(RECOMPUTED)
        few = f"{len(names[part])} {name} modules" if len(names[part]) > 1 else min(names[part])
        of = "the backward of " * back + "the recomputation of " * (name != kind)
        label = f"in {of}{shortened(few, _LONGEST_NAME)}"
        if len(names[part]) > 1 and classes[kind] > 1 and around >= 0:
            label += f" of {shortened(parts[around][1].removesuffix(RECOMPUTED), _LONGEST_NAME)}"
        spent, largest = total[part, back], max((total[each].total() for each in inner), default=0)
        if inner and (largest >= _MOST * spent.total() or spent.total() >= _LARGE * whole_ns):
            left += inner
            spent, label = own[part, back], f"directly {label}"
        found[label] = found.get(label, Counter()) + spent
    shown = _largest(found, whole_ns)
    if not shown.keys() - {*waiting, *outside}:  # no range is among them
        if has_device_work:
            return ""
        operators = own[_NO_RANGE, 0] + own[_NO_RANGE, 1]
        named = {f"in {shortened(name, _LONGEST_NAME)}": ns for name, ns in operators.items()}
        shown = _largest(
            waiting | {name: Counter({"": ns}) for name, ns in named.items()}, whole_ns
        )
    texts = [_part(label, spent, whole_ns) for label, spent in shown.items()]
    what = "The largest ranges on the device" if has_device_work else "The largest parts"
    return f"{what}: {', '.join(texts)}." if texts else ""


def _largest(found: dict[str, Counter[str]], whole_ns: int) -> dict[str, Counter[str]]:
    """The parts with the most time, at most three, each with a twentieth of the whole."""
    by_time = sorted(found.items(), key=lambda each: -each[1].total())[:_SHOWN]
    return {label: spent for label, spent in by_time if spent.total() >= _LEAST * whole_ns}


def _part(label: str, spent: Counter[str], whole_ns: int) -> str:
    """A part with its share, and its largest operator if this takes a quarter of the part."""
    operator, ns = max(spent.items(), key=lambda each: each[1], default=("", 0))
    text = f"{percent(spent.total() / whole_ns)} {label}"
    if operator and ns >= _LEAST_OPERATOR * spent.total():
        text += f" ({percent(ns / whole_ns)} in {shortened(operator, _LONGEST_NAME)})"
    return text


def _times(capture: Views) -> Iterator[tuple[int, int, str, int]]:
    """The time in the steps by path of the range, whether backward, and outermost operator."""
    links, events = capture.links, capture.events
    tree, scopes, spent_ns = links.call_tree, links.scopes, links.counted_device_own_ns
    if spent_ns is None:
        spent_ns = np.where(tree.thread == thread_of_steps(links), links.counted_own_ns, 0)
    is_called = called_operators(events)[tree.index] & ~np.isin(tree.index, scopes.nodes.index)
    call = tree.top_of_chain(is_called, np.arange(len(tree)))
    generated = tree.at_or_inside(is_compiled_code(events)[tree.index]).astype(np.int64)
    outside = len(events.names) + generated
    operator = np.where(call >= 0, events.name[tree.index[call]], outside)
    loads = tree.at_or_inside(np.isin(tree.index, waits_for_data(capture)))
    path = np.where(loads, _DATA, scopes.path_of_node[:-1])
    back = np.append(scopes.backward, False)[scopes.innermost] & ~loads
    (paths, is_back, codes), groups = groupby_rows(path, back.astype(np.int64), operator)
    names = [*events.names, _NO_OPERATOR, "generated kernels"]
    operators = [names[code] for code in codes.tolist()]
    yield from zip(
        paths.tolist(), is_back.tolist(), operators, groups.sum(spent_ns).tolist(), strict=True
    )
