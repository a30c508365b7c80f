"""Which environments `make compat` runs the suite in, and what the documentation says of them."""

from __future__ import annotations

import re
from pathlib import Path

import compat
import pytest


def test_the_documentation_tells_of_declared_environments_alone_in_which_all_passed() -> None:
    text = (compat.ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| ([\d.]+)(?:\+\w+)? \| \d+ passed", text, re.MULTILINE)
    assert rows
    assert (
        len(rows)
        == len(set(rows))
        == len(re.findall(r"^\| 3\.\d+\.\d+ \|.*passed", text, re.MULTILINE))
    )
    assert set(rows) <= set(compat.PAIRS)
    assert "failed" not in "".join(re.findall(r"^\| 3\.\d+\.\d+ \|.*", text, re.MULTILINE))


def test_the_oldest_and_the_newest_torch_are_those_declared() -> None:
    versions = (compat.OLDEST, compat.BETWEEN, compat.PINNED, compat.NEWEST)
    assert {torch for _, torch in compat.PAIRS} == set(versions)
    parts = [tuple(map(int, torch.split("."))) for torch in versions]
    assert parts == sorted(set(parts))
    assert f"torch {compat.OLDEST.removesuffix('.0')} or newer" in (
        compat.ROOT / "README.md"
    ).read_text("utf-8")


def test_a_pair_runs_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """uv's messages, of which some stand beside what the commands print, do not matter."""
    ran = []

    def run(*command: str) -> str:
        ran.append(command)
        if "pytest" in command:
            return "1 failed, 12 passed, 3 skipped in 70.1s (0:01:10)\n"
        return f"Installed 105 packages in 2s\n{command[5]}.1 {command[7].removeprefix('torch==')}+cpu\n"

    monkeypatch.setattr(compat, "run", run)
    row = ("3.12.1", "2.8.0+cpu", "1 failed, 12 passed, 3 skipped")
    assert compat.tested("3.12", "2.8.0") == row
    assert all(command[:2] == ("uv", "run") for command in ran)

    monkeypatch.setattr(compat, "run", lambda *_: "error: No interpreter found for Python 2.0\n")
    assert compat.tested("2.0", "1.0") == ("2.0", "1.0", "no such environment here")


def test_what_passes_replaces_its_row_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = {
        ("3.12", compat.PINNED): ("3.12.9", f"{compat.PINNED}+cpu", "5 passed, 1 skipped"),
        ("3.11", compat.OLDEST): ("3.11.7", compat.OLDEST, "1 failed, 4 passed"),
    }
    monkeypatch.setattr(
        compat, "tested", lambda *pair: rows.get(pair, (*pair, "no such environment here"))
    )
    old = f"| 3.12.1 | {compat.PINNED} | 4 passed | 01234567 |\n"
    kept = f"| 3.11.1 | {compat.OLDEST} | 4 passed | 01234567 |\n"
    page = tmp_path / "page.md"
    page.write_text(f"Results:\n\n{compat.HEAD}{kept}{old}\nMore.\n")
    monkeypatch.setattr(compat, "PAGE", page)
    monkeypatch.setattr(compat, "commit", lambda: "89abcdef")

    assert compat.main([f"3.12/{compat.PINNED}"]) == 0
    new = f"| 3.12.9 | {compat.PINNED}+cpu | 5 passed, 1 skipped | 89abcdef |\n"
    assert new in capsys.readouterr().out
    assert page.read_text() == f"Results:\n\n{compat.HEAD}{new}{kept}\nMore.\n"
    for chosen in (f"3.11/{compat.OLDEST}", f"3.13/{compat.PINNED}", "3.9/1.0"):
        assert compat.main([chosen]) == 1
    assert page.read_text() == f"Results:\n\n{compat.HEAD}{new}{kept}\nMore.\n"
