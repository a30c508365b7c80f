"""The user's line that called each operator, by samples of the stacks (`profiler.lines`)."""

from __future__ import annotations

import numpy as np
import polars as pl

from instrument.read.facts.links import Links
from instrument.read.facts.segments import thread_of_steps
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import OPERATOR, Ints
from instrument.read.trace.line_samples import LineSamples


def lines_of_nodes(links: Links, samples: LineSamples | None) -> tuple[Ints, list[str]]:
    """For each node of the call tree, its line as an index into the returned texts; -1 if unknown.

    An operator has the line of the outermost one around it, and a backward operator that of its
    forward operator. One more entry with the value -1 is for the node -1.
    """
    tree, scopes = links.call_tree, links.scopes
    is_backward = np.zeros(len(tree), np.bool_)
    backward = tree.nodes_of(scopes.nodes.index[scopes.backward])
    is_backward[backward] = True
    is_top = tree.outermost(links.events.among(OPERATOR)[tree.index]) & ~is_backward
    line, texts = np.full(len(tree) + 1, -1), list[str]()
    if samples is not None and len(tree):
        operators = np.flatnonzero(is_top & (tree.thread == thread_of_steps(links)))
        line[operators], texts = _sampled(links, samples, operators)
        line[:-1] = line[tree.nearest(is_top)]
        line[backward] = line[scopes.forward[scopes.backward]]
        line[:-1] = line[tree.nearest(is_top | is_backward)]
    return line, texts


def sampled_nodes(links: Links, samples: LineSamples) -> tuple[Ints, Ints]:
    """The samples in the window: their innermost nodes on the thread of the steps, and stacks."""
    events, times = links.events, np.array(samples.times, np.int64).reshape(-1, 2)
    at_ns = times[:, 0] - events.base_ns
    inside = (at_ns >= events.begin_ns) & (at_ns <= events.end_ns.max(initial=0))
    at_ns, stack = at_ns[inside], times[inside, 1]
    thread = np.full(len(at_ns), thread_of_steps(links), np.int32)
    return links.call_tree.node_at(thread, at_ns), stack


def _sampled(links: Links, samples: LineSamples, operators: Ints) -> tuple[Ints, list[str]]:
    """The line of each of the operators, which are nodes of the thread of the steps.

    Operators that every step calls equally often, in a range by a name, have the line that at least
    two thirds of the samples in those of the same place in their step found. Any other operator has
    a line only if a sample lies in it.
    """
    tree = links.call_tree
    node, stack = sampled_nodes(links, samples)
    row = tree.nearest_of(operators, node)
    frames = [samples.blamed(each)[0] for each in stack.tolist()]
    users = [frame >= 0 and samples.frames[frame][0] == "user" for frame in frames]
    found = np.flatnonzero((row >= 0) & np.array(users, np.bool_))
    texts = list(dict.fromkeys(_text(samples, frames[k]) for k in found.tolist()))
    votes = pl.DataFrame(
        {
            "key": _keys(links, operators)[row[found]],
            "line": [texts.index(_text(samples, frames[k])) for k in found.tolist()],
        },
        {"key": pl.Int64, "line": pl.Int64},
    )
    most = votes.group_by("key", "line").len().with_columns(of=pl.sum("len").over("key"))
    most = most.filter(3 * pl.col("len") >= 2 * pl.col("of"))
    line = np.full(len(operators), -1)
    line[most["key"].to_numpy()] = most["line"].to_numpy()
    return line[_keys(links, operators)], texts


def _text(samples: LineSamples, frame: int) -> str:
    return f"{samples.frames[frame][1]}:{samples.frames[frame][2]}"


def _keys(links: Links, operators: Ints) -> Ints:
    """For each operator, the row of the first one at the same place in its step; see `_sampled`."""
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
