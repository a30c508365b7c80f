"""Find the range and the source line of events, which are positions in `capture.events`.

In a trace with Python frames, the source line is the first line of the function; torch does not
record the line of the call.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import NamedTuple, TypeGuard

import numpy as np

from instrument.analysis.views import Views
from instrument.links.groupby import Groups, distinct, groupby
from instrument.links.intervals import Intervals, merged, within
from instrument.links.links import Links
from instrument.trace.events import Codes, Events, Ints, decoded, flags, is_runtime

# A range or a source is the place of a problem if at least this share of the time lies there.
_MOSTLY = 0.9
_FRAME = re.compile(r"(?P<file>[^;<>]+\.pyx?)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
_PACKAGES = re.compile(r"[/\\](?:(?:site|dist)-packages|python\d(?:\.\d+)?)(?=[/\\])")
# Packages that a user does not change. Kineto removes the folders of sys.path from file names.
_LIBRARIES = frozenset(
    {"torch", "torchgen", "functorch", "numpy", "instrument", "tqdm", "pytest", "_pytest", "pluggy"}
)


class Place(NamedTuple):
    """Events in one range and one line of source.

    `range` is None outside of all ranges. `source` is text such as "train.py:31 in main", or None.
    `total_ns` is the sum of the events' times, or of the weights given to `places`.
    """

    range: str | None
    source: str | None
    events: Ints
    total_ns: int


def places(capture: Views, events: Ints, weight_ns: Ints | None = None) -> list[Place]:
    """Group events by their range and source line, the place with the most time first.

    `weight_ns` is a time for each event; by default, its duration.
    """
    weight_ns = capture.events.duration_ns[events] if weight_ns is None else weight_ns
    paths, (sources, texts) = range_codes(capture, events), source_codes(capture, events)
    keys, groups = groupby((paths + 1) * (len(texts) + 1) + sources + 1)
    total_ns = groups.sum(weight_ns)
    rows = groups.rows()
    ranges = capture.links.scopes.paths.texts
    found = []
    for k in np.argsort(-total_ns, kind="stable").tolist():
        path, source = divmod(int(keys[k]), len(texts) + 1)
        found.append(
            Place(
                range=ranges[path - 1] if path else None,
                source=texts[source - 1] if source else None,
                events=events[rows[k]],
                total_ns=int(total_ns[k]),
            )
        )
    return found


def common_place(
    capture: Views, events: Ints, weight_ns: Ints | None = None
) -> tuple[str | None, str | None]:
    """Return the innermost range and the source line that hold at least 90 % of the events' time.

    A value is None if there is no such range or source.
    """
    weight_ns = capture.events.duration_ns[events] if weight_ns is None else weight_ns
    needed = max(_MOSTLY * int(weight_ns.sum()), 1)
    return (
        _common_range(capture, events, weight_ns, needed),
        _common_source(capture, events, weight_ns, needed),
    )


def _common_range(capture: Views, events: Ints, weight_ns: Ints, needed_ns: float) -> str | None:
    paths, own = capture.links.scopes.paths, range_codes(capture, events)
    inside = own >= 0
    of_path = Groups(own, len(paths.texts)).sum(weight_ns, inside)
    enough = np.flatnonzero(paths.with_descendants(of_path) >= needed_ns)
    # A path comes after its ancestors, so the last path with enough time is an innermost one.
    return paths.texts[enough[-1]] if len(enough) else None


def _common_source(capture: Views, events: Ints, weight_ns: Ints, needed_ns: float) -> str | None:
    sources, texts = source_codes(capture, events)
    total_ns = Groups(sources, len(texts)).sum(weight_ns, sources >= 0)
    enough = np.flatnonzero(total_ns >= needed_ns)
    return texts[enough[0]] if len(enough) else None


def range_codes(capture: Views, events: Ints) -> Ints:
    """For each event, the path of its range as an index into `links.scopes.paths`; -1 for none.

    Backward work belongs to the range of its forward operator. A device event belongs to the range
    that launched it.
    """
    return capture.links.scopes.path_of_node[nodes_of(capture.links, events)]


def range_of(capture: Views, event: int) -> str | None:
    """The path of the range that one event belongs to; None outside of all ranges."""
    code = int(range_codes(capture, np.array([event]))[0])
    return capture.links.scopes.paths.texts[code] if code >= 0 else None


def nodes_of(links: Links, events: Ints) -> Ints:
    """For each event, the node of the call tree that it belongs to; -1 for none.

    An operator or a range is a node itself. A runtime call or a device event belongs to the
    operator or range that called or launched it, any other event to the innermost node around it.
    """
    table, tree = links.events, links.call_tree
    if not len(tree) or not len(events):
        return np.full(len(events), -1)
    node = tree.nodes_of(events)
    calls = table.among(is_runtime)[events]
    if calls.any():  # a runtime call may lie on another thread than its operator
        node[calls] = links.nodes_of_calls(events[calls])
    device, launcher = links.launched
    launched = np.full(len(table) + 1, -1)
    launched[device] = launcher
    is_on_device = np.zeros(len(table) + 1, np.bool_)
    is_on_device[device] = True
    on_device = is_on_device[events]
    node[on_device] = launched[events[on_device]]
    others = (node < 0) & ~on_device & ~calls
    if others.any():
        rest = events[others]
        node[others] = tree.node_at(table.thread[rest], table.start_ns[rest])
    return node


def source_codes(capture: Views, events: Ints) -> tuple[Ints, list[str]]:
    """The source of each event as an index into the returned texts; -1 if it is not known.

    The source is the innermost Python frame of the user's code. A device event has the source of
    its launch. The autograd engine's threads have no Python frames, so the backward has no source.
    """
    links, table = capture.links, capture.events
    launches = links.launches
    caller = np.append(np.arange(len(table)), -1)  # the last entry is for the position -1
    caller[launches.device] = launches.launch
    at = caller[events]
    frames = links.frames
    code = _source_of_frames(links, at) if len(frames) else _source_of_texts(links, at)
    known, found = np.unique(code[code >= 0], return_inverse=True)
    sources = _frame_sources(table) if len(frames) else _text_sources(table)
    texts = [sources[k] or "" for k in known.tolist()]
    codes = np.full(len(events), -1)
    codes[code >= 0] = found
    return codes, texts


def source_of(capture: Views, event: int) -> str | None:
    """The source of one event, such as "train.py:31 in main"; None if it is not known."""
    codes, texts = source_codes(capture, np.array([event]))
    return texts[codes[0]] if codes[0] >= 0 else None


def input_shapes(events: Events, event: int) -> list[list[int] | None]:
    """The shape of each input of an operator; empty if not recorded, None for a list of tensors."""
    code = int(events.shapes[event])
    found = decoded(events.texts[code]) if code >= 0 else None
    shapes = found if isinstance(found, list) else []
    return [shape if is_shape(shape) else None for shape in shapes]


def is_shape(value: object) -> TypeGuard[list[int]]:
    """Whether a decoded value is a list of integers."""
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def has_sources(capture: Views) -> bool:
    """Whether the trace holds Python frames or call stacks, and so has files and lines."""
    return len(capture.links.frames) > 0 or bool((capture.events.call_stack >= 0).any())


def time_by_source(capture: Views, thread: int, spans: Intervals) -> dict[str, int]:
    """The time in ns that a thread spent in each function of the user within the given spans.

    It includes what the function calls in libraries. Empty if the trace has no Python frames.
    """
    frames, table = capture.links.frames, capture.events
    own = frames.thread == thread
    if not own.any():
        return {}
    cuts = np.unique(np.concatenate([*spans, frames.start_ns[own], frames.end_ns[own]]))
    begin, end = cuts[:-1], cuts[1:]
    inside_ns = within(merged(*spans), begin, end)
    begin, inside_ns = begin[inside_ns > 0], inside_ns[inside_ns > 0]
    middle = begin + 1  # at `begin`, a frame that ends there would still count
    name = _users_frame_at(capture.links, np.full(len(begin), thread, np.int32), middle)
    names, groups = groupby(name)
    totals: dict[str, int] = {}
    for code, total in zip(names.tolist(), groups.sum(inside_ns).tolist()):
        source = users_source(table.names[code]) if code >= 0 else None
        if source is not None:
            totals[source] = totals.get(source, 0) + total
    return totals


def _source_of_frames(links: Links, events: Ints) -> Ints:
    """For each event, the user's innermost frame, as an index of a name; -1 for none."""
    table = links.events
    known = np.flatnonzero(events >= 0)
    found = np.full(len(events), -1)
    inside = events[known]
    found[known] = _users_frame_at(links, table.thread[inside], table.start_ns[inside])
    return found


