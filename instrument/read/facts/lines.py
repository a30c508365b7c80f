"""The user's lines that ran, and that called each operator, by samples (`profiler.lines`)."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import polars as pl

from instrument.read.facts.intervals import interval_at
from instrument.read.facts.links import Links, thread_of_steps
from instrument.read.facts.step_index import step_at
from instrument.read.facts.traced import Traced
from instrument.read.trace.events import OPERATOR, Flags, Ints
from instrument.read.trace.line_samples import LineSamples

#: Fewer samples do not show where the time of a range, or outside of operators, is spent.
FEWEST = 3
_LINE = re.compile(r":\d+ in ")


class Sampled(NamedTuple):
    """The samples of the thread of the steps in the window, in order of time.

    Attributes:
        at_ns: the time of each sample, on the trace's own clock.
        place: the user's innermost line as an index into `places`; -1 for none.
        in_torch: whether Python code of torch ran.
        places: texts such as "train.py:31 in main".
    """

    at_ns: Ints
    place: Ints
    in_torch: Flags
    places: list[str]


def sampled(links: Links, samples: LineSamples | None) -> Sampled:
    """Find the samples of the window."""
    events = links.events
    times = np.array(samples.times if samples else [], np.int64).reshape(-1, 2)
    at_ns = times[:, 0] - events.base_ns
    inside = (at_ns >= events.begin_ns) & (at_ns <= events.end_ns.max(initial=0))
    at_ns, stack = at_ns[inside], times[inside, 1]
    order = np.argsort(at_ns, kind="stable")
    stacks, of = np.unique(stack[order], return_inverse=True)
    texts = [samples.place(each) if samples else None for each in stacks.tolist()]
    places = list(dict.fromkeys(filter(None, texts)))
    place = np.array([places.index(each) if each else -1 for each in texts], np.int64)
    in_torch = [samples is not None and samples.is_in_torch(each) for each in stacks.tolist()]
    return Sampled(at_ns[order], place[of], np.array(in_torch, np.bool_)[of], places)


def lines_of_nodes(capture: Traced) -> Ints:
    """For each node of the call tree, its line as an index into `places`; -1 if unknown.

    An operator has the line of the outermost one around it, and a backward operator that of its
    forward operator. One more entry with the value -1 is for the node -1. Computed once.
    """
    return capture.once("lines of nodes", lambda: _lines_of_nodes(capture.links, capture.sampled))


def _lines_of_nodes(links: Links, found: Sampled) -> Ints:
    tree, scopes = links.call_tree, links.scopes
    line, is_backward = np.full(len(tree) + 1, -1), np.zeros(len(tree), np.bool_)
    if not len(tree) or not len(found.at_ns):
        return line
    backward = tree.nodes_of(scopes.nodes.index[scopes.backward])
    is_backward[backward] = True
    is_top = tree.outermost(links.events.among(OPERATOR)[tree.index]) & ~is_backward
    operators = np.flatnonzero(is_top & (tree.thread == thread_of_steps(links)))
    line[operators] = _of_operators(links, found, operators)
    line[:-1] = line[tree.nearest(is_top)]
    line[backward] = line[scopes.forward[scopes.backward]]
    line[:-1] = line[tree.nearest(is_top | is_backward)]
    return line


def _of_operators(links: Links, found: Sampled, operators: Ints) -> Ints:
    """The line of each of the operators, which are nodes of the thread of the steps.

    Operators that every step calls equally often, in a range by a name, have the line that at least
    two thirds of the samples in those of the same place in their step found. Any other operator has
    a line only if a sample lies in it.
    """
    tree, keys = links.call_tree, _keys(links, operators)
    row = tree.nearest_of(operators, _nodes_of_samples(links, found))
    hits = np.flatnonzero((row >= 0) & (found.place >= 0))
    votes = pl.DataFrame({"key": keys[row[hits]], "line": found.place[hits]})
    most = votes.group_by("key", "line").len().with_columns(of=pl.sum("len").over("key"))
    most = most.filter(3 * pl.col("len") >= 2 * pl.col("of"))
    line = np.full(len(operators), -1)
    line[most["key"].to_numpy()] = most["line"].to_numpy()
    return line[keys]


def _nodes_of_samples(links: Links, found: Sampled) -> Ints:
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


def _keys(links: Links, operators: Ints) -> Ints:
    """For each operator, the row of the first one at the same place in its step."""
    tree, events, steps = links.call_tree, links.events, links.steps
    row, same = pl.int_range(pl.len()), ["path", "name"]
    rows = pl.DataFrame(
        {
            "path": links.scopes.path_of_node[operators],
            "name": events.name[tree.index[operators]],
            "step": step_at(events, steps, tree.start_ns[operators]),
        }
    ).with_columns(place=row.over(*same, "step"), calls=pl.len().over(*same, "step"), row=row)
    calls, step = pl.col("calls"), pl.col("step")
    is_constant = (calls.min() == calls.max()) & (step.min() >= 0) & (step.n_unique() == len(steps))
    first = pl.col("row").min()
    key = pl.when(is_constant.over(same)).then(first.over(*same, "place")).otherwise("row")
    return rows.select(key).to_series().to_numpy()


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
