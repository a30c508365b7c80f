"""Long outputs are compared with files in tests/golden; `pytest --update-golden FILE` writes the files of its tests anew."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from instrument.read.views.table import Table

FOLDER = Path(__file__).parent / "golden"


class Golden:
    """Compares what a test got with a file, or writes the file where `pytest` has `--update-golden`.

    A file's name is written in full in the test, so that `test_golden.py` finds files that no test uses.
    """

    def __init__(self, test: str, *, update: bool, folder: Path = FOLDER) -> None:
        self.command = f"pytest --update-golden {test}"
        self.update = update
        self.folder = folder

    def __call__(self, name: str, actual: Any) -> None:
        """Compare a text as it is, and anything else as JSON, with the file of this name."""
        file = self.folder / name
        text = actual if isinstance(actual, str) else as_json(actual)
        if not text.endswith("\n"):
            text += "\n"
        if self.update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif not file.is_file():
            pytest.fail(f"There is no {file}. `{self.command}` writes it.", pytrace=False)
        elif (expected := file.read_text(encoding="utf-8")) != text:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), name, "this run", lineterm=""
            )
            difference = "\n".join(lines)
            pytest.fail(f"{difference}\nIf this is intended: `{self.command}`.", pytrace=False)


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


def rows_as_lines(tables: Mapping[str, Table]) -> str:
    """A line for each row of each table, without its unknown cells, and one for the columns without values."""
    lines = []
    for name, table in tables.items():
        for row in table:
            known = {key: cell for key, cell in row._asdict().items() if cell is not None}
            lines.append(f"{name}: {json.dumps(known, ensure_ascii=False)}")
        unknown = [k for k in table.columns if all(cell is None for cell in table.column(k))]
        if unknown:
            lines.append(f"{name}, without values: {' '.join(unknown)}")
    return "\n".join(lines)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Call it with the name of a file in tests/golden and what the file has to hold."""
    return Golden(request.node.nodeid, update=request.config.getoption("--update-golden"))
