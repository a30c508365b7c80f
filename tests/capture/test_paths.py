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

from instrument.read.facts.paths import LONGEST_PATH, Paths, _ends, _texts
from instrument.read.views.ranges import _busy_ns, sums_below

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
    found = Paths(parents, _ends(parents), names, _texts(parents, names), [0] * len(names))
    for path in range(len(names)):
        found.depths[path] = len(at_or_above(found, path)) - 1
    return found, random


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
        columns = np.stack([values, 2 * values], axis=1)
        for expected, sides in ((single, (one,)), (both, (one, other)), (both, (other, one))):
            sums = sums_below(paths, group, count, columns, *sides)
            assert sums.T.tolist() == [expected.tolist(), (2 * expected).tolist()]


@given(SEEDS)
def test_what_lies_above_and_below_a_path(seed) -> None:
    paths, random = drawn(seed)
    every = [NONE, *range(len(paths.names))]
    ways = {path: at_or_above(paths, path) for path in every}
    pairs = {(item, path) for item, each in enumerate(every) for path in ways[each]}
    assert {*zip(*(side.tolist() for side in paths.at_or_above(np.array(every))))} == pairs
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
    scopes = SimpleNamespace(
        innermost=np.arange(8), enclosing=enclosing, attributed=attributed, paths=paths
    )
    read = SimpleNamespace(
        links=SimpleNamespace(scopes=scopes, launched=(np.arange(15), place)),
        events=SimpleNamespace(start_ns=start, end_ns=end),
    )
    for group, count in groupings(paths):
        covered: list[set[int]] = [set() for _ in range(count)]
        for at, first, last in zip(place, start, end):
            for end_path in (int(enclosing[at]), int(attributed[at])):
                for path in at_or_above(paths, end_path):
                    covered[group[path]] |= set(range(first, last))
        assert _busy_ns(read, group, count).tolist() == [len(each) for each in covered]


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
