"""The pytest plugin, run by pytest on small test files: in this process where nothing is asked of a bare one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument import Session
from instrument.base.errors import ConfigError
from instrument.read.compare.counters import counters
from instrument.read.compare.limits import budget

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True, scope="module")
def _everything_is_loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """pytester unloads what a run inside this process loads, and torch cannot be loaded twice."""
    where = tmp_path_factory.mktemp("warm")
    with Session(
        active=None, output_dir=where, export="inline", with_stack=True, with_flops=True
    ) as session:
        torch.ones(2, requires_grad=True).sum().backward()
    counters(session.captures[0])


TRAINING = """
import pytest, torch
from torch import nn
from instrument import profiled

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
BATCHES = [torch.ones(8, 16)] * 4
extra = []

def step(batch):
    with profiled("forward"):
        out = model(batch)
    with profiled("loss"):
        loss = out.square().mean()
        #FAULT#
    loss.backward()
"""
TEST = """
@pytest.mark.perf_budget(#BUDGET#)
def test_a_step(profile_session):
    with profile_session as session:
        for batch in session.steps(BATCHES):
            step(batch)
"""


def write(pytester: pytest.Pytester, budget: str = "", fault: str = "pass") -> None:
    source = (TRAINING + TEST).replace("#BUDGET#", budget).replace("#FAULT#", fault)
    pytester.makepyfile(test_train=source)


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "instrument.integrations.pytest_plugin", *options)


def test_a_budget_that_is_kept_passes(pytester: pytest.Pytester) -> None:
    budget = 'operators=100, syncs=0, peak="1MB", collectives={"all_reduce": 0}'
    write(pytester, budget)
    result = run(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*counters of a step*")
    assert not (pytester.path / "perf").exists()


def test_failure_without_a_file_is_not_hidden(pytester: pytest.Pytester) -> None:
    write(pytester, "syncs=0", "loss.item()")
    result = run(pytester, "--perf-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["fail: syncs>0 (after 1)", "    aten::item: 1 in each step", "*in step"]
    )
    result.stdout.no_fnmatch_line("*, before *")


def test_a_marker_without_limits_takes_those_of_the_file(pytester: pytest.Pytester) -> None:
    write(pytester)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["perf_budget has no limits, and the file *does not exist: run *"])
    run(pytester, "--perf-update").assert_outcomes(passed=1)
    stored = pytester.path / "perf" / "test_train.test_a_step.json"
    assert json.loads(stored.read_text())["counters"]["syncs"] == 0
    write(pytester, fault="loss.item()")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_a_step _*",
            "fail: syncs>0 (before 0, after 1)",
            "  in loss: 1, before 0",
            "    aten::item: 1 in each step, before 0",
            "      *test_train.py:* in step",
            "      *test_train.py:* in test_a_step",
        ]
    )
    run(pytester, "--perf-update").assert_outcomes(passed=1)
    assert json.loads(stored.read_text())["counters"]["syncs"] == 1


def test_a_limit_can_be_relative_to_the_file(pytester: pytest.Pytester) -> None:
    write(pytester, 'operators="+5%", syncs="+0"')
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["undecided: operators>+5%: there is no baseline: *"])
    run(pytester, "--perf-update").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)
    write(pytester, 'operators="+5%", syncs="+0"', "loss = loss.abs().abs()")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["fail: operators>+5% (before *, after *)", "*aten::abs: 2 in *"])


def test_a_limit_can_be_a_query(pytester: pytest.Pytester) -> None:
    query = "(select count(*) from events where counted and name = 'aten::linear')"
    write(pytester, f'"{query}>4", "{query}>3"')
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"fail: {query}>3", "*(after 4)"])
    with pytest.raises(ConfigError, match="limits 'step>5%', which is a time"):
        budget({}, ["step>5%"])


def test_a_counter_that_varies_is_refused_by_name(pytester: pytest.Pytester) -> None:
    write(pytester, "operators=1000", "[loss.abs() for _ in extra]; extra.append(0)")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["undecided: operators>1000: operators varies between the steps, from * to*"]
    )


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"syncs": -1}, "perf_budget limits syncs to -1: give a whole number of 0 or more"),
        ({"syncs": True}, "perf_budget limits syncs to True: give a whole number"),
        ({"syncs": 0.5}, "perf_budget limits syncs to 0.5: give a whole number"),
        ({"peak": "2 cows"}, "'peak>2 cows' has the limit '2 cows': give a number with one of the"),
        ({"step": 5}, "'step', which is a time and varies between runs of the same code"),
        ({"device": 5}, "'device', which is a time and varies"),
        ({"collectives": {"allreduce": 1}}, "did you mean 'collectives.all_reduce'?"),
        ({"collectives": 0.5}, "perf_budget limits collectives to 0.5: give a whole number"),
    ],
)
def test_a_mistake_in_a_budget_is_one_sentence(limits: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*{re.escape(sentence)}[^\n]*$"):
        budget(limits)


@pytest.mark.parametrize(
    ("budget", "fixture", "error"),
    [
        ("sync=0", "profile_session", "'sync>0' names no counter; did you mean 'syncs'?"),
        ("412", "profile_session", "*has the argument 412 without a name: name the counter*"),
        ("syncs=0", "", "perf_budget needs the fixture profile_session: add it*"),
    ],
)
def test_a_mistake_in_a_marker_is_told_at_collection(
    pytester: pytest.Pytester, budget: str, fixture: str, error: str
) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.perf_budget({budget})\ndef test_a_step({fixture}): pass"
    )
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *::test_a_step: *{error}"])


def test_a_session_that_was_never_started_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.perf_budget(syncs=0)\ndef test_it(profile_session): pass"
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["profile_session has recorded nothing: start it*"])


def test_a_test_that_fails_by_itself_is_not_judged(pytester: pytest.Pytester, log) -> None:
    log.expect("exception AssertionError")
    write(pytester, "syncs=0", "loss.item(); extra.append(0); assert len(extra) < 4")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("fail: *")


def test_markers_of_a_test_override_those_of_its_class(pytester: pytest.Pytester) -> None:
    more = """
@pytest.mark.perf_budget(syncs=0, operators=1)
class TestSteps:
    @pytest.mark.perf_budget(operators=1000)
    @pytest.mark.parametrize("size", ["a/b", "a:b"])
    def test_many(self, profile_session, size):
        with profile_session as session:
            for batch in session.steps(BATCHES):
                step(batch)
"""
    pytester.makepyfile(test_train=(TRAINING + more).replace("#FAULT#", "pass"))
    run(pytester, "--perf-update").assert_outcomes(passed=2)
    names = [path.name for path in (pytester.path / "perf").iterdir()]
    assert sum(name.startswith("test_train.TestSteps.test_many-a-b-") for name in names) == 2


def test_the_report_prints_each_counter_and_its_limit(pytester: pytest.Pytester) -> None:
    write(pytester, "syncs=0, launches=5")
    result = run(pytester, "--perf-report")
    result.stdout.fnmatch_lines(
        [
            "*counters of a step*",
            "test_train.py::test_a_step",
            "  operators *",
            "  launches *not recorded, limit 5",
            "  syncs *0, limit 0",
        ]
    )


def test_a_model_gets_ranges(pytester: pytest.Pytester) -> None:
    write(pytester, "operators=1000")
    source = (pytester.path / "test_train.py").read_text()
    source = source.replace(
        "with profile_session as session:", "session = profile_session.start(model)\n    if True:"
    )
    (pytester.path / "test_train.py").write_text(source)
    run(pytester, "--perf-update").assert_outcomes(passed=1)
    stored = json.loads((pytester.path / "perf" / "test_train.test_a_step.json").read_text())
    assert stored["ranges"]["forward/Sequential/0"]["flops"] > 0


def test_plugin_loads_lazily(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are checked at collection, which loads this package but not torch."""
    # others may load torch, and take long
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        test_a="""
        import sys

        loaded = {name for name in sys.modules if name.split(".")[0] == "instrument"}
        assert loaded == {
            "instrument", "instrument.base", "instrument.base.lazy_names", "instrument.integrations",
            "instrument.integrations.pytest_plugin",
        }
        others = {"torch", "numpy", "pydantic", "loguru", "msgspec", "jinja2"}
        assert others.isdisjoint(sys.modules)
        """,
        test_b="""
        import pytest, sys

        def test_first():
            assert "instrument.read.compare.limits" in sys.modules
            assert "torch" not in sys.modules

        @pytest.mark.perf_budget(syncs=0)
        def test_a_step(profile_session): pass
        """,
    )
    options = ("-p", "instrument.integrations.pytest_plugin", "--perf-report", "-k", "first")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=1, deselected=1)


def test_the_entry_point_is_the_plugin() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    entry = '[project.entry-points.pytest11]\n"instrument.integrations.pytest_plugin" = "instrument.integrations.pytest_plugin"'
    assert entry in project
