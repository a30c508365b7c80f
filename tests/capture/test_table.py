"""Tables: sorting, filtering, and plain text."""

from __future__ import annotations

import csv
import doctest
import pickle
import re
import sys
from html.parser import HTMLParser
from io import StringIO
from types import SimpleNamespace

import numpy as np
import polars
import pyarrow
import pytest
from golden import Golden
from real_traces import load

from instrument.base.errors import ConfigError, MissingPackage
from instrument.base.prose import PROSE_WIDTH
from instrument.read.views import table
from instrument.read.views.table import Table

TABLE = Table(
    {
        "name": ["b", "a", "c"],
        "self_cpu_ns": [5_000, 2_500_000, 999],
        "device_bytes": [None, 2048, -3],
        "share": [0.25, None, 0.5],
        "cpu_ns_per_step": [1, 2, 3_000_000_000],
        "flops": [None, 1500, 0],
    }
)


def names(table: Table) -> list[str]:
    return table.column("name")


def test_numbers_sort_downwards_text_upwards_and_unknown_cells_last() -> None:
    assert names(TABLE.sort("self_cpu_ns")) == ["a", "b", "c"]
    assert names(TABLE.sort("name")) == ["a", "b", "c"]
    assert names(TABLE.sort("device_bytes")) == ["a", "c", "b"]
    assert names(TABLE.sort("device_bytes", descending=False)) == ["c", "a", "b"]
    assert names(TABLE) == ["b", "a", "c"]


def test_torchs_names_are_understood() -> None:
    assert names(TABLE.sort("self_cpu_time_total")) == ["a", "b", "c"]
    assert TABLE.select(["key", "self_cpu_time_total"]).columns == ("name", "self_cpu_ns")
    with pytest.raises(TypeError, match=r"needs a list of names: write select\(\['name'\]\)\.$"):
        TABLE.select("name")


def test_rows_are_taken_by_position_value_and_test() -> None:
    assert TABLE[1].flops == 1500
    assert names(TABLE.head(2)) == ["b", "a"]
    assert names(TABLE.head(9)) == ["b", "a", "c"]
    assert names(TABLE.where(share=0.5)) == ["c"]
    assert names(TABLE.where("self_cpu_ns > 1000")) == ["b", "a"]


def test_no_condition_holds_for_an_unknown_cell() -> None:
    assert names(TABLE.where("flops < 2000")) == ["a", "c"]
    assert names(TABLE.where("flops < 2000", share=0.5)) == ["c"]
    assert names(TABLE.where(flops=None)) == ["b"]
    assert names(TABLE.where("name > 'a' and self_cpu_ns > 1000")) == ["b"]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("self_cpu > 1", "names no column 'self_cpu': did you mean self_cpu_ns?"),
        ("cpu_ns >", "is not an expression of SQL"),
        ("flops > 1; drop table t", "is not an expression of SQL"),
        ("name in (select a from read_csv('/etc/passwd'))", "functions that read files"),
        ("name in (select name from events)", "has a query"),
        ("read_csv /* */ ('x') > 1", "comments"),
    ],
)
def test_a_condition_that_cannot_be_used_is_refused_in_one_sentence(condition, reason) -> None:
    with pytest.raises(ConfigError) as raised:
        TABLE.where(condition)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_column_is_given_as_a_list_an_array_or_a_series() -> None:
    table = Table(
        {
            "list": [1, None],
            "array": np.array([2**62 + 1, 3]),
            "series": polars.Series([1.5, None]),
            "flags": [None, True],
            "big": [2**70, 1],
            "mixed": [1, 0.5],
            "streams": [7, "default"],
            "pairs": [(1, 2), None],
        }
    )
    assert [tuple(row) for row in table] == [
        (1, 2**62 + 1, 1.5, None, 2**70, 1.0, "7", [1, 2]),
        (None, 3, None, True, 1, 0.5, "default", None),
    ]
    assert table.where(series=None).column("array") == [3]


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(
        KeyError, match=r"The table has no column 'calls'; it has name, self_cpu_ns, device_bytes"
    ):
        TABLE.sort("calls")


def test_columns_must_be_equally_long() -> None:
    with pytest.raises(ValueError, match=r"must be equally long, not \{'a': 1, 'b': 2\}"):
        Table({"a": [1], "b": [1, 2]})


