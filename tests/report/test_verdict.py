"""The verdict: the title of the first finding that is worth a headline."""

from __future__ import annotations

import real_traces

from instrument.findings.diagnosis import Diagnosis, as_markdown, as_text
from instrument.findings.finding import Finding, Saving
from instrument.report.verdict import verdict, verdict_of


def _finding(title: str, saving_ns: int | None, share: float | None = None) -> Finding:
    saving = None
    if saving_ns is not None:
        saving = Saving(1_000, saving_ns, saving_ns, saving_ns)
    return Finding(title.replace(" ", "-"), title, "change", "verify", saving, share=share)


def _diagnosis(
    *findings: Finding, step_ns: int | None = 1_000, unexplained: float = 0.0
) -> Diagnosis:
    return Diagnosis(("capture",), findings, (), (), step_ns=step_ns, unexplained=unexplained)


def test_the_verdict_is_the_finding_that_saves_most() -> None:
    assert verdict(_diagnosis(_finding("A waits", 300), _finding("B waits", 200))) == "A waits"


def test_a_saving_of_three_percent_counts_and_a_smaller_one_does_not() -> None:
    assert verdict(_diagnosis(_finding("A waits", 30))) == "A waits"
    small = verdict(_diagnosis(_finding("A waits", 29)))
    assert small == "Nothing found that saves more than 3 % of a step"


def test_a_finding_of_unknown_saving_comes_before_a_small_one() -> None:
    found = _diagnosis(_finding("A waits", 10), _finding("Memory grows", None))
    assert verdict(found) == "Memory grows"


def test_a_larger_share_of_unknown_saving_is_named_too() -> None:
    small, large = _finding("Data waits", None, 0.2), _finding("The device is idle", None, 0.5)
    known = _finding("A waits", 300)
    assert verdict(_diagnosis(large, known, small)) == "The device is idle; also, A waits"
    assert verdict(_diagnosis(known, small, _finding("Memory grows", None))) == "A waits"
    assert verdict(_diagnosis(large, small)) == "The device is idle"


def test_without_a_simulated_step_the_verdict_promises_nothing() -> None:
    assert "not known" in verdict(_diagnosis(step_ns=None))


def test_the_verdict_names_the_time_that_is_not_explained() -> None:
    late = _diagnosis(unexplained=0.487)
    assert verdict(late).startswith("For 49 % of the time, device work began late for an unknown")
    assert verdict(late).endswith("nothing was found that saves more than 3 % of a step")
    assert "record several whole steps" in verdict(late)
    for text in (as_text(late), as_markdown(late)):
        assert f"{verdict(late)}." in text.replace("\n", " ")
    assert verdict(_diagnosis(_finding("A waits", 30), unexplained=0.487)) == "A waits"
    assert verdict(_diagnosis(unexplained=0.05)).startswith("Nothing found that saves")
    assert verdict(_diagnosis(unexplained=0.051)).startswith("For 5.1 % of the time")


@real_traces.needs_traces
def test_a_trace_of_hip_graphs_is_half_unexplained() -> None:
    assert verdict_of(real_traces.load("mi300x_vllm_graph")).startswith(
        "For 49 % of the time, device work began late"
    )
