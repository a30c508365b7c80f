"""The verdict: the title of the first finding that is worth a headline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from instrument.findings.diagnose import Diagnosis
from instrument.findings.finding import Finding
from instrument.report.verdict import verdict


def _finding(title: str, saving_ns: int | None) -> Finding:
    saving: Any = None
    if saving_ns is not None:
        saving = SimpleNamespace(saving_ns=saving_ns, baseline_ns=1_000)
    return Finding(title.replace(" ", "-"), title, "change", "verify", saving)


def _diagnosis(*findings: Finding, step_ns: int | None = 1_000) -> Diagnosis:
    return Diagnosis(("capture",), findings, (), (), step_ns=step_ns)


def test_the_verdict_is_the_finding_that_saves_most() -> None:
    assert verdict(_diagnosis(_finding("A waits", 300), _finding("B waits", 200))) == "A waits"


def test_a_saving_of_three_percent_counts_and_a_smaller_one_does_not() -> None:
    assert verdict(_diagnosis(_finding("A waits", 30))) == "A waits"
    small = verdict(_diagnosis(_finding("A waits", 29)))
    assert small == "Nothing found that saves more than 3 % of a step"


def test_a_finding_of_unknown_saving_comes_before_a_small_one() -> None:
    found = _diagnosis(_finding("A waits", 10), _finding("Memory grows", None))
    assert verdict(found) == "Memory grows"


def test_without_a_simulated_step_the_verdict_promises_nothing() -> None:
    assert "not known" in verdict(_diagnosis(step_ns=None))