def test_tables_as_text_and_in_a_notebook(golden: Golden) -> None:
    """With units, a dash for what is unknown, and exact values behind the cells of a notebook."""
    tables = {
        "units": TABLE,
        "a long name": Table({"name": ["a" * 50 + "z" * 50]}),
        "25 rows": Table({"number": list(range(25))}),
        "nothing is known of two columns": Table(
            {"name": ["a"], "device_ns": [None], "calls": [3], "flops": [None]}
        ),
        "no rows": Table({"name": [], "flops": []}),
        "no columns": Table({}),
    }
    shown = [f"---- {name}: str, repr\n{table}\n\n{table!r}" for name, table in tables.items()]
    for name in ("units", "25 rows", "nothing is known of two columns"):
        head, _, rest = tables[name]._repr_html_().partition("</thead>")
        titles = re.findall("<th .*?</th>", head, re.DOTALL)
        shown += [f"---- {name}: HTML", *titles, rest.replace("<tr>", "\n<tr>")]
    golden("tables.txt", "\n".join(shown))


def test_chosen_columns_without_values_and_none_at_all() -> None:
    unknown = Table({"name": ["a"], "flops": [None]}).select(["flops"])
    assert repr(unknown).splitlines()[-1] == "Columns without values: flops."
    assert str(unknown.select([])).strip() == ""


def on_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


def test_the_column_by_which_rows_are_grouped_is_never_left_out(monkeypatch) -> None:
    grouped = Table({"name": ["a"], "input_shapes": ["[[" + "3, " * 50], "calls": [3]})
    on_terminal(50, monkeypatch)
    assert str(grouped).splitlines()[0].split() == ["name", "input", "shapes", "calls"]
    on_terminal(20, monkeypatch)
    assert "input shapes" in str(grouped).splitlines()[0]


def test_on_a_terminal_the_columns_that_fit_are_shown_numbers_first(monkeypatch) -> None:
    wide = Table(
        {
            "name": ["a"],
            "path": ["p" * 30],
            "free_bytes": [None],
            "calls": [3],
            "cpu_ns": [1500],
            "device_ns": [2],
        }
    )
    whole = str(wide)
    on_terminal(44, monkeypatch)
    lines = str(wide).splitlines()
    assert lines[0].split() == ["name", "free", "memory", "calls", "CPU", "device"]
    assert max(map(len, lines[:-1])) <= 44
    assert lines[-1] == "1 column left out: path; .select([…]) shows it."
    on_terminal(5, monkeypatch)
    assert str(wide).splitlines()[0] == "name"
    assert "5 columns left out" in str(wide)
    assert repr(wide).splitlines()[0] == "name"
    on_terminal(200, monkeypatch)
    assert str(wide) == whole
    for stdout in (None, SimpleNamespace(write=print)):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert str(wide) == whole


def test_the_examples_of_the_docstring_run() -> None:
    done = doctest.testmod(table)
    assert done.attempted >= 4
    assert done.failed == 0


