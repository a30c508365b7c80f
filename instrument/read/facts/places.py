"""Find the range and the source line of events, which are positions in `capture.links.events`.

In a trace with Python frames, the source line is the first line of the function; torch does not
record the line of the call. For a function in which the recording began, torch records the line of
this moment, which is no line of a problem, so such a source has no line. Without frames, the source
is the line of the call, by samples (`instrument.read.facts.lines`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeGuard

import numpy as np
import polars as pl

from instrument.read.facts.groupby import Groups, distinct
from instrument.read.facts.lines import (
    FEWEST,
    cut_by_sample,
    function_of,
    lines_of_nodes,
    places_of_samples,
)
from instrument.read.facts.links import Links, thread_of_steps
from instrument.read.facts.traced import Traced
from instrument.read.trace.events import (
    Codes,
    Events,
    Ints,
    called_operators,
    decoded,
    is_runtime,
)
from instrument.read.trace.line_samples import COMPREHENSIONS

# A range or a source is the place of a problem if at least this share of the time lies there; a
# source that samples found, which are not in every operator, if half of it does.
_MOSTLY = 0.9
_FRAME = re.compile(r"(?P<file>[^;<>]+\.pyx?)\((?P<line>\d+)\): (?P<function>.+)", re.DOTALL)
# Around this frame are the functions in which the recording began.
_START = re.compile(r"torch/autograd/profiler\.py\(\d+\): _start_trace")
_PACKAGES = re.compile(r"[/\\](?:(?:site|dist)-packages|python\d(?:\.\d+)?)(?=[/\\])")
# Packages that a user does not change. Kineto removes the folders of sys.path from file names.
_LIBRARIES = frozenset(
    {"torch", "torchgen", "functorch", "numpy", "instrument", "tqdm", "pytest", "_pytest", "pluggy"}
)


def common_place(
    capture: Traced, events: Ints, weight_ns: Ints | None = None
) -> tuple[str | None, str | None]:
    """Return the innermost range and the source line that hold at least 90 % of the events' time.

    For a source that samples found, half of the time is enough, or half of the samples; if no line
    has it, it is a function without a line. A value is None if there is no such range or source.
    """
    weight_ns = capture.links.events.duration_ns[events] if weight_ns is None else weight_ns
    needed = max(_MOSTLY * int(weight_ns.sum()), 1)
    paths, own = capture.links.scopes.paths, range_codes(capture, events)
    of_path = Groups(own, len(paths.texts)).sum(weight_ns, own >= 0)
    # A path comes after its ancestors, so the last path with enough time is an innermost one.
    ranges = np.flatnonzero(paths.with_descendants(of_path) >= needed)
    codes, texts = source_codes(capture, events)
    by_line = Groups(codes, len(texts)).sum(weight_ns, codes >= 0)
    if has_sources(capture):
        source = next((texts[k] for k in np.flatnonzero(by_line >= needed).tolist()), None)
    else:
        source = _main(dict(zip(texts, by_line.tolist())), int(weight_ns.sum()))
        if source is None and len(capture.sampled.at_ns):
            votes = Counter(places_of_samples(capture, nodes_of(capture.links, events)))
            source = _main(votes, max(votes.total(), FEWEST))
    return paths.texts[ranges[-1]] if len(ranges) else None, source


def _main(weights: Mapping[str, int], whole: int) -> str | None:
    """The place that samples found, or else the function without a line, with half of a weight."""
    of_function = Counter[str]()
    for place, weight in weights.items():
        of_function[function_of(place)] += weight
    pairs = [*weights.items(), *of_function.items()]
    return next((place for place, weight in pairs if 0 < whole <= 2 * weight), None)


def range_codes(capture: Traced, events: Ints) -> Ints:
    """For each event, the path of its range as an index into `links.scopes.paths`; -1 for none.

    Backward work belongs to the range of its forward operator. A device event belongs to the range
    that launched it.
    """
    return capture.links.scopes.path_of_node[nodes_of(capture.links, events)]


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


def callers(links: Links, calls: Ints) -> tuple[Ints, Ints]:
    """For each call, the outermost operator around it and its range, as indices; -1 for none."""
    node = links.nodes_of_calls(calls)
    top = np.append(links.call_tree.index, -1)[outermost_operators(links, node)]
    operator = np.where(top >= 0, links.events.name[top], -1)
    return operator, links.scopes.path_of_node[node]


def outermost_operators(links: Links, nodes: Ints) -> Ints:
    """For each operator node, the outermost operator in the same range; -1 for other nodes."""
    tree = links.call_tree
    return tree.top_of_chain(called_operators(links.events)[tree.index], nodes)


def source_codes(capture: Traced, events: Ints) -> tuple[Ints, list[str]]:
    """The source of each event as an index into the returned texts; -1 if it is not known.

    The source is the innermost Python frame of the user's code. A device event has the source of
    its launch. The autograd engine's threads have no Python frames, so the backward has no source.
    Without stacks, the source is the line of the outermost operator, as in the column `line`.
    """
    links, table = capture.links, capture.links.events
    launches = links.launches
    caller = np.append(np.arange(len(table)), -1)  # the last entry is for the position -1
    caller[launches.device] = launches.launch
    at = caller[events]
    if len(links.frames):
        sources = sources_of_names(links)
        is_known = at >= 0
        place = at[is_known]
        code = np.full(len(events), -1)
        code[is_known] = _users_frame_at(links, table.thread[place], table.start_ns[place])
    elif has_sources(capture):
        sources = _stack_sources(table)
        code = _stack_at(links, at, sources)
    else:
        lines, places = lines_of_nodes(capture)
        sources, code = [*places], np.full(len(events), -1)
        code[at >= 0] = lines[nodes_of(links, at[at >= 0])]
    known, found = np.unique(code[code >= 0], return_inverse=True)
    codes = np.full(len(events), -1)
    codes[code >= 0] = found
    return codes, [sources[k] or "" for k in known.tolist()]


def source_of(capture: Traced, event: int) -> str | None:
    """The source of one event, such as "train.py:31 in main"; None if it is not known."""
    codes, texts = source_codes(capture, np.array([event]))
    return texts[codes[0]] if codes[0] >= 0 else None


def input_shapes(events: Events, event: int) -> list[list[int] | None]:
    """The shape of each input of an operator; empty if not recorded, None for a list of tensors."""
    code = int(events.shapes[event])
    found = decoded(events.texts[code]) if code >= 0 else None
    shapes = found if isinstance(found, list) else []
    return [shape if _is_shape(shape) else None for shape in shapes]


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def has_sources(capture: Traced) -> bool:
    """Whether the trace holds Python frames or call stacks, and so has files and lines."""
    return len(capture.links.frames) > 0 or bool((capture.links.events.call_stack >= 0).any())


def cut_by_source(
    capture: Traced, thread: int, start_ns: Ints, end_ns: Ints
) -> tuple[Ints, Ints, pl.Series]:
    """Cut intervals of a thread, which are sorted and do not overlap, where its function changes.

    Returns:
        For each piece, the index of its interval, its start, and the function of the user around
            it. This includes what the function calls in libraries, but not in torch or in this
            package, whose time the user cannot change; null then. Without Python frames, samples
            find it, if the thread is that of the steps.
    """
    links, frames = capture.links, capture.links.frames
    if not len(frames) and thread == thread_of_steps(links):
        return cut_by_sample(capture, start_ns, end_ns)
    own = frames.thread == thread
    begin = distinct(np.concatenate([start_ns, frames.start_ns[own], frames.end_ns[own]]))
    row = np.searchsorted(start_ns, begin, "right") - 1
    inside = (row >= 0) & (begin < np.append(end_ns, 0)[row])
    row, begin = row[inside], begin[inside]
    threads = np.full(len(begin), thread, np.int32)
    # At `begin`, a frame that ends there would still count.
    name = _users_frame_at(links, threads, begin + 1, or_tools=True)
    sources = pl.Series([*sources_of_names(links), None], dtype=pl.String)
    return row, begin, sources.gather(np.where(name >= 0, name, len(sources) - 1))


def _users_frame_at(links: Links, thread: Codes, time_ns: Ints, *, or_tools: bool = False) -> Ints:
    """For each thread and time, the user's innermost frame, as an index of a name; -1 for none.

    With `or_tools`, it is a frame of torch or of this package if that is more inside.
    """
    frames, table = links.frames, links.events
    chosen = table.named(lambda name: users_source(name) is not None)[frames.index]
    if or_tools:
        chosen |= table.named(_is_tools)[frames.index]
    node = frames.nearest(chosen, frames.node_at(thread, time_ns))
    found: Ints = np.where(node >= 0, table.name[np.append(frames.index, -1)[node]], -1)
    return found


def _stack_at(links: Links, events: Ints, sources: list[str | None]) -> Ints:
    """For each event, the nearest operator's call stack, as an index of a text; -1 for none."""
    table, tree = links.events, links.call_tree
    if not any(sources):
        return np.full(len(events), -1)
    node = nodes_of(links, np.where(events >= 0, events, 0))
    node = tree.nearest(table.call_stack[tree.index] >= 0, node)
    stack = np.append(table.call_stack[tree.index], -1)[node]
    found: Ints = np.where((events >= 0) & (node >= 0), stack, -1)
    usable = np.array([*map(bool, sources), False])
    return np.where(usable[found], found, -1)


