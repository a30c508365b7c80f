"""The tree of paths that nested names make, and sums over it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.capture.events import Flags, Ints
from instrument.capture.nesting import Forest, number_paths


@dataclass(frozen=True, slots=True)
class Paths:
    """The distinct paths of names in tree order: a parent before its children, siblings by first start.

    `above` is the path that each lies in, or -1; `texts` the names from the outermost on, joined by "/".
    """

    above: Ints
    names: list[str]
    texts: list[str]
    depths: list[int]

    def upwards(self, group: Ints, *starts: Ints) -> tuple[Ints, Ints]:
        """Pairs of an item and a group: each group that one of an item's paths, or a path above it, is of, once.

        `group` numbers the paths' groups; each of `starts` gives every item one path, or -1.
        """
        items, groups = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for start in starts:
            item = np.flatnonzero(start >= 0)
            at = start[item]
            while item.size:
                items.append(item)
                groups.append(group[at])
                item, at = item[self.above[at] >= 0], self.above[at][self.above[at] >= 0]
        width = int(group.max(initial=0)) + 1
        pairs = np.sort(np.concatenate(items) * width + np.concatenate(groups))
        distinct = pairs[np.diff(pairs, prepend=-1) > 0]  # np.unique hashes, which takes 50 times as long on these
        return distinct // width, distinct % width

    def outermost(self, group: Ints) -> Flags:
        """Whether no path above a path is of the same group."""
        inside = np.zeros(len(self.above), np.bool_)
        at = self.above
        while (at >= 0).any():
            inside |= (at >= 0) & (group[at] == group)
            at = np.where(at >= 0, self.above[at], -1)
        return ~inside


def paths_of(forest: Forest, name: Ints, names: list[str]) -> tuple[Paths, Ints]:
    """The paths of a nesting's nodes, and each node's among them; `name` is an index into `names`."""
    numbered, above, label = number_paths(forest, name)
    order, depth = _tree_order(above, forest, numbered)
    rank = np.zeros(len(order) + 1, np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    named = [names[label[k]] for k in order]
    parents = rank[above[order]] if order else above
    return Paths(parents, named, _texts(parents, named), [depth[k] for k in order]), rank[numbered]


def _tree_order(above: Ints, forest: Forest, path: Ints) -> tuple[list[int], list[int]]:
    """The paths with parents before children and siblings by first start, and the depth of each path."""
    first = np.full(len(above), np.iinfo(np.int64).max)
    np.minimum.at(first, path, forest.start_ns)
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


def _texts(above: Ints, names: list[str]) -> list[str]:
    texts: list[str] = []
    for parent, name in zip(above.tolist(), names):
        texts.append(f"{texts[parent]}/{name}" if parent >= 0 else name)
    return texts
