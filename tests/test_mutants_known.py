"""The lists in `mutants_known.py` name modules, lines and tests that exist; `make mutants` relies on them."""

from __future__ import annotations

from pathlib import Path

from mutants_known import PLANTED, TESTS

ROOT = Path(__file__).parent.parent


def test_each_module_and_test_exists() -> None:
    tests = {test for names in TESTS.values() for test in names} | {each.test for each in PLANTED}
    assert [module for module in TESTS if not (ROOT / module).is_file()] == []
    for test in tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_each_planted_edit_has_its_line() -> None:
    found = {each.name: (ROOT / each.module).read_text().count(each.was) for each in PLANTED}
    assert found == dict.fromkeys(found, 1)