def _stack_sources(events: Events) -> list[str | None]:
    """For each text, the innermost frame of the user's if the text is a call stack."""
    sources: list[str | None] = [None] * len(events.texts)
    for code in distinct(events.call_stack[events.call_stack >= 0]).tolist():
        frames = str(decoded(events.texts[code])).split(";")
        sources[code] = next(filter(None, map(users_source, frames)), None)
    return sources


def sources_of_names(links: Links) -> list[str | None]:
    """The source of each of `events.names`, such as "train.py:31 in main"; None for other names.

    It is "train.py in main" if the recording began in the function.
    """
    frames, table = links.frames, links.events
    sources = [users_source(name) for name in table.names]
    node = np.flatnonzero(table.named(lambda name: bool(_START.fullmatch(name)))[frames.index])
    while len(node := np.unique(frames.parent[node[node >= 0]])):
        for code in table.name[frames.index[node[node >= 0]]].tolist():
            source = sources[code]
            sources[code] = source and re.sub(r":\d+ in ", " in ", source, count=1)
    return sources


def _is_tools(frame: str) -> bool:
    """Whether a frame is torch's, or that of a session of this package."""
    starts = "torch/", "nn.Module: ", "instrument/"
    return frame.startswith(starts) or "/torch/" in frame or "-packages/instrument/" in frame


@lru_cache(maxsize=100_000)
def users_source(frame: str) -> str | None:
    """The place of a frame of the user's, such as "train.py:31 in main"; None for other frames.

    The frame of a comprehension is none: its time belongs to the function around it.
    """
    match = _FRAME.fullmatch(frame)
    if match is None or match["function"] in COMPREHENSIONS:
        return None
    folders = [folder.end() + 1 for folder in _PACKAGES.finditer(match["file"])]
    file = match["file"][max(folders, default=0) :]
    top = re.split(r"[/\\]", file)[0].removesuffix(".py")
    if top in _LIBRARIES or top in sys.stdlib_module_names or "/torch/" in file:
        return None
    return f"{file}:{match['line']} in {match['function']}"
