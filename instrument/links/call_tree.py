"""The call tree of a trace: which CPU event lies inside which.

A trace gives each event a thread, a start and an end, but no parent. Parents follow from the times,
by the rule of torch's own profiler (`EventList._populate_cpu_children` in
torch/autograd/profiler_util.py):

- Each thread has trees of its own. Its events are taken by start, and of those that start together
  the longer first.
- A parent contains its child wholly. An event that overlaps an earlier one only in part is not its
  child, and from then on the earlier one gets no children.
- An event without a duration is not a child of an event that ends where it starts.

So the parent of an event is the nearest earlier event of its thread that ends no earlier. Array
operations find it for all events at once: each event tries the one before it, then the candidate of
that candidate, until one ends late enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from instrument.trace.events import Codes, Events, Flags, Ints


@dataclass(frozen=True, slots=True)
class CallTree:
    """The nodes of a call tree: by thread, then start, then the longer first.

    Parents come before their children, and the descendants of a node follow it without a gap.

    Attributes:
        index: the position of each node among the events.
        thread, start_ns, end_ns: those of the event.
        parent: the node that holds each node; -1 for a root.
        depth: how many nodes hold each node; 0 for a root.
    """

    index: Ints
    thread: Codes
    start_ns: Ints
    end_ns: Ints
    parent: Ints
    depth: Ints

    def __len__(self) -> int:
        return len(self.index)

    @property
    def total_ns(self) -> Ints:
        """The duration of each node."""
        return self.end_ns - self.start_ns

    def own(self, totals: Ints) -> Ints:
        """A total of each node, less the totals of its direct children."""
        of_children = np.zeros(len(self), np.int64)
        inner = self.parent >= 0
        np.add.at(of_children, self.parent[inner], totals[inner])
        return totals - of_children

    def ends_before_overlap(self) -> Ints:
        """The end of each node, or the start of the next sibling where that comes first.

        Siblings overlap where coroutines take turns. With these ends each nanosecond of a thread
        counts once: for the sibling that started later.
        """
        order = np.argsort(self.parent, kind="stable")
        one, other = order[:-1], order[1:]
        overlaps = (self.parent[one] == self.parent[other]) & (
            self.thread[one] == self.thread[other]
        )
        overlaps &= self.start_ns[other] < self.end_ns[one]
        if not overlaps.any():
            return self.end_ns
        end = self.end_ns.copy()
        end[one[overlaps]] = self.start_ns[other[overlaps]]
        for nodes in [*self.levels()][1:]:
            end[nodes] = np.minimum(end[nodes], end[self.parent[nodes]])
        return np.maximum(end, self.start_ns)

    def levels(self) -> Iterator[Ints]:
        """The nodes of each depth, the roots first."""
        # NumPy sorts integers of at most 16 bits by radix, which is faster.
        narrow = self.depth.astype(np.min_scalar_type(int(self.depth.max(initial=0))))
        order = np.argsort(narrow, kind="stable")
        return iter(np.split(order, np.cumsum(np.bincount(narrow))[:-1])) if len(self) else iter(())

    def with_descendants(self, own: Ints) -> Ints:
        """A quantity of each node plus that of all its descendants; one pass for each level."""
        totals = own.copy()
        for nodes in [*self.levels()][:0:-1]:
            np.add.at(totals, self.parent[nodes], totals[nodes])
        return totals

    def nearest(self, chosen: Flags) -> Ints:
        """For each node, the nearest chosen one among itself and its ancestors; -1 without one."""
        own = np.arange(len(self))
        hop = np.where(chosen | (self.parent < 0), own, self.parent)
        while not np.array_equal(further := hop[hop], hop):
            hop = further
        return np.where(chosen[hop], hop, -1) if len(self) else hop

    def only(self, chosen: Flags) -> tuple[CallTree, Ints]:
        """A tree of the chosen nodes alone: the parent of each is its nearest chosen ancestor.

        Returns:
            The new tree. And for each node of this tree, the nearest chosen one among itself and
            its ancestors, as a node of the new tree; -1 without one.
        """
        kept = np.flatnonzero(chosen)
        number = np.full(len(self) + 1, -1)
        number[kept] = np.arange(len(kept))
        nearest = number[self.nearest(chosen)]
        above = self.parent[kept]
        parent = np.where(above >= 0, nearest[above], -1)
        start, end = self.start_ns[kept], self.end_ns[kept]
        tree = CallTree(self.index[kept], self.thread[kept], start, end, parent, _depths(parent))
        return tree, nearest

    def node_at(self, thread: Codes, time_ns: Ints) -> Ints:
        """The innermost node of a thread that holds each point in time, its end included; or -1."""
        if not len(self):
            return np.full(len(time_ns), -1)
        found = _last_starting_by(self, thread, time_ns)
        while True:
            outside = (found >= 0) & (self.end_ns[found] < time_ns)
            if not outside.any():
                return found
            found[outside] = self.parent[found[outside]]


def nest(events: Events, chosen: Flags, thread: Codes | None = None) -> CallTree:
    """The call tree of the chosen events; `thread` replaces the threads of all events.

    Cost: a sort, then some tens of array operations; about 0.2 µs for each event.
    """
    index = np.flatnonzero(chosen)
    threads = (events.thread if thread is None else thread)[index]
    start, end = events.start_ns[index], events.end_ns[index]
    order = _nesting_order(threads, start, end)
    index, threads, start, end = index[order], threads[order], start[order], end[order]
    parent = _parents(threads, start, end)
    return CallTree(index, threads, start, end, parent, _depths(parent))


def _nesting_order(thread: Codes, start: Ints, end: Ints) -> Ints:
    """The order by thread, then start, then the longer first. Only ties are sorted by length."""
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(thread[order], kind="stable")]
    thread, start = thread[order], start[order]
    same = np.append((thread[1:] == thread[:-1]) & (start[1:] == start[:-1]), False)
    tied = np.flatnonzero(same | np.roll(same, 1))
    order[tied] = order[tied[np.lexsort((-end[order[tied]], start[tied], thread[tied]))]]
    return order


def _parents(thread: Codes, start: Ints, end: Ints) -> Ints:
    """The parent of each event: the nearest earlier one of its thread that ends no earlier.

    The parent of an event without a duration ends later.
    """
    count = len(start)
    candidate = np.arange(-1, count - 1)
    candidate[np.flatnonzero(np.diff(thread, prepend=-1))] = -1
    needed = end + (start == end)
    passed = candidate >= 0
    passed[1:] &= end[:-1] < needed[1:]
    active = np.flatnonzero(passed)
    while active.size:
        # What the candidate skipped ends before the candidate does, so this event may skip it too.
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
        active = active[end[candidate[active]] < needed[active]]
    return candidate


def _depths(parent: Ints) -> Ints:
    """How many nodes hold each node, by jumps to ancestors that double in length."""
    outside = len(parent)  # a slot of its own for "above the root"
    jump = np.append(np.where(parent < 0, outside, parent), outside)
    depth = (jump < outside).astype(np.int64)
    while (jump < outside).any():
        depth += depth[jump]
        jump = jump[jump]
    return depth[:outside]


def _last_starting_by(call_tree: CallTree, thread: Codes, time_ns: Ints) -> Ints:
    """The last node of the thread that starts at or before each point in time; or -1."""
    found = np.full(len(time_ns), -1)
    bounds = np.searchsorted(call_tree.thread, np.unique(call_tree.thread))
    for first, last in zip(bounds, [*bounds[1:], len(call_tree)]):
        points = np.flatnonzero(thread == call_tree.thread[first])
        at = np.searchsorted(call_tree.start_ns[first:last], time_ns[points], side="right") - 1
        found[points] = np.where(at >= 0, at + first, -1)
    return found


def number_paths(call_tree: CallTree, name: Ints) -> tuple[Ints, Ints, Ints]:
    """Number the distinct paths of names from the roots down, one level at a time.

    Returns:
        The path of each node. And for each path, the path above it (-1 at a root) and its last
        name. A path comes after the path above it.
    """
    path = np.full(len(call_tree), -1)
    parents, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    count, width = 0, int(name.max(initial=0)) + 1
    for nodes in call_tree.levels():
        above = np.where(call_tree.parent[nodes] >= 0, path[call_tree.parent[nodes]], -1)
        distinct, code = np.unique((above + 1) * width + name[nodes], return_inverse=True)
        path[nodes] = code + count
        parents.append(distinct // width - 1)
        labels.append(distinct % width)
        count += len(distinct)
    return path, np.concatenate(parents), np.concatenate(labels)
