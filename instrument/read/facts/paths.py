"""The paths of nested names, such as `train/forward/layer`, as a tree, and sums over the tree."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from instrument.read.facts.call_tree import CallTree, number_paths
from instrument.read.trace.events import Flags, Ints

#: The names of time outside of all ranges.
NO_RANGE, NO_RANGES_BACKWARD, NO_LAUNCH = "(no range)", "(backward of no range)", "(no launch)"
# A text of more than `LONGEST_PATH` characters is shortened. Otherwise, n ranges inside one another
# would have texts whose memory grows with n². Nobody reads 2000 characters, and by default Python
# allows only 1000 nested calls.
LONGEST_PATH, _KEPT = 2000, 980
# The number of items for which paths are searched at once, to save memory.
_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Paths:
    """The distinct paths as a tree: parents first, siblings by the start of their first node.

    Attributes:
        above: the parent of each path; -1 for a root.
        after: for each path, the index after its last descendant. The descendants of path k are the
            paths k + 1 to `after[k]` - 1.
        names: the last name of each path.
        texts: the names from the root to the path, joined by "/". In a text of more than
            `LONGEST_PATH` characters, a hash of the text replaces the middle: texts stay distinct,
            and equal paths of different traces have equal texts.
        depths: the number of ancestors of each path.
    """

    above: Ints
    after: Ints
    names: list[str]
    texts: list[str]
    depths: list[int]

    def with_descendants(self, own: Ints) -> Ints:
        """For each path (or row), the sum of a quantity over the path and all its descendants."""
        sums = np.cumsum(np.insert(own, 0, 0, axis=0), axis=0)
        found: Ints = sums[self.after] - sums[:-1]
        return found

    def at_or_below(self, chosen: Flags) -> Flags:
        """A mask of the paths that are chosen or lie below a chosen path."""
        change = np.zeros(len(chosen) + 1, np.int64)
        np.add.at(change, np.flatnonzero(chosen), 1)
        np.add.at(change, self.after[chosen], -1)
        return np.cumsum(change)[:-1] > 0

    def outermost(self, group: Ints) -> Flags:
        """A mask of the paths that have no ancestor in their own group."""
        order = np.argsort(group, kind="stable")
        offset = group[order] * (len(group) + 1)  # each group has its own range of numbers
        reached = np.maximum.accumulate(np.concatenate([[0], offset + self.after[order]]))[:-1]
        outermost = np.zeros(len(group), np.bool_)
        outermost[order] = offset + order >= reached
        return outermost

    def summed(
        self, values: Ints, group: Ints, count: int, path: Ints, second: Ints | None = None
    ) -> Ints:
        """For each group of paths, sum the items that lie at or below a path of the group.

        An item with two paths counts at most once in each group.

        Args:
            values: the quantity of each item.
            group: the group of each path, 0 to `count` - 1.
            count: the number of groups.
            path: the path of each item; -1 for an item without a path.
            second: a second path of each item; -1 for an item without a second path.

        Cost: linear in the paths and items; with second paths, also in the depth of these paths.
        """
        own = np.zeros(len(self.names) + 1, np.int64)  # the last slot is for items without a path
        np.add.at(own, path, values)
        if second is not None:
            np.add.at(own, second, values)
            common = self.common(path, second)
            np.subtract.at(own, common, values)
        totals, top = self.with_descendants(own[:-1]), self.outermost(group)
        sums = np.zeros(count, np.int64)
        np.add.at(sums, group[top], totals[top])
        if second is not None and count < len(self.names):
            for items in np.array_split(np.arange(len(values)), len(values) // _AT_ONCE + 1):
                item, groups = self._counted_twice(group, path[items], second[items], common[items])
                np.subtract.at(sums, groups, values[items[item]])
        return sums

    def common(self, one: Ints, other: Ints) -> Ints:
        """For each pair of paths, the innermost path at or above both; -1 if there is none."""
        above, after = np.append(self.above, -1), np.append(self.after, -1)
        jumps = [above]  # the ancestors 1, 2, 4, … levels up
        while (jumps[-1] >= 0).any():
            jumps.append(jumps[-1][jumps[-1]])
        path = one
        for jump in reversed(jumps):
            ancestor = jump[path]
            is_common = (ancestor <= other) & (other < after[ancestor])
            path = np.where((ancestor >= 0) & ~is_common, ancestor, path)
        return np.where((path >= 0) & (path <= other) & (other < after[path]), path, above[path])

    def _counted_twice(
        self, group: Ints, one: Ints, other: Ints, common: Ints
    ) -> tuple[Ints, Ints]:
        """The items and groups in which an item counts twice, as two arrays.

        Its paths in `one` and `other` are then at or below two different outermost paths of the
        group. `common` is the innermost path at or above both.
        """
        item = np.flatnonzero((one >= 0) & (other >= 0) & (common != one) & (common != other))
        ends = common[item]
        in_both = np.intersect1d(
            self._groups_above(group, item, one[item], ends),
            self._groups_above(group, item, other[item], ends),
        )
        above_common = self._groups_above(group, item, ends, np.full(len(item), -1))
        pairs = np.setdiff1d(in_both, above_common)
        return pairs // len(self.names), pairs % len(self.names)

    def _groups_above(self, group: Ints, item: Ints, path: Ints, end: Ints) -> Ints:
        """For each item, the groups of its path and of the path's ancestors before the path `end`.

        A pair of an item and a group is the number item * n + group, where n is the number of
        paths.
        """
        found = [np.zeros(0, np.int64)]
        while (below := path != end).any():
            item, path, end = item[below], path[below], end[below]
            found.append(item * len(self.names) + group[path])
            path = self.above[path]
        return np.concatenate(found)


def paths_of(call_tree: CallTree, name: Ints, names: list[str]) -> tuple[Paths, Ints]:
    """The paths of a call tree, and the path of each node.

    `name` holds, for each node, the index of its name in `names`.
    """
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
    first = np.full(len(above), np.iinfo(np.int64).max)
    np.minimum.at(first, path, call_tree.start_ns)
    children: dict[int, list[int]] = {}  # latest first: the stack reverses it
    for k in np.argsort(-first, kind="stable").tolist():
        children.setdefault(int(above[k]), []).append(k)
    depth, order, stack = [0] * len(above), [], list(children.get(-1, []))
    while stack:
        k = stack.pop()
        order.append(k)
        for child in children.get(k, []):
            depth[child] = depth[k] + 1
            stack.append(child)
    return order, depth


def _ends(above: Ints) -> Ints:
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
    if len(path) <= LONGEST_PATH:
        return path
    digest = blake2b(path.encode(), digest_size=8).hexdigest()
    return f"{path[:_KEPT]}…{digest}…{path[-_KEPT:]}"
