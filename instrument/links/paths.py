"""The tree of paths that nested names make, and sums over it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from instrument.links.call_tree import CallTree, number_paths
from instrument.trace.events import Flags, Ints

# A longer path is shortened. Python's own stack ends after 1000 calls, and a path of 2000 characters is read by nobody;
# without a limit the text of ranges nested n deep would be as long as the square of n.
LONGEST_PATH, _KEPT = 2000, 980


@dataclass(frozen=True, slots=True)
class Paths:
    """The distinct paths of names in tree order: a parent before its children, siblings by first start.

    `above` is the path that each lies in, or -1; those below one follow it without a gap, up to its `after`. `texts`
    are the names from the outermost on, joined by "/"; of those beyond `LONGEST_PATH` characters the middle is replaced
    by a number made of the whole, so that each is still told from the others, and is the same in every trace.

    Whatever is summed here takes time in proportion to the items and paths, however deep they lie.
    """

    above: Ints
    after: Ints
    names: list[str]
    texts: list[str]
    depths: list[int]

    def with_inner(self, own: Ints) -> Ints:
        """A quantity of each path with that of all paths below it added."""
        sums = np.concatenate([[0], np.cumsum(own)])
        found: Ints = sums[self.after] - sums[:-1]
        return found

    def at_or_below(self, chosen: Flags) -> Flags:
        """Whether a path is chosen, or lies below one that is."""
        change = np.zeros(len(chosen) + 1, np.int64)
        np.add.at(change, np.flatnonzero(chosen), 1)
        np.add.at(change, self.after[chosen], -1)
        return np.cumsum(change)[:-1] > 0

    def outermost(self, group: Ints) -> Flags:
        """Whether no path above a path is of the same group."""
        order = np.argsort(group, kind="stable")
        offset = group[order] * (len(group) + 1)  # each group has a stretch of its own
        reached = np.maximum.accumulate(np.concatenate([[0], offset + self.after[order]]))[:-1]
        outermost = np.zeros(len(group), np.bool_)
        outermost[order] = offset + order >= reached
        return outermost

    def summed(
        self, values: Ints, group: Ints, count: int, one: Ints, other: Ints | None = None
    ) -> Ints:
        """What each of `count` groups has of a quantity: that of the items at or below its paths, each item once.

        `group` numbers the paths' groups; an item is at the path `one`, and where it is given at `other` too; -1: none.
        """
        own = np.zeros(len(self.names) + 1, np.int64)  # the last for what is at no path
        np.add.at(own, one, values)
        if other is not None:
            np.add.at(own, other, values)
            np.subtract.at(own, self.common(one, other), values)
        totals, top = self.with_inner(own[:-1]), self.outermost(group)
        sums = np.zeros(count, np.int64)
        np.add.at(sums, group[top], totals[top])
        if other is not None and count < len(self.names):
            item, groups = self._counted_twice(group, one, other)
            np.subtract.at(sums, groups, values[item])
        return sums

    def common(self, one: Ints, other: Ints) -> Ints:
        """The innermost path at or above both of two, or -1: by jumps from `one` upwards that halve."""
        above, after = np.append(self.above, -1), np.append(self.after, -1)
        jumps = [above]
        while (jumps[-1] >= 0).any():
            jumps.append(jumps[-1][jumps[-1]])
        at = one
        for jump in reversed(jumps):
            further = jump[at]
            at = np.where(
                (further >= 0) & ~((further <= other) & (other < after[further])), further, at
            )
        return np.where((at >= 0) & (at <= other) & (other < after[at]), at, above[at])

    def _counted_twice(self, group: Ints, one: Ints, other: Ints) -> tuple[Ints, Ints]:
        """Items and groups that hold both of the item's paths, each by an outermost path of its own."""
        common = self.common(one, other)
        item = np.flatnonzero((one >= 0) & (other >= 0) & (common != one) & (common != other))
        ends = common[item]
        of_both = np.intersect1d(
            self._way(group, item, one[item], ends), self._way(group, item, other[item], ends)
        )
        pairs = np.setdiff1d(of_both, self._way(group, item, ends, np.full(len(item), -1)))
        return pairs // len(self.names), pairs % len(self.names)

    def _way(self, group: Ints, item: Ints, at: Ints, end: Ints) -> Ints:
        """The groups of the paths from each item's path upwards, before its end; a pair is one number."""
        found = [np.zeros(0, np.int64)]
        while (on := at != end).any():
            item, at, end = item[on], at[on], end[on]
            found.append(item * len(self.names) + group[at])
            at = self.above[at]
        return np.concatenate(found)


def paths_of(call_tree: CallTree, name: Ints, names: list[str]) -> tuple[Paths, Ints]:
    """The paths of a nesting's nodes, and each node's among them; `name` is an index into `names`."""
    numbered, above, label = number_paths(call_tree, name)
    order, depth = _tree_order(above, call_tree, numbered)
    rank = np.zeros(len(order) + 1, np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    named = [names[label[k]] for k in order]
    parents = rank[above[order]] if order else above
    texts, depths = _texts(parents, named), [depth[k] for k in order]
    return Paths(parents, _ends(parents), named, texts, depths), rank[numbered]


def _tree_order(above: Ints, call_tree: CallTree, path: Ints) -> tuple[list[int], list[int]]:
    """The paths with parents before children and siblings by first start, and the depth of each path."""
    first = np.full(len(above), np.iinfo(np.int64).max)
    np.minimum.at(first, path, call_tree.start_ns)
    children: dict[int, list[int]] = {}
    for k in np.argsort(-first, kind="stable").tolist():
        children.setdefault(int(above[k]), []).append(k)
    depth, order, waiting = [0] * len(above), [], list(children.get(-1, []))
    while waiting:
        k = waiting.pop()
        order.append(k)
        for child in children.get(k, []):
            depth[child] = depth[k] + 1
            waiting.append(child)
    return order, depth


def _ends(above: Ints) -> Ints:
    """Behind the last path below each."""
    after = list(range(1, len(above) + 1))
    for k, parent in zip(range(len(above) - 1, -1, -1), above[::-1].tolist()):
        if parent >= 0:
            after[parent] = max(after[parent], after[k])
    return np.array(after, np.int64)


def _texts(above: Ints, names: list[str]) -> list[str]:
    texts: list[str] = []
    for parent, name in zip(above.tolist(), names):
        texts.append(_shortened(f"{texts[parent]}/{name}" if parent >= 0 else name))
    return texts


def _shortened(path: str) -> str:
    """A path of at most `LONGEST_PATH` characters; what was shortened before has its own number in the whole."""
    if len(path) <= LONGEST_PATH:
        return path
    number = blake2b(path.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{path[:_KEPT]}…{number}…{path[-_KEPT:]}"
