"""Groups of rows: exact sums, percentiles by nearest rank, cells that are None where nothing is known."""

from __future__ import annotations

import numpy as np
import pytest

from instrument.read.facts.groupby import Groups, at, distinct, group_rows, groupby, intern, isin
from instrument.read.facts.intervals import begun_by
from instrument.read.facts.launches import find
from instrument.read.views.operators import outermost

# Two rows in group 0, none in group 1, three in group 2.
GROUPS = Groups(np.array([2, 0, 2, 0, 2]), 3)
VALUES = np.array([5, 2**53 + 1, 3, 1, 9])


def test_values_are_numbered_in_the_order_of_their_first_occurrence() -> None:
    codes, values = intern(iter(["b", None, "a", "b"]))
    assert (codes.tolist(), values) == ([0, 1, 2, 0], ["b", None, "a"])
    assert intern([])[1] == []


@pytest.mark.parametrize(
    "keys", [[3, 0, 3, 1], [3, -1, 3, 0], [2**40, 0, 2**40, 7], [], [-1, -1]], ids=str
)
def test_keys_may_be_dense_sparse_or_negative(keys: list[int]) -> None:
    column = np.array(keys, np.int64)
    distinct, groups = groupby(column)
    assert distinct.tolist() == sorted(set(keys))
    assert groups.count == len(distinct)
    assert distinct[groups.of].tolist() == keys
    assert groups.size.tolist() == [keys.count(key) for key in sorted(set(keys))]


@pytest.mark.parametrize("wanted", [[7, -1, 7, 2**40], [3], []], ids=str)
def test_values_among_wanted_ones_are_found(wanted: list[int]) -> None:
    values = [2**40, 0, 7, 8, -1, 7, -2, 2**41]
    found = isin(np.array(values), np.array(wanted, np.int64))
    assert found.tolist() == [value in wanted for value in values]
    assert distinct(np.array(wanted, np.int64)).tolist() == sorted(set(wanted))


def test_rows_are_grouped_by_several_columns() -> None:
    random = np.random.default_rng(2)
    columns = [
        random.integers(-3, 3, 200),
        random.integers(0, 2, 200) > 0,
        random.integers(0, 2, 200) << 50,
    ]
    groups = group_rows(*columns)
    rows = [*zip(*(column.tolist() for column in columns))]
    assert groups.count == len(set(rows)) == len(set(zip(rows, groups.of.tolist())))


def test_sums_are_exact_and_unknown_where_nothing_counts() -> None:
    assert GROUPS.size.tolist() == [2, 0, 3]
    assert GROUPS.sum(VALUES).tolist() == [2**53 + 2, 0, 17], "a float would lose the last digit"
    where = np.array([True, False, False, False, True])
    assert GROUPS.sums(VALUES, where) == [None, None, 14]
    assert GROUPS.sums(None, where) == [None] * 3
    assert GROUPS.sums(VALUES) == [2**53 + 2, 0, 17]
    assert GROUPS.number(where).tolist() == [0, 0, 2]
    assert GROUPS.min(VALUES).tolist() == [1, np.iinfo(np.int64).max, 3]


def test_rows_without_a_group_are_left_out_of_sums() -> None:
    assert Groups(np.array([-1, 1, -1, 1]), 2).sum(np.array([1, 2, 4, 8])).tolist() == [0, 10]


def test_calls_inside_a_call_of_their_group_are_not_outermost() -> None:
    # Node 0 contains nodes 1 to 3, and node 1 contains node 2.
    node, after = np.array([0, 1, 2, 3, 4]), np.array([4, 3, 3, 4, 5])
    for group, expected in (
        ([0, 0, 0, 0, 0], [True, False, False, False, True]),
        ([0, 1, 1, 0, 1], [True, True, False, False, True]),
        ([1, 2, 2, 1, 0], [True, True, False, False, True]),
        ([0, 1, 2, 1, 0], [True, True, True, True, True]),
    ):
        assert outermost(np.array(group), node, after).tolist() == expected


@pytest.mark.parametrize("time_ns", [[0, 2, 2, 5, 9], [9, 0, 5], [3], []], ids=str)
def test_starts_until_each_time_are_counted_for_sorted_and_unsorted_times(time_ns) -> None:
    starts = [2, 2, 5, 7]
    expected = [sum(start <= time for start in starts) for time in time_ns]
    assert begun_by(np.array(starts), np.array(time_ns, np.int64)).tolist() == expected
    assert begun_by(np.array([5]), np.array(time_ns, np.int64)).tolist() == [
        int(time >= 5) for time in time_ns
    ]


@pytest.mark.parametrize("large", [9, 2**40, -9])
def test_of_events_with_the_same_key_the_first_is_found(large) -> None:
    """Even if keys are so large or negative that a table of all keys is impossible."""
    keys = np.array([3, large, 3, 0, 4, 4])
    among = np.array([True, True, True, True, False, True])
    wanted = np.array([3, large, 4, 0, 5, 2**50, -1])
    assert find(keys, among, wanted).tolist() == [0, 1, 5, -1, -1, -1, -1]


def test_percentiles_are_rows_by_nearest_rank() -> None:
    by_value = GROUPS.sorted_by(VALUES)
    assert at(VALUES, by_value.row(0)) == [1, None, 3]
    assert at(VALUES, by_value.row(50)) == [1, None, 5], "the lower of two medians"
    assert at(VALUES, by_value.row(95)) == at(VALUES, by_value.row(100)) == [2**53 + 1, None, 9]
    assert [rows.tolist() for rows in by_value.rows()] == [[3, 1], [], [2, 0, 4]]
    assert by_value.ordinals().tolist() == [1, 1, 0, 0, 2]
    ties = Groups(np.zeros(3, np.int64), 1).sorted_by(np.array([7, 7, 7]), np.array([2, 3, 1]))
    assert ties.order.tolist() == [2, 0, 1]


@pytest.mark.parametrize("count", [2**16 - 1, 2**16, 2**16 + 9])
def test_many_groups_are_sorted_by_all_bits_of_their_numbers(count: int) -> None:
    of = np.random.default_rng(count).integers(0, count, 2 * count)
    value = of % 7
    assert (Groups(of, count).in_order.order == np.argsort(of, kind="stable")).all()
    by_value = Groups(of, count).sorted_by(-np.arange(len(of))).order
    assert (by_value == np.lexsort((-np.arange(len(of)), of))).all()
    least, present = Groups(of, count).min(value), np.unique(of)
    assert (least[present] == present % 7).all()
    assert (least == np.iinfo(np.int64).max).sum() == count - len(present)


def test_groups_can_be_numbered_anew() -> None:
    assert GROUPS.renumbered(np.array([2, 0, 1])).sum(VALUES).tolist() == [17, 2**53 + 2, 0]
    assert [rows.tolist() for rows in GROUPS.rows()] == [[1, 3], [], [0, 2, 4]]