class HtmlCells(HTMLParser):
    """The cells of an HTML table as (tooltip, text), a list a row, and every tag that was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[tuple[str | None, str]]] = []
        self.tags: list[str] = []
        self.tooltip: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.tooltip = dict(attributes).get("title")

    def handle_data(self, data: str) -> None:
        if self.tags[-1] in {"td", "th"}:
            self.rows[-1].append((self.tooltip, data))


def test_html_is_escaped() -> None:
    evil = "<script>alert('&')</script>" + 'x" onmouseover="alert(1)' * 5
    shown = HtmlCells(Table({"name": [evil]})._repr_html_())
    assert set(shown.tags) == {"table", "thead", "tbody", "tr", "th", "td"}
    assert shown.rows[1][0][0] == evil


UNKNOWN = Table(
    {"name": ["a", "b"], "device_ns": [None, None], "share": [None, None], "note": [None, None]}
)
KINDS = Table(
    {"flag": [True, None], "ratio": [1, 0.5], "big": [2**62 + 1, None], "shape": [(1, 2), None]}
)


def test_pandas_keeps_integers_and_unknown_cells() -> None:
    frame = TABLE.to_pandas()
    got = [str(dtype) for dtype in frame.dtypes]
    assert got == ["string", "Int64", "Int64", "Float64", "Int64", "Int64"]
    assert frame["device_bytes"].isna().tolist() == [True, False, False]
    assert frame["device_bytes"].sum() == 2045
    got = [str(dtype) for dtype in UNKNOWN.to_pandas().dtypes]
    assert got == ["string", "Int64", "Float64", "object"]
    kinds = KINDS.to_pandas()
    assert [str(dtype) for dtype in kinds.dtypes] == ["boolean", "Float64", "Int64", "object"]
    assert kinds["big"][0] == 2**62 + 1, "no float in between"
    assert kinds["shape"][0] == [1, 2]


def test_the_frame_keeps_integers_and_unknown_cells() -> None:
    frame = TABLE.frame
    whole = polars.Int64
    assert frame.dtypes == [polars.String, whole, whole, polars.Float64, whole, whole]
    assert frame["device_bytes"].to_list() == [None, 2048, -3]
    assert UNKNOWN.frame.dtypes == [polars.String, whole, polars.Float64, polars.Null]
    assert KINDS.frame["big"].to_list() == [2**62 + 1, None]
    assert KINDS.frame["shape"].to_list() == [[1, 2], None]


def test_arrow_keeps_integers_and_unknown_cells() -> None:
    frame = TABLE.to_arrow()
    whole = pyarrow.int64()
    got = frame.schema.types
    assert got == [pyarrow.large_string(), whole, whole, pyarrow.float64(), whole, whole]
    assert frame["device_bytes"].to_pylist() == [None, 2048, -3]
    got = UNKNOWN.to_arrow().schema.types
    assert got == [pyarrow.large_string(), whole, pyarrow.float64(), pyarrow.null()]
    assert KINDS.to_arrow()["big"].to_pylist() == [2**62 + 1, None]
    assert KINDS.to_arrow()["shape"].to_pylist() == [[1, 2], None]


@pytest.mark.parametrize(
    ("method", "package", "extra"),
    [("to_pandas", "pandas", "pandas"), ("to_arrow", "pyarrow", "arrow")],
)
def test_a_missing_package_is_named(monkeypatch, method, package, extra) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage) as raised:
        getattr(TABLE, method)()
    assert (
        str(raised.value)
        == f"Table.{method}() needs the package {package}: pip install 'torch-instrument[{extra}]'."
    )


def test_the_operators_of_a_real_trace_are_the_same_in_every_library() -> None:
    operators = load("resnet50 on a V100").operators
    rows = [tuple(row) for row in operators]
    assert operators.frame.rows() == rows
    assert [tuple(row.values()) for row in operators.to_arrow().to_pylist()] == rows
    frame = operators.to_pandas().astype(object)
    assert list(frame.where(frame.notna(), None).itertuples(index=False, name=None)) == rows


def test_a_table_can_be_sent_to_another_process() -> None:
    table = Table({"name": ["a", "b"], "begin_ns": [5, 7]}, begin_ns=5)
    again = pickle.loads(pickle.dumps(table))
    assert list(again) == list(table)
    assert str(again.sort("name")) == str(table)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_printed_table_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    measures = [f"measure_{number}" for number in range(40)]
    unknown = {f"unknown_{number}": [None] for number in range(40)}
    wide = Table({"name": ["a" * 300]} | {name: [10**9] for name in measures} | unknown)
    for text in (str(wide), repr(wide)):
        assert max(map(len, text.splitlines())) <= max(width, PROSE_WIDTH)
        assert "columns left out: " in text
        assert all(name.replace("_", " ") in " ".join(text.split()) for name in measures)
    chosen = str(wide.select(["name", *measures]).head(1))
    assert max(map(len, chosen.splitlines())) <= width
    assert "left out" not in chosen
    assert chosen.count("1000000000") == len(measures)


def test_csv_holds_exact_numbers_and_no_formula() -> None:
    names = ["=1+1", "+x", "-x", "@x", "a,b", 'say "x"', "two\nlines", "中文", None]
    names += ["a;=1", " =1", "＝1"]
    table = Table({"name": names, "total_ns": [*range(8), *[None] * 4], "share": [1 / 3] * 12})
    text = table.to_csv()
    header, *rows = csv.reader(StringIO(text))
    assert header == ["name", "total_ns", "share"]
    assert [row[0] for row in rows] == [
        "'=1+1", "'+x", "'-x", "'@x", "a,b", 'say "x"', "two\\nlines", "中文", "",
        "a;'=1", "' =1", "'＝1",
    ]  # fmt: skip
    assert [row[1] for row in rows] == [*map(str, range(8)), *[""] * 4]
    assert {float(row[2]) for row in rows} == {1 / 3}
    assert Table({"total_ns": [-5]}).to_csv() == "total_ns\n-5\n", "a number is no formula"


def test_a_number_of_more_than_64_bits_is_unknown() -> None:
    assert Table({"bytes": [2**64 - 5, 7, None]}).column("bytes") == [None, 7, None]
