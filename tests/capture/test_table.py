"""Tables: sorting, filtering, and plain text."""

from __future__ import annotations

import pytest

from instrument.capture.table import Table, to_text

TABLE = Table(
    {
        "name": ["b", "a", "c"],
        "self_host_ns": [5_000, 2_500_000, 999],
        "device_bytes": [None, 2048, -3],
        "share": [0.25, None, 0.5],
        "host_ns_per_step": [1, 2, 3_000_000_000],
        "flops": [None, 1500, 0],
    }
)


def names(table: Table) -> list[str]:
    return table.column("name")


def test_numbers_sort_downwards_text_upwards_and_unknown_cells_last() -> None:
    assert names(TABLE.sort("self_host_ns")) == ["a", "b", "c"]
    assert names(TABLE.sort("name")) == ["a", "b", "c"]
    assert names(TABLE.sort("device_bytes")) == ["a", "c", "b"]
    assert names(TABLE.sort("device_bytes", descending=False)) == ["c", "a", "b"]
    assert names(TABLE) == ["b", "a", "c"]


def test_torchs_names_are_understood() -> None:
    assert names(TABLE.sort("self_cpu_time_total")) == ["a", "b", "c"]
    assert TABLE.select(["key", "self_cpu_time_total"]).columns == ("name", "self_host_ns")


def test_rows_are_taken_by_position_value_and_test() -> None:
    assert TABLE[1].flops == 1500
    assert names(TABLE.head(2)) == ["b", "a"]
    assert names(TABLE.head(9)) == ["b", "a", "c"]
    assert names(TABLE.where(share=0.5)) == ["c"]
    assert names(TABLE.where(lambda row: row.self_host_ns > 1000)) == ["b", "a"]


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"The table has no column 'calls'; it has name, self_host_ns, device_bytes"):
        TABLE.sort("calls")


def test_columns_must_be_equally_long() -> None:
    with pytest.raises(ValueError, match=r"must be equally long, not \{'a': 1, 'b': 2\}"):
        Table({"a": [1], "b": [1, 2]})


def test_text_has_units_and_a_dash_for_what_is_unknown() -> None:
    assert [line.split() for line in to_text(TABLE).splitlines()] == [
        ["name", "self", "host", "device", "memory", "share", "host", "per", "step", "flops"],
        ["-" * 4, "-" * 9, "-" * 13, "-" * 5, "-" * 13, "-" * 6],
        ["b", "5.000", "µs", "-", "25.0%", "1", "ns", "-"],
        ["a", "2.500", "ms", "2.00", "KiB", "-", "2", "ns", "1.50", "K"],
        ["c", "999", "ns", "-3", "B", "50.0%", "3.000", "s", "0"],
    ]


def test_a_long_name_keeps_its_head_and_tail() -> None:
    cell = to_text(Table({"name": ["a" * 50 + "z" * 50]}), name_width=40).splitlines()[-1]
    assert cell == "a" * 24 + "…" + "z" * 15


def test_a_tables_repr_stops_after_twenty_rows() -> None:
    assert repr(Table({"number": list(range(25))})).endswith("… and 5 more rows")
    assert repr(Table({})) == "\n"
