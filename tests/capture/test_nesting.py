"""Parents, depths and self times, against torch's rule written as a plain loop."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from builders import read, span
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.facts.call_tree import nest, number_paths

pytestmark = pytest.mark.usefixtures("each_reader")
SEEDS = st.integers(0, 2**32 - 1)


def nested(folder: Path, *intervals: tuple[str, int, int]):
    events = read(folder, [span(name, start, end - start) for name, start, end in intervals])
    call_tree = nest(events, np.ones(len(events), np.bool_))
    names = [events.names[k] for k in events.name[call_tree.index]]
    return {n: names[p] if p >= 0 else None for n, p in zip(names, call_tree.parent)}, call_tree


def test_a_child_lies_wholly_inside_its_parent(tmp_path) -> None:
    parents, call_tree = nested(
        tmp_path, ("a", 0, 10), ("b", 1, 4), ("c", 2, 3), ("d", 5, 10), ("e", 11, 12)
    )
    assert parents == {"a": None, "b": "a", "c": "b", "d": "a", "e": None}
    assert call_tree.depth.tolist() == [0, 1, 2, 1, 0]
    assert call_tree.own(call_tree.total_ns).tolist() == [2000, 2000, 1000, 5000, 1000]


def test_the_time_that_two_share_counts_for_the_later_one_and_what_is_in_it(tmp_path) -> None:
    """Neither the first nor anything in it counts for more after the second has begun."""
    _, call_tree = nested(tmp_path, ("a", 0, 10), ("b", 1, 9), ("c", 2, 8), ("d", 5, 15))
    names = [call_tree.index[node] for node in range(4)]
    ends = dict(zip(names, call_tree.ends_before_overlap.tolist()))
    assert [ends[k] for k in sorted(ends)] == [5000, 5000, 5000, 15000]


def test_of_two_that_start_together_the_longer_is_the_parent(tmp_path) -> None:
    assert nested(tmp_path, ("short", 0, 5), ("long", 0, 9))[0] == {"long": None, "short": "long"}


@given(SEEDS)
def test_parents_equal_those_of_a_plain_stack(tmp_path, seed) -> None:
    dice = random.Random(seed)
    reach = dice.choice([8, 60, 1000])  # a short reach makes ties, a long one deep nesting
    spans = []
    for _ in range(dice.choice([1, 30, 300])):
        start = dice.randrange(reach)
        spans.append(span("x", start, dice.randrange(reach - start + 1), tid=dice.randrange(3)))
    call_tree = nest(read(tmp_path, spans), np.ones(len(spans), np.bool_))
    assert call_tree.parent.tolist() == _plain(call_tree)
    depths = [0] * len(call_tree)
    for node, parent in enumerate(call_tree.parent.tolist()):
        depths[node] = depths[parent] + 1 if parent >= 0 else 0
    assert call_tree.depth.tolist() == depths
    below = np.ones(len(call_tree), np.int64)
    for node in range(len(call_tree) - 1, -1, -1):
        if call_tree.parent[node] >= 0:
            below[call_tree.parent[node]] += below[node]
    assert call_tree.with_descendants(np.ones(len(call_tree), np.int64)).tolist() == below.tolist()


def drawn(folder: Path, seed: int):
    """A tree of random events on two threads, and a random mask of its nodes."""
    dice = random.Random(seed)
    spans = [
        span("x", start := dice.randrange(60), dice.randrange(61 - start), tid=dice.randrange(2))
        for _ in range(dice.choice([1, 80]))
    ]
    call_tree = nest(read(folder, spans), np.ones(len(spans), np.bool_))
    return call_tree, np.array([dice.random() < 0.3 for _ in spans])


def above(call_tree, node: int) -> list[int]:
    """A node and its ancestors, the innermost first; nothing for the node -1."""
    found = []
    while node >= 0:
        found.append(node)
        node = int(call_tree.parent[node])
    return found


@given(SEEDS)
def test_chosen_nodes_around_each_node_equal_those_of_plain_loops(tmp_path, seed) -> None:
    call_tree, chosen = drawn(tmp_path, seed)
    nodes, kept = range(len(call_tree)), np.flatnonzero(chosen).tolist()
    around = [[k for k in above(call_tree, node) if chosen[k]] for node in nodes]
    nearest = [ancestors[0] if ancestors else -1 for ancestors in around]
    assert call_tree.nearest(chosen).tolist() == nearest
    assert call_tree.inside(chosen).tolist() == [around[k][int(chosen[k]) :] != [] for k in nodes]
    places = [kept.index(k) if k >= 0 else -1 for k in nearest]
    assert call_tree.nearest_of(np.array(kept, np.int64)).tolist() == places
    at = np.array([-1, *nodes[::2]])
    assert call_tree.nearest_of(np.array(kept, np.int64), at).tolist() == [-1, *places[::2]]


@given(SEEDS)
def test_a_tree_of_chosen_nodes_has_their_nearest_chosen_ancestors(tmp_path, seed) -> None:
    call_tree, chosen = drawn(tmp_path, seed)
    kept, tree = np.flatnonzero(chosen).tolist(), call_tree.only(chosen)
    around = [[k for k in above(call_tree, node)[1:] if chosen[k]] for node in kept]
    assert tree.index.tolist() == call_tree.index[kept].tolist()
    assert tree.parent.tolist() == [kept.index(a[0]) if a else -1 for a in around]
    assert tree.depth.tolist() == [len(ancestors) for ancestors in around]
    ends = [max(k for k, a in enumerate(around) if node in a or kept[k] == node) for node in kept]
    assert tree.until.tolist() == [end + 1 for end in ends]


@given(SEEDS)
def test_the_top_of_a_chain_is_reached_through_chosen_parents_only(tmp_path, seed) -> None:
    call_tree, chosen = drawn(tmp_path, seed)
    expected = [-1]
    for node in range(len(call_tree)):
        chain = [*itertools.takewhile(lambda k: chosen[k], above(call_tree, node))]
        expected.append(chain[-1] if chain else -1)
    nodes = np.arange(-1, len(call_tree))
    assert call_tree.top_of_chain(chosen, nodes).tolist() == expected


@given(SEEDS)
def test_ends_before_overlap_equal_those_of_a_plain_loop(tmp_path, seed) -> None:
    call_tree, _ = drawn(tmp_path, seed)
    ends = call_tree.end_ns.tolist()
    for node in range(len(call_tree)):
        for k in above(call_tree, node):
            other = int(call_tree.until[k])
            if (
                other < len(call_tree)
                and call_tree.parent[other] == call_tree.parent[k]
                and call_tree.thread[other] == call_tree.thread[k]
            ):
                ends[node] = min(ends[node], int(call_tree.start_ns[other]))
        ends[node] = max(ends[node], int(call_tree.start_ns[node]))
    assert call_tree.ends_before_overlap.tolist() == ends


def _plain(call_tree) -> list[int]:
    parents, stack, thread = [], [], None
    rows = zip(call_tree.thread.tolist(), call_tree.start_ns.tolist(), call_tree.end_ns.tolist())
    for node, (its_thread, start, end) in enumerate(rows):
        if its_thread != thread:
            thread, stack = its_thread, []
        while stack and (start >= call_tree.end_ns[stack[-1]] or end > call_tree.end_ns[stack[-1]]):
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(node)
    return parents


def test_the_innermost_interval_around_a_moment(tmp_path) -> None:
    events = read(
        tmp_path, [span("a", 0, 10), span("b", 2, 3), span("c", 20, 5), span("d", 3, 1, tid=2)]
    )
    call_tree = nest(events, np.ones(4, np.bool_))
    moments = np.array([1, 2, 4, 7, 12, 22, 3, -5, 5, 10, 25, 3]) * 1000
    thread = np.array([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 7], np.int32)  # 7 has no intervals
    found = call_tree.node_at(thread, moments)
    names = [
        events.names[events.name[call_tree.index[node]]] if node != -1 else None for node in found
    ]
    assert names == ["a", "b", "b", "a", None, "c", "d", None, "b", "a", "c", None], (
        "their ends belong to them"
    )


def test_paths_are_numbered_by_their_names(tmp_path) -> None:
    events = read(
        tmp_path,
        [span("a", 0, 9), span("b", 1, 2), span("a", 4, 4), span("a", 10, 5), span("b", 11, 1)],
    )
    call_tree = nest(events, np.ones(5, np.bool_))
    path, above, name = number_paths(call_tree, events.name[call_tree.index].astype(np.int64))
    assert path[1] == path[4]
    assert path[0] == path[3]
    assert len(set(path.tolist())) == len(above) == 3
    assert [events.names[k] for k in name] == ["a", "b", "a"], "in the order of the first nodes"
    assert above.tolist() == [-1, 0, 0]


def test_nothing_nests_in_an_empty_trace(tmp_path) -> None:
    events = read(tmp_path, [])
    call_tree = nest(events, np.ones(0, np.bool_))
    assert len(call_tree) == 0
    assert call_tree.with_descendants(call_tree.total_ns).tolist() == []
    assert call_tree.node_at(np.array([0], np.int32), np.array([5])).tolist() == [-1]


@pytest.mark.parametrize("sizes", [(2, 3, 3), (3, 2, 3), (3, 3, 2)])
def test_columns_of_different_lengths_are_refused(sizes: tuple[int, int, int]) -> None:
    compiled = pytest.importorskip("instrument.read.facts._loops")
    thread, start, end = (np.zeros(size, np.int64) for size in sizes)
    with pytest.raises(ValueError, match="must have the same length"):
        compiled.nest(thread.astype(np.int32), start, end)
