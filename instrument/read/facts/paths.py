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

    def at_or_above(self, path: Ints) -> tuple[Ints, Ints]:
        """Pairs of an item with its path and each path above it, as two arrays.

        `path` holds the path of each item; -1 for an item without a path.
        """
        item, found = np.arange(len(path)), [np.zeros((2, 0), np.int64)]
        while len(item):
            known = path >= 0
            item, path = item[known], path[known]
            found.append(np.stack([item, path]))
            path = self.above[path]
        item, path = np.concatenate(found, axis=1)
        return item, path


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
