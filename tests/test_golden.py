"""A test that compares with a golden file fails if they differ or the file is missing; no file is left unused."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden import FOLDER, Golden, rows_as_lines

from instrument.read.views.table import Table


def _golden(folder: Path, *, update: bool = False) -> Golden:
    return Golden("tests/test_x.py::test_y", update=update, folder=folder)


def test_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"pytest --update-golden tests/test_x\.py::test_y"
    ):
        _golden(tmp_path)("lines.txt", "one\ntwo\n")
    assert not list(tmp_path.iterdir())


def test_a_difference_is_shown_by_line(tmp_path: Path) -> None:
    _golden(tmp_path, update=True)("lines.txt", "one\ntwo")
    _golden(tmp_path)("lines.txt", "one\ntwo\n")
    with pytest.raises(pytest.fail.Exception, match=r"\n-two\n\+three\n"):
        _golden(tmp_path)("lines.txt", "one\nthree")


def test_values_are_compared_as_json(tmp_path: Path) -> None:
    _golden(tmp_path, update=True)("values.json", {"µs": [1, None]})
    assert (tmp_path / "values.json").read_text(encoding="utf-8") == (
        '{\n "µs": [\n  1,\n  null\n ]\n}\n'
    )
    with pytest.raises(pytest.fail.Exception):
        _golden(tmp_path)("values.json", {"µs": [1, 2]})


def test_every_file_is_named_in_a_test() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in FOLDER.parent.rglob("test_*.py"))
    names = [str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.*")]
    unused = [name for name in names if f'"{name}"' not in sources]
    assert not unused, "delete these files, or write their full names into the tests"


def test_a_column_without_values_is_not_one_that_does_not_exist() -> None:
    tables = {"a": Table({"k": [1, 2], "b": [None, None]}), "none": Table({"k": []})}
    lines = ['a: {"k": 1}', 'a: {"k": 2}', "a, without values: b", "none, without values: k"]
    assert rows_as_lines(tables).splitlines() == lines
