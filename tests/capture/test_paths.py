"""Sums over the tree of paths, against counting every item at every path above it."""

from __future__ import annotations

import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from builders import annotation, call, capture, kernel
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.facts.groupby import Groups
from instrument.read.facts.paths import LONGEST_PATH, Paths, _ends, _texts
from instrument.read.views.ranges import RangeTree

NONE = -1
SEEDS = st.integers(0, 2**32 - 1)


def drawn(seed: int) -> tuple[Paths, np.random.Generator]:
    """A tree in tree order: each path lies in the one before it, or in one of those above that."""
    random = np.random.default_rng(seed)
    above: list[int] = []
    way = [NONE]
    for number in range(int(random.integers(1, 25))):
        del way[int(random.integers(1, len(way) + 1)) :]
        above.append(way[-1])
        way.append(number)
    parents, names = np.array(above, np.int64), [f"n{random.integers(4)}" for _ in above]
    return Paths(parents, _ends(parents), names, _texts(parents, names), [0] * len(names)), random


def at_or_above(paths: Paths, path: int) -> list[int]:
    found = []
    while path != NONE:
        found.append(path)
        path = int(paths.above[path])
    return found


def groupings(paths: Paths) -> list[tuple[np.ndarray, int]]:
    """Each path by itself, the same with the last path first, and all of a name together."""
    index = {name: number for number, name in enumerate(dict.fromkeys(paths.names))}
    return [
        (np.arange(len(paths.names)), len(paths.names)),
        (np.roll(np.arange(len(paths.names)), -1), len(paths.names)),
        (np.array([index[n] for n in paths.names]), len(index)),
    ]


@given(SEEDS)
def test_sums_count_each_item_once_for_each_group(seed) -> None:
    paths, random = drawn(seed)
    one, other = random.integers(NONE, len(paths.names), (2, 12))
    values = random.integers(0, 100, 12)
    for group, count in groupings(paths):
        single, both = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for a, b, value in zip(one.tolist(), other.tolist(), values.tolist()):
            ways = [{int(group[path]) for path in at_or_above(paths, start)} for start in (a, b)]
            single[list(ways[0])] += value
            both[list(ways[0] | ways[1])] += value
        assert paths.summed(values, group, count, one).tolist() == single.tolist()
        assert paths.summed(values, group, count, one, other).tolist() == both.tolist()
        for path in range(len(paths.names)):
            further = at_or_above(paths, path)[1:]
            assert paths.outermost(group)[path] == (
                int(group[path]) not in {int(group[each]) for each in further}
            )


@given(SEEDS)
def test_the_common_path_and_what_lies_below_one(seed) -> None:
    paths, random = drawn(seed)
    every = [NONE, *range(len(paths.names))]
    one, other = (np.array(side) for side in zip(*[(a, b) for a in every for b in every]))
    ways = {path: at_or_above(paths, path) for path in every}
    common = [
        next((path for path in ways[a] if path in ways[b]), NONE)
        for a, b in zip(one.tolist(), other.tolist())
    ]
    assert paths.common(one, other).tolist() == common
    chosen = random.random(len(paths.names)) < 0.2
    below = [any(chosen[path] for path in ways[each]) for each in range(len(paths.names))]
    assert paths.at_or_below(chosen).tolist() == below
    own = random.integers(0, 9, len(paths.names))
    inner = [
        sum(int(own[k]) for k in range(len(own)) if each in ways[k]) for each in range(len(own))
    ]
    assert paths.with_descendants(own).tolist() == inner


@given(SEEDS)
def test_a_groups_busy_time_counts_each_nanosecond_once(seed) -> None:
    paths, random = drawn(seed)
    enclosing, attributed = random.integers(NONE, len(paths.names), (2, 8))
    place, start = random.integers(0, 8, 15), random.integers(0, 60, 15)
    end = start + random.integers(0, 12, 15)
    work = SimpleNamespace(enclosing=enclosing, attributed=attributed, device=(place, start, end))
    tree = RangeTree(paths, None, work, 0)
    for group, count in groupings(paths):
        covered: list[set[int]] = [set() for _ in range(count)]
        for at, first, last in zip(place, start, end):
            for end_path in (int(enclosing[at]), int(attributed[at])):
                for path in at_or_above(paths, end_path):
                    covered[group[path]] |= set(range(first, last))
        assert tree._busy(Groups(group, count)).tolist() == [len(each) for each in covered]


def test_a_long_path_keeps_its_ends_and_stays_the_only_one() -> None:
    names = [f"block_{number:04d}" for number in range(1000)]
    above = np.arange(-1, 999)
    texts = _texts(above, names)
    exact = ["/".join(names[: number + 1]) for number in range(1000)]
    short = [text for text in exact if len(text) <= LONGEST_PATH]
    assert 100 < len(short) < 300
    assert texts[: len(short)] == short
    assert all(len(text) <= LONGEST_PATH for text in texts)
    assert len(set(texts)) == 1000
    for text, whole in zip(texts[len(short) :], exact[len(short) :]):
        head, _, tail = text.split("…")
        assert whole.startswith(head)
        assert whole.endswith(tail)
    other = _texts(above, ["elsewhere", *names[1:]])
    assert not {*texts} & {*other}
    assert _texts(above, names) == texts, "the same in every trace"


def test_ranges_nested_thousands_deep_are_cut_and_take_memory_by_their_number(tmp_path) -> None:
    depth, kept = 3000, 1000
    nested = [
        annotation(f"range_{number}", number, 2 * (depth - number)) for number in range(depth)
    ]
    for number in range(0, depth, 3):
        nested.append(call("cudaLaunchKernel", number + 0.1, 0.2, number + 1))
        nested.append(kernel("gemm", 10_000 + number, 1, correlation=number + 1))
    read = capture(tmp_path, nested)
    read.links.launched  # noqa: B018
    tracemalloc.start()
    try:
        table = read.ranges
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.column("name") == [f"range_{number}" for number in range(kept)]
    assert table.column("depth") == list(range(kept))
    assert len(set(table.column("path"))) == kept
    assert table.column("cpu_ns") == [2000 * (depth - number) for number in range(kept)]
    assert table.column("device_ns") == [
        1000 * (depth // 3 - (number + 2) // 3) for number in range(kept)
    ]
    assert table.column("self_total_ns")[-1] == table.column("total_ns")[-1] == 2000 * (depth - 999)
    assert table.column("device_busy_ns") == table.column("device_ns")
    assert peak < 100 << 20


@pytest.mark.nightly
def test_reading_ranges_takes_time_by_their_number(tmp_path) -> None:
    """Three times as many of them, below each other, take less than six times as long."""

    def seconds(count: int) -> float:
        chains = [
            annotation(f"range_{number}", 10_000 * chain + number, 2 * (800 - number))
            for chain in range(count)
            for number in range(800)
        ]
        read = capture(tmp_path, chains)
        read.links.launched  # noqa: B018
        began = time.process_time()
        assert len(read.ranges) == 800
        return time.process_time() - began

    assert seconds(30) < 6 * seconds(10)
