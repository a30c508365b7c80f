"""The user's lines that ran, and that called each operator, by samples (`profiler.lines`)."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import polars as pl

from instrument.read.facts.intervals import interval_at
from instrument.read.facts.links import Links, thread_of_steps
from instrument.read.facts.traced import Traced
from instrument.read.trace.events import Flags, Ints, called_operators
from instrument.read.trace.line_samples import LineSamples

#: Fewer samples do not show where the time of a range, or outside of operators, is spent.
FEWEST = 3
# Operators with equal values in these columns are like each other.
_LIKE = ("key", "number", "like")
_LINE = re.compile(r":\d+ in ")


class Sampled(NamedTuple):
    """The samples of the thread of the steps in a window, in order of time.

    Attributes:
        at_ns: the time of each sample, on the trace's own clock.
        place: the user's innermost line as an index into `places`; -1 for none.
        in_torch: whether Python code of torch ran.
        begins_ns, begun: in a detail window, the times at which lines begin, and the lines.
        places: texts such as "train.py:31 in main".
    """

    at_ns: Ints
    place: Ints
    in_torch: Flags
    begins_ns: Ints
    begun: Ints
    places: list[str]


def sampled(links: Links, samples: LineSamples | None) -> Sampled:
    """Find the samples of a window."""
    if samples is None:
        none = np.zeros(0, np.int64)
        return Sampled(none, none, none > 0, none, none, [])
    events = links.events

    def within(times_ns: list[int], values: list[int]) -> tuple[Ints, Ints]:
        at_ns = np.array(times_ns, np.int64) - events.base_ns
        inside = (at_ns >= events.begin_ns) & (at_ns <= events.end_ns.max(initial=0))
        order = np.argsort(at_ns[inside], kind="stable")
        return at_ns[inside][order], np.array(values, np.int64)[inside][order]

    at_ns, stack = within([at for at, _ in samples.times], [each for _, each in samples.times])
    begins_ns, frame = within(*samples.traced)
    stacks, of = np.unique(stack, return_inverse=True)
    frames, of_frame = np.unique(frame, return_inverse=True)
    found = [samples.place(each) for each in stacks.tolist()]
    begun = [samples.place_of(each) if each >= 0 else None for each in frames.tolist()]
    places = list(dict.fromkeys(filter(None, (*found, *begun))))
    number = {place: k for k, place in enumerate(places)}
    place, line = (
        np.array([number.get(each or "", -1) for each in texts], np.int64)
        for texts in (found, begun)
    )
    in_torch = np.array([samples.is_in_torch(each) for each in stacks.tolist()], np.bool_)
    return Sampled(at_ns, place[of], in_torch[of], begins_ns, line[of_frame], places)


def lines_of_nodes(capture: Traced) -> tuple[Ints, list[str]]:
    """For each node of the call tree, its line as an index into the returned texts; -1 if unknown.

    An operator has the line of the outermost one around it, and a backward operator that of its
    forward operator. One more entry with the value -1 is for the node -1. Computed once.
    """
    return capture.once("lines of nodes", lambda: _lines_of_nodes(capture))


def _lines_of_nodes(capture: Traced) -> tuple[Ints, list[str]]:
    links, scopes = capture.links, capture.links.scopes
    tree, line = links.call_tree, np.full(len(links.call_tree) + 1, -1)
    windows = [(links, capture.sampled)]
    if (detail := capture.detailed) is not None:
        windows.append(detail)
    if not any(len(each.at_ns) + len(each.begins_ns) for _, each in windows):
        return line, []
    operators, backward = _outermost(links), tree.nodes_of(scopes.nodes.index[scopes.backward])
    line[operators], places = _of_operators(links, operators, windows)
    is_known = np.zeros(len(tree), np.bool_)
    is_known[operators] = True
    line[:-1] = line[tree.nearest(is_known)]
    line[backward] = line[scopes.forward[scopes.backward]]
    is_known[backward] = True
    line[:-1] = line[tree.nearest(is_known)]
    return line, places


def _outermost(links: Links) -> Ints:
    """The outermost operators of the thread of the steps, as nodes, without the backward."""
    tree, scopes = links.call_tree, links.scopes
    chosen = tree.outermost(called_operators(links.events)[tree.index])
    chosen &= tree.thread == thread_of_steps(links)
    chosen[tree.nodes_of(scopes.nodes.index[scopes.backward])] = False
    return np.flatnonzero(chosen)


def _of_operators(
    links: Links, operators: Ints, windows: list[tuple[Links, Sampled]]
) -> tuple[Ints, list[str]]:
    """The line of each of the operators, as an index into the returned places; -1 if unknown.

    Like operators of all steps, those of the detail window among them, have the line that at least
    two thirds of what was noted in them names: each sample, and in the detail window the line that
    began last before each operator. An operator without its like has its own line.
    """
    votes = pl.concat(_votes(*each, number) for number, each in enumerate(windows))
    most = votes.group_by(*_LIKE, "place").len().with_columns(of=pl.sum("len").over(_LIKE))
    most = most.filter(3 * pl.col("len") >= 2 * pl.col("of"))
    found = _with_likes(links, pl.DataFrame({"event": links.call_tree.index[operators]}), 0)
    found = found.join(most, on=_LIKE, how="left", maintain_order="left")
    places = most["place"].unique(maintain_order=True)
    code = found["place"].replace_strict(places, np.arange(len(places)), default=-1)
    return code.to_numpy(), places.to_list()


def _votes(links: Links, found: Sampled, window: int) -> pl.DataFrame:
    """The operators in which a line was noted, with the line, once for each time."""
    tree, operators = links.call_tree, _outermost(links)
    hit = _nodes_of_samples(links, found)
    row = tree.nearest_of(operators, hit)
    begun = np.searchsorted(found.begins_ns, tree.start_ns[operators], "right") - 1
    node = np.concatenate([np.append(operators, -1)[row], operators])
    place = np.concatenate([found.place, np.append(found.begun, -1)[begun]])
    noted = np.flatnonzero((node >= 0) & (place >= 0))
    places = pl.Series(found.places, dtype=pl.String).gather(place[noted])
    rows = pl.DataFrame({"event": tree.index[node[noted]], "place": places})
    return _with_likes(links, rows, window)


def _with_likes(links: Links, rows: pl.DataFrame, window: int) -> pl.DataFrame:
    """Add the columns `_LIKE` to events; that of an operator without its like is its own."""
    numbers = pl.col("number", "like").cast(pl.Int64)
    numbered = links.numbered_operators.select("event", "key", numbers)
    found = rows.join(numbered, on="event", how="left", maintain_order="left")
    own = pl.col("event").cast(pl.UInt64), pl.lit(-1), pl.lit(-window)
    return found.with_columns(pl.col(name).fill_null(value) for name, value in zip(_LIKE, own))


def _nodes_of_samples(links: Links, found: Sampled) -> Ints:
    """The innermost node on the thread of the steps at each sample; -1 for none."""
    thread = np.full(len(found.at_ns), thread_of_steps(links), np.int32)
    return links.call_tree.node_at(thread, found.at_ns)


def places_of_samples(capture: Traced, nodes: Ints) -> list[str]:
    """The places that the samples in nodes of the call tree found, but not in their backward."""
    links, found = capture.links, capture.sampled
    chosen = np.zeros(len(links.call_tree) + 1, np.bool_)
    chosen[nodes[nodes >= 0]] = True
    inside = np.append(links.call_tree.at_or_inside(chosen[:-1]), False)
    scope = np.append(links.scopes.innermost, -1)
    is_backward = np.append(links.scopes.backward, False)[scope]
    at = _nodes_of_samples(links, found)
    hits = inside[at] & ~is_backward[at] & (found.place >= 0)
    return [found.places[k] for k in found.place[hits].tolist()]


def function_of(place: str) -> str:
    """The place without its line: "train.py in main"."""
    return _LINE.sub(" in ", place, count=1)


def cut_by_sample(capture: Traced, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints, pl.Series]:
    """Cut intervals of the thread of the steps, each halfway between two samples in it.

    Returns what `places.cut_by_source` does; the function of a piece is the one that its sample
    found, with the line that most samples of this function found.
    """
    found = capture.sampled
    row = interval_at((start_ns, end_ns), found.at_ns)
    inside = np.flatnonzero(row >= 0)
    at_ns, row, place = found.at_ns[inside], row[inside], found.place[inside]
    middle_ns = ((at_ns[1:] + at_ns[:-1]) // 2)[row[1:] == row[:-1]]
    begin = np.sort(np.concatenate([start_ns, middle_ns]))
    known = np.flatnonzero((place >= 0) & ~found.in_torch[inside])
    common = Counter(place[known].tolist()).most_common()[::-1]
    lines = {function_of(found.places[each]): found.places[each] for each, _ in common}
    sources: list[str | None] = [None] * len(begin)
    if len(inside) >= FEWEST:
        piece = np.searchsorted(begin, at_ns[known], "right") - 1
        for k, each in zip(piece.tolist(), place[known].tolist()):
            sources[k] = lines[function_of(found.places[each])]
    of = np.searchsorted(start_ns, begin, "right") - 1
    return of, begin, pl.Series(sources, dtype=pl.String)
