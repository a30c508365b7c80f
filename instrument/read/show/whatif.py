"""A scenario as text and as JSON: the step, the savings, the critical path.

A scenario is the simulation of a window with some edits or without edits. Its causal profile says
how much shorter a step is if one range, operator or kernel is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import polars as pl

from instrument.base.errors import ConfigError
from instrument.base.units import counted, durations_like, percent
from instrument.read.facts.device_work import KINDS as WORK_KINDS
from instrument.read.facts.kernel_names import kernel_label
from instrument.read.views.json_text import json_text
from instrument.read.views.section import Part, Section, shown_of
from instrument.read.views.table import ALL, Table, known_columns

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

#: What the keys of the JSON mean.
JSON_KEYS = {
    "name": "the name of the capture",
    "step_ns": "how long a step takes with the edits: `baseline_ns` minus `saving_ns`",
    "baseline_ns": "the mean step without edits",
    "saving_ns": "the share of their time that the steps that count save together, "
    "multiplied by `baseline_ns`; negative if the edits make the steps longer",
    "low_ns": "the lower bound of the saving",
    "high_ns": "the upper bound of the saving",
    "steps": "the duration of each step with the edits",
    "edits": "a text for each edit",
    "notes": "a sentence for each thing that makes the result uncertain",
    "profile": "the rows of the causal profile, with the columns of `capture.whatif.profile()`",
    "critical_path": "the rows of the critical path, with the columns of "
    "`capture.whatif.critical_path`",
}

# The causal profile tries at least this many ranges, as many operators, and as many kernels.
_TRIED = 12
# Rows of the critical path with a smaller share are shown as one row.
_LEAST_SHARE = 0.005
# A saving below this fraction of the step is shown as "no shorter", because steps vary by more.
_LEAST_WON = 0.001
# The order in which columns are left out if the table is too wide.
_MISSABLE = ("saving_10_ns", "saving_25_ns", "saving_100_ns", "kind", "device_ns", "cpu_ns")
# The option that shows all columns.
_ALL_COLUMNS = "--json"
# For rows of the critical path without a name: the text that is shown, by kind of row.
_NAMELESS = {
    "CPU": "(in no range)",
    "launch": "(from the call until the device begins)",
    "stream": "(between two kernels)",
    "other stream": "(until the work of another stream ends)",
    "wait": "(until a waiting call returns)",
    "full queue": "(until the launch queue has room)",
    "hand-over": "(until another thread goes on)",
    "waiting for data": "(until a worker delivers a batch)",
    "unexplained": "(the device begins late, without a known cause)",
}


def parts(name: str, scenario: Scenario, *, rows: int = 15, only_path: bool = False) -> list[Part]:
    """Return a scenario as text and tables: the time of the step, and what the edits save.

    Args:
        name: the name of the capture.
        scenario: the capture with or without edits.
        rows: the maximum number of rows in each table.
        only_path: show the critical path without the causal profile; otherwise the causal profile
            is shown, and with edits also the critical path.
    """
    text = durations_like(scenario.baseline_ns)
    found: list[Part] = [_heading(name, scenario, text)]
    if scenario.edits:
        found += [_edits(scenario), _saving(scenario, text)]
    if scenario.edits or only_path:
        found.append(_critical_path(scenario, rows, text))
    if not only_path:
        found += [_profile(scenario, rows, text), _all_device_work(scenario, text)]
    found.append([f"Note: {note}" for note in scenario.notes])
    return [part for part in found if part]


def as_json(name: str, scenario: Scenario, *, rows: int = ALL) -> str:
    """Return a scenario as JSON, with times in nanoseconds; docs/json.md describes the keys."""
    content = {
        "name": name,
        "step_ns": scenario.step_ns,
        "baseline_ns": scenario.baseline_ns,
        "saving_ns": scenario.saving_ns,
        "low_ns": scenario.low_ns,
        "high_ns": scenario.high_ns,
        "steps": scenario.steps,
        "edits": scenario.edits,
        "notes": scenario.notes,
        "profile": _profile_of(scenario, rows).head(rows).to_dicts(),
        "critical_path": scenario.critical_path.head(rows).to_dicts(),
    }
    return json_text(content)


def as_csv(scenario: Scenario, *, rows: int = ALL, only_path: bool = False) -> str:
    """Return the causal profile, or the critical path, as CSV; see `Table.to_csv`."""
    found = scenario.critical_path if only_path else _profile_of(scenario, rows)
    return found.head(rows).to_csv()


def _profile_of(scenario: Scenario, rows: int) -> Table:
    return scenario.profile(_TRIED if rows == ALL else max(rows, _TRIED))


def _heading(name: str, scenario: Scenario, text: Callable[[float], str]) -> str:
    heading = f"{name}: {_unit(scenario)}"
    if not scenario.edits:
        return f"{heading} takes {text(scenario.step_ns)}"
    after, before = text(scenario.step_ns), text(scenario.baseline_ns)
    change = ", no change" if after == before else f" instead of {before}"
    return f"{heading} would take {after}{change}"


def _unit(scenario: Scenario) -> str:
    return "a step" if scenario.model.has_steps else "the recorded window"


def _edits(scenario: Scenario) -> list[str]:
    width = len(str(len(scenario.edits)))
    edits = enumerate(scenario.edits, 1)
    return ["Edits:", *(f"{number:>{width}}. {edit}" for number, edit in edits)]


def _saving(scenario: Scenario, text: Callable[[float], str]) -> str:
    low, high = text(scenario.low_ns), text(scenario.high_ns)
    saving = scenario.saving_ns if text(scenario.saving_ns) != text(0.0) else 0.0
    share = f" ({percent(saving / scenario.baseline_ns)})" if scenario.baseline_ns else ""
    bounds = "" if low == high else f", between {low} and {high}"
    longer = f": {_unit(scenario)} takes longer" if saving < 0 else ""
    return f"Saving: {text(saving)}{share}{bounds}{longer}"


def _profile(scenario: Scenario, rows: int, text: Callable[[float], str]) -> str | Section:
    table = _profile_of(scenario, rows)
    after = " after the edits" if scenario.edits else ""
    if not len(table):
        return f"Causal profile{after}: the capture has no ranges, operators or kernels."
    shown = table.head(rows)
    shown = Table(shown.frame.rename({"saving_50_share": "share"}))
    columns = shown.columns
    return Section(
        shown,
        known_columns(shown),
        f"Causal profile{after}{shown_of(len(shown), len(table))}; 50 % less: how much shorter "
        f"{_unit(scenario)} is if the row takes 50 % less time",
        missable=_MISSABLE,
        key="saving_50_ns",
        texts={name: text for name in columns if name.endswith("_ns")},
        all_columns=_ALL_COLUMNS,
    )


def _all_device_work(scenario: Scenario, text: Callable[[float], str]) -> str:
    """Return what a step would save if all device work took half the time; "" without such work."""
    try:
        halved = scenario.scale(kernel="*", by=0.5)
    except ConfigError:
        return ""
    won, what = halved.saving_ns - scenario.saving_ns, _unit(scenario)
    share = won / scenario.step_ns if scenario.step_ns else 0.0
    shorter = f"{text(won)} ({percent(share)}) shorter" if share >= _LEAST_WON else "no shorter"
    return f"If all device work took half the time, {what} would be {shorter}."


def _critical_path(scenario: Scenario, rows: int, text: Callable[[float], str]) -> Section:
    """The critical path with the labels of kernels; small rows are summed in one."""
    of_path = scenario.critical_path
    names = [
        _short(kind, name) for kind, name in zip(of_path.column("kind"), of_path.column("name"))
    ]
    sums = pl.col("step_ns", "share").sum()
    path = of_path.frame.with_columns(pl.Series("name", names, pl.String))
    path = path.group_by("kind", "name", maintain_order=True).agg(sums)
    path = path.sort("step_ns", descending=True, maintain_order=True)
    kinds = path.group_by("kind", maintain_order=True).agg(sums)
    kinds = kinds.sort("share", descending=True, maintain_order=True)
    shares = ", ".join(
        f"{kind} {percent(share)}" for kind, _, share in kinds.rows() if share >= _LEAST_SHARE
    )
    large = len(path) if rows == ALL else min(rows, int((path["share"] >= _LEAST_SHARE).sum()))
    shown, others = path.head(large), path.slice(large)
    if len(others):
        name = f"({counted(len(others), 'smaller row')})"
        row = others.select(pl.lit("others").alias("kind"), pl.lit(name).alias("name"), sums)
        shown = pl.concat([shown, row])
    table = Table(shown)
    return Section(
        table,
        known_columns(table),
        f"Critical path; what decides how long {_unit(scenario)} takes: {shares}",
        key="step_ns",
        texts={"step_ns": text},
        all_columns=_ALL_COLUMNS,
    )


def _short(kind: str, name: str | None) -> str | None:
    """Return the name of a row of the critical path, shortened as in the causal profile."""
    if name is None:
        return _NAMELESS.get(kind)
    return kernel_label(name) if kind in WORK_KINDS else name
