"""What `make mutants` and `make fuzz` know of the package is true; they themselves run at night."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from random import Random

import pytest
from fuzz import commands
from mutants_known import PLANTED, TESTS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


@pytest.mark.parametrize("is_list", [False, True])
def test_the_fuzzer_takes_the_middle_of_both_forms_of_a_trace(is_list: bool) -> None:
    events = [{"ph": "X", "name": f"event {k}", "ts": k} for k in range(300)]
    trace = json.dumps(events if is_list else {"traceEvents": events}).encode()
    kept = json.loads(commands.trimmed(trace, most=20))
    names = [event["name"] for event in (kept if is_list else kept["traceEvents"])]
    assert names == [f"event {k}" for k in (*range(10), *range(140, 160))]


def test_each_package_that_the_tests_install_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (Requirement(line) for line in lines if not line.startswith("#"))
    pinned = {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in pins
        if each.marker is None or each.marker.evaluate()
    }
    todo, installed = [("torch-instrument", extra) for extra in ("dev", "docs")], {}
    for package, extra in todo:  # which grows
        try:
            found = distribution(package)
        except PackageNotFoundError:  # Zensical cannot be installed everywhere
            continue
        installed[canonicalize_name(package)] = found.version.partition("+")[0]
        for needed in map(Requirement, found.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                further = ((needed.name, each) for each in (needed.extras or {""}))
                todo += [pair for pair in further if pair not in todo]
    if any(installed.get(name, version) != version for name, version in pinned.items()):
        pytest.skip("this environment has other versions than constraints.txt")
    assert len(installed) > 100
    assert installed.keys() - pinned.keys() == {"torch-instrument"}
