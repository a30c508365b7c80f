"""What `make mutants` and `make fuzz` know of the package is true; they themselves run at night."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz import commands
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


def test_the_fuzzer_has_a_value_for_each_argument_of_each_command() -> None:
    (parsers,) = commands.command._parser()._subparsers._group_actions
    assert parsers.choices.keys() > commands.SKIPPED
    for name in parsers.choices.keys() - commands.SKIPPED:
        for seed in range(5):  # of arguments that exclude each other, one is drawn
            assert [*commands.words(parsers.choices[name], ["PATH"], 1, 1, Random(seed))], name
