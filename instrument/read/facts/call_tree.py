"""The call tree of a trace: which CPU event lies inside which.

Parents are found from the times, by the rule of torch's own profiler
(`EventList._populate_cpu_children` in torch/autograd/profiler_util.py): the parent of an event is
the nearest event before it on its thread that does not end before it.
See docs/explanation/joins.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from instrument.read.facts import loops
from instrument.read.facts.groupby import Groups, TimesOfGroups
from instrument.read.trace.columns import Interned, taken
from instrument.read.trace.events import Codes, Events, Flags, Ints


@dataclass(frozen=True)
class CallTree:
    """The CPU events of a trace as nodes of a tree, sorted by thread, start and duration.

    Of two events with the same start, the longer event comes first. So parents come before their
    children, and the descendants of a node come directly after the node.

    Attributes:
        index: for each node, the position of its event among the events of the trace.
        thread, start_ns, end_ns: the thread, the start and the end of each node's event.
        parent: the parent of each node; -1 for a root.
        depth: the number of ancestors of each node; 0 for a root.
        until: the index after the last descendant of each node, or after the node if it has none.
    """

    index: Ints
    thread: Codes
    start_ns: Ints
    end_ns: Ints
    parent: Ints
    depth: Codes
    until: Codes

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def total_ns(self) -> Ints:
        """The duration of each node."""
        return self.end_ns - self.start_ns

    def nodes_of(self, events: Ints) -> Ints:
        """The node of each event; -1 for an event without a node, and for the position -1."""
        return self._node_of_event[np.minimum(events, len(self._node_of_event) - 1)]

    @cached_property
    def _node_of_event(self) -> Ints:
        node = np.full(int(self.index.max(initial=-1)) + 2, -1)
        node[self.index] = np.arange(len(self))
        return node

    def own(self, totals: Ints) -> Ints:
        """For each node, its value in `totals` minus the values of its direct children."""
        return totals - Groups(self.parent, len(self)).sum(totals)

    @cached_property
    def ends_before_overlap(self) -> Ints:
        """The end of each node, or the start of its next sibling if this start is earlier.

        Siblings can overlap if they are coroutines that take turns on a thread. With these ends,
        each nanosecond of a thread counts once, for the sibling that started later. The descendants
        of a node with an earlier end are cut too.
        """
        one, other = self.overlapping_siblings
        if not len(one):
            return self.end_ns
        end, is_cut = self.end_ns.copy(), np.zeros(len(self), np.bool_)
        end[one], is_cut[one] = self.start_ns[other], True
        inside = np.flatnonzero(self.inside(is_cut))
        for level in _levels(self.depth[inside]):
            nodes = inside[level]
            end[nodes] = np.minimum(end[nodes], end[self.parent[nodes]])
        return np.maximum(end, self.start_ns)

    @cached_property
    def overlapping_siblings(self) -> tuple[Ints, Ints]:
        """The pairs of successive siblings that overlap: the earlier nodes, and the later nodes."""
        # The nodes are in depth-first order, so the node after the last descendant is the sibling.
        next_start_ns = self.start_ns.take(self.until, mode="clip") if len(self) else self.start_ns
        one = np.flatnonzero((next_start_ns < self.end_ns) & (self.until < len(self)))
        other = self.until[one].astype(np.int64)
        siblings = (self.parent[one] == self.parent[other]) & (
            self.thread[one] == self.thread[other]
        )
        return one[siblings], other[siblings]

    def levels(self) -> Iterator[Ints]:
        """The nodes of each depth, the roots first."""
        return _levels(self.depth)

    def with_descendants(self, own: Ints) -> Ints:
        """For each node, the sum of a quantity over the node and all its descendants."""
        sums = np.append(0, np.cumsum(own))
        found: Ints = sums[self.until] - sums[:-1]
        return found

    def nearest(self, chosen: Flags, at: Ints | None = None) -> Ints:
        """For each node, itself if it is chosen, else its nearest chosen ancestor; -1 if none.

        If `at` is given, the result is only for the nodes in `at`; the node -1 gets -1.
        """
        # The last entry is for a node without a parent.
        hop = np.append(np.where(chosen, np.arange(len(self)), self.parent), -1)
        is_found = np.append(chosen, True)
        left = np.flatnonzero(~is_found[hop])
        while len(left):
            hop[left] = hop[hop[left]]
            left = left[~is_found[hop[left]]]
        return hop[:-1] if at is None else hop[at]

    def nearest_of(self, nodes: Ints, at: Ints | None = None) -> Ints:
        """For each node, the index in `nodes` of itself, else of its nearest ancestor there.

        The result is -1 if there is none. For `at`, see `nearest`.
        """
        number = np.full(len(self) + 1, -1)  # the last entry is for the node -1
        number[nodes] = np.arange(len(nodes))
        found: Ints = number[self.nearest(number[:-1] >= 0, at)]
        return found

    def inside(self, chosen: Flags) -> Flags:
        """A mask of the nodes that have a chosen node among their ancestors."""
        reached = np.maximum.accumulate(self.until * chosen)
        found: Flags = np.arange(len(self), dtype=np.int32) < np.append(np.int32(0), reached)[:-1]
        return found

    def at_or_inside(self, chosen: Flags) -> Flags:
        """A mask of the chosen nodes and of all their descendants."""
        found: Flags = chosen | self.inside(chosen)
        return found

    def outermost(self, chosen: Flags) -> Flags:
        """A mask of the chosen nodes that have no chosen ancestor."""
        found: Flags = chosen & ~self.inside(chosen)
        return found

    def top_of_chain(self, chosen: Flags, nodes: Ints) -> Ints:
        """For each given node, the highest node of its unbroken chain of chosen nodes.

        The result is -1 for nodes that are not chosen, and for the node -1.
        """
        goes_up = chosen & np.append(chosen, False)[self.parent]
        top = np.where(chosen, self.nearest(~goes_up), -1)
        found: Ints = np.append(top, -1)[nodes]  # the last entry is for the node -1
        return found

    def only(self, chosen: Flags) -> CallTree:
        """A tree of the chosen nodes alone; the parent of a node is its nearest chosen ancestor."""
        kept = np.flatnonzero(chosen)
        until = np.append(0, np.cumsum(chosen))[self.until[kept]]
        # Of the nodes before a node, those that are not its ancestors end before it.
        ended = np.cumsum(np.bincount(until, minlength=len(kept)))[: len(kept)]
        return CallTree(
            index=self.index[kept],
            thread=self.thread[kept],
            start_ns=self.start_ns[kept],
            end_ns=self.end_ns[kept],
            parent=self.nearest_of(kept, self.parent[kept]),
            depth=(np.arange(len(kept)) - ended).astype(np.int32),
            until=until.astype(np.int32),
        )

    def node_at(self, thread: Codes, time_ns: Ints, *, with_end: bool = True) -> Ints:
        """For each given thread and time, the innermost node that runs there then; -1 for none.

        With `with_end`, a node still runs at the time of its end.

        Cost: two binary searches for each time.
        """
        if not len(self):
            return np.full(len(time_ns), -1)
        node = self._starts.before(thread, time_ns, "right")
        least_ns = time_ns if with_end else time_ns + 1

        def has_ended(nodes: Ints | Codes) -> Flags:
            return (nodes >= 0) & (self.end_ns[nodes] < least_ns)

        if not has_ended(node).any():
            return node
        # An ancestor ends at or after its descendants. So the search goes up in steps of …, 4, 2
        # and 1 levels, as long as it comes to a node that has ended; the parent of this node runs.
        for jump in reversed(self._jumps):
            above = jump[node]
            node = np.where(has_ended(above), above, node)
        return np.where(has_ended(node), self._jumps[0][node], node)

    @cached_property
    def _starts(self) -> TimesOfGroups:
        return TimesOfGroups(self.thread, self.start_ns)

    @cached_property
    def _jumps(self) -> list[Codes]:
        """For each node, its ancestors 1, 2, 4, … levels up; -1 for none, and for the node -1."""
        found = [np.append(self.parent, -1).astype(np.int32)]
        while (found[-1] >= 0).any():
            found.append(found[-1][found[-1]])
        return found


def nest(events: Events, chosen: Flags, thread: Codes | None = None) -> CallTree:
    """Build the call tree of the chosen events. `thread`, if given, replaces their threads.

    Cost: a sort, and 0.05 µs for each event with the C extension `_loops`, or 0.5 µs without it.
    """
    index, threads = np.flatnonzero(chosen), events.thread if thread is None else thread
    start, end = events.start_ns, events.end_ns
    if len(index) and index[-1] - index[0] == len(index) - 1:
        run = slice(int(index[0]), int(index[-1]) + 1)  # a slice takes no memory
        threads, start, end = threads[run], start[run], end[run]
    else:
        threads, start, end = taken(threads, index), start[index], end[index]
    if not _are_in_order(threads, start, end):
        order = _nesting_order(threads, start, end)
        index, threads, start, end = index[order], threads[order], start[order], end[order]
    return CallTree(index, threads, start, end, *_nested(threads, start, end))


def _are_in_order(thread: Codes, start: Ints, end: Ints) -> bool:
    wrong, equal = thread[1:] < thread[:-1], thread[1:] == thread[:-1]
    wrong |= equal & (start[1:] < start[:-1])
    equal &= start[1:] == start[:-1]
    wrong |= equal & (end[1:] > end[:-1])
    return not bool(wrong.any())


def _nesting_order(thread: Codes, start: Ints, end: Ints) -> Ints:
    """The order by thread, then by start, then by duration, the longest first."""
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(thread[order], kind="stable")]
    thread, start = thread[order], start[order]
    same = np.append((thread[1:] == thread[:-1]) & (start[1:] == start[:-1]), False)
    tied = np.flatnonzero(same | np.roll(same, 1))
    order[tied] = order[tied[np.lexsort((-end[order[tied]], start[tied], thread[tied]))]]
    return order


def _nested(thread: Codes, start: Ints, end: Ints) -> tuple[Ints, Codes, Codes]:
    if loops.compiled is None or not len(thread):
        return _nested_in_python(thread, start, end)
    given = (thread.astype(np.int32, copy=False), start, end)
    found, count = loops.compiled.nest(*map(np.ascontiguousarray, given)), len(thread)
    depth, until = np.frombuffer(found, np.int32, offset=count * 8).reshape(2, -1)
    return np.frombuffer(found, np.int64, count), depth, until


def _nested_in_python(thread: Codes, start: Ints, end: Ints) -> tuple[Ints, Codes, Codes]:
    parents, depths, until = [], [], list(range(1, len(thread) + 1))
    stack: list[int] = []
    threads, ends = thread.tolist(), end.tolist()
    for k, (of_thread, needed) in enumerate(zip(threads, (end + (start == end)).tolist())):
        while stack and (ends[stack[-1]] < needed or threads[stack[-1]] != of_thread):
            until[stack.pop()] = k
        parents.append(stack[-1] if stack else -1)
        depths.append(len(stack))
        stack.append(k)
    for k in stack:
        until[k] = len(threads)
    return (
        np.array(parents, np.int64),
        np.array(depths, np.int32),
        np.array(until, np.int32),
    )


def _levels(depth: Codes) -> Iterator[Ints]:
    if not len(depth):
        return iter(())
    # NumPy sorts integers of at most 16 bits by radix, which is faster.
    narrow = depth.astype(np.min_scalar_type(int(depth.max())))
    order = np.argsort(narrow, kind="stable")
    return iter(np.split(order, np.cumsum(np.bincount(narrow))[:-1]))


def outermost(group: Ints, node: Ints, after: Ints) -> Flags:
    """A mask of the calls that are not inside another call of the same group, sorted by `node`."""
    beyond = int(after.max(initial=0)) + 1
    order = np.argsort(group, kind="stable")
    first, until = (group * beyond + node)[order], (group * beyond + after)[order]
    reached = np.maximum.accumulate(np.append(0, until))[:-1]
    outer = np.zeros(len(group), np.bool_)
    outer[order] = first >= reached
    return outer


def number_paths(call_tree: CallTree, name: Ints) -> tuple[Ints, Ints, Ints]:
    """Number the distinct paths of names in a call tree, in the order of their first nodes.

    Returns:
        The path of each node; the parent of each path, or -1; the last name of each path. A path
            has a larger number than its parent.
    """
    width, numbers = int(name.max(initial=0)) + 1, Interned()
    paths: list[int] = []
    for parent, code in zip(call_tree.parent.tolist(), name.tolist()):
        above = paths[parent] if parent >= 0 else -1
        paths.append(numbers[(above + 1) * width + code])
    above, labels = np.divmod(np.fromiter(numbers, np.int64, len(numbers)), width)
    return np.array(paths, np.int64), above - 1, labels