def _users_frame_at(links: Links, thread: Codes, time_ns: Ints) -> Ints:
    """For each thread and time, the user's innermost frame, as an index of a name; -1 for none."""
    frames, table = links.frames, links.events
    is_users = flags(bool, tuple(_frame_sources(table)))[table.name[frames.index]]
    node = frames.nearest(is_users, frames.node_at(thread, time_ns))
    found: Ints = np.where(node >= 0, table.name[np.append(frames.index, -1)[node]], -1)
    return found


def _source_of_texts(links: Links, events: Ints) -> Ints:
    """For each event, the nearest operator's call stack, as an index of a text; -1 for none."""
    table, tree = links.events, links.call_tree
    if not (table.call_stack >= 0).any():
        return np.full(len(events), -1)
    node = nodes_of(links, np.where(events >= 0, events, 0))
    node = tree.nearest(table.call_stack[tree.index] >= 0, node)
    stack = np.append(table.call_stack[tree.index], -1)[node]
    found: Ints = np.where((events >= 0) & (node >= 0), stack, -1)
    usable = np.append(flags(bool, tuple(_text_sources(table))), False)
    return np.where(usable[found], found, -1)


def _frame_sources(events: Events) -> list[str | None]:
    return [users_source(name) for name in events.names]


def _text_sources(events: Events) -> list[str | None]:
    used = set(distinct(events.call_stack).tolist())
    return [
        _first_source(str(decoded(text))) if k in used else None
        for k, text in enumerate(events.texts)
    ]


def _first_source(stack: str) -> str | None:
    found = (users_source(frame) for frame in stack.split(";"))
    return next(filter(None, found), None)


@lru_cache(maxsize=100_000)
def users_source(frame: str) -> str | None:
    """The place of a frame of the user's, such as "train.py:31 in main"; None for other frames."""
    match = _FRAME.fullmatch(frame)
    if match is None:
        return None
    folders = [folder.end() + 1 for folder in _PACKAGES.finditer(match["file"])]
    file = match["file"][max(folders, default=0) :]
    top = re.split(r"[/\\]", file)[0].removesuffix(".py")
    if top in _LIBRARIES or top in sys.stdlib_module_names or "/torch/" in file:
        return None
    return f"{file}:{match['line']} in {match['function']}"
