"""An A/B comparison as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from instrument.base.units import counted, durations_like, percent, percent_change
from instrument.read.compare.ab import Comparison, CounterValues, Quantity
from instrument.read.compare.ab_runs import LABELS, Block, Program
from instrument.read.compare.limits import amount_of
from instrument.read.views.json_text import json_text
from instrument.read.views.section import Part, Section
from instrument.read.views.table import Table, known_columns

#: What the keys of the JSON mean.
JSON_KEYS = {
    "a": "the name of program A",
    "b": "the name of program B",
    "verdict": "the verdict on the step: `slower`, `faster`, `same` or `undecided`",
    "blocks_missing": "about how many more blocks the verdict needs; `null` if there is a verdict",
    "folder": "the folder for `--continue`; `null` if there is a verdict",
    "confidence": "the share of comparisons in which all intervals hold the true change",
    "margin": "a change of at most this share counts as the same",
    "step": "the step: `path`, `a_ns`, `b_ns`, `share`, `low`, `high`, `p_value`, `verdict`",
    "ranges": "the same for each compared range",
    "only_in_a": "the ranges that only A has, with their median times",
    "only_in_b": "the ranges that only B has, with their median times",
    "counters": "for each counter, the lowest and the highest value of a step in `a` and in `b`, "
    "and whether it `differs`",
    "blocks": "the four runs of each block: `label`, `steps`, `step_ns`, `ranges_ns`, and "
    "`cpu_wait`, the share of a window in which the thread of the steps had no CPU; `null` if it "
    "is not known",
}


def progress(number: int, blocks: int, block: Block) -> str:
    """Return a line about a finished block: the time of a step, and how long it had no CPU."""
    text = durations_like(block.step_ns("A"))
    longest = max(run.cpu_wait or 0 for run in block.runs)
    load = f"; {percent(longest)} of a run without a CPU" if longest else ""
    steps = ", ".join(f"{label} {text(block.step_ns(label))}" for label in LABELS)
    return f"block {number} of {blocks}: {steps}{load}"


def parts(a: Program, b: Program, comparison: Comparison, folder: Path) -> list[Part]:
    """Return a comparison as text and tables: verdict, ranges, counters, waits for a CPU.

    `folder` is the folder of the comparison.
    """
    found: list[Part] = [
        [f"{each.label}: {each.name}" for each in (a, b)],
        _verdict(comparison, folder),
        _ranges(comparison),
        _one_sided(comparison),
        _counters(comparison.counters),
        _waits(comparison),
    ]
    return [part for part in found if part]


def as_json(a: Program, b: Program, comparison: Comparison, folder: Path) -> str:
    """Return a comparison as JSON, with times in nanoseconds; docs/json.md describes the keys."""
    step, *ranges = (
        {"path": each.path, "a_ns": each.a_ns, "b_ns": each.b_ns}
        | asdict(each.change)
        | {"verdict": each.verdict}
        for each in comparison.quantities
    )
    content = {
        "a": a.name,
        "b": b.name,
        "verdict": comparison.step.verdict,
        "blocks_missing": comparison.blocks_missing,
        "folder": None if comparison.blocks_missing is None else str(folder),
        "confidence": 1 - comparison.level,
        "margin": comparison.margin,
        "step": step,
        "ranges": ranges,
        "only_in_a": comparison.only_in("A"),
        "only_in_b": comparison.only_in("B"),
        "counters": [{**each._asdict(), "differs": each.differs} for each in comparison.counters],
        "blocks": [
            [
                {
                    "label": run.label,
                    "steps": run.steps,
                    "step_ns": run.step_ns,
                    "ranges_ns": run.ranges_ns,
                    "cpu_wait": run.cpu_wait,
                }
                for run in block.runs
            ]
            for block in comparison.blocks
        ],
    }
    return json_text(content)


def _verdict(comparison: Comparison, folder: Path) -> list[str]:
    step, missing = comparison.step, comparison.blocks_missing
    text = durations_like(step.a_ns)
    more = []
    if missing is not None:
        more = [
            f"A verdict needs about {counted(missing, 'more block')}: repeat the command with "
            f"--continue {shlex.quote(str(folder))} --blocks {missing}"
        ]
    return [
        f"Verdict: {step.verdict}, {_step_change(comparison)}",
        *more,
        f"A step takes {text(step.a_ns)} in A and {text(step.b_ns)} in B, from "
        f"{counted(len(comparison.blocks), 'block')} of four runs",
        *(
            f"{each.path} is {each.verdict}: {_change(each)}"
            for each in comparison.quantities[1:]
            if each.verdict in ("slower", "faster")
        ),
        f"A change within ±{100 * comparison.margin:.3g} % counts as the same.",
    ]


def _step_change(comparison: Comparison) -> str:
    """The change of the step with its interval, or with the changes of the blocks if too few."""
    step = comparison.step
    if step.change.low is not None:
        return _change(step)
    low, high = map(percent_change, comparison.spread)
    interval = f"no {100 * (1 - comparison.level):.4g} % interval: too few blocks"
    if len(comparison.blocks) > 1:
        interval = f"{low} to {high} in single blocks; {interval}"
    return f"{percent_change(step.change.share)} ({interval})"


def _change(quantity: Quantity) -> str:
    change = quantity.change
    if change.low is None or change.high is None:
        return percent_change(change.share)
    low, high = percent_change(change.low), percent_change(change.high)
    return f"{percent_change(change.share)} ({low} to {high})"


def _ranges(comparison: Comparison) -> str | Section:
    step, *rows = comparison.quantities
    if not rows:
        return ""
    text = durations_like(step.a_ns)
    table = Table(
        {
            "range": [each.path for each in rows],
            "A_ns": [each.a_ns for each in rows],
            "B_ns": [each.b_ns for each in rows],
            "change": [each.change.share for each in rows],
            "low": [each.change.low for each in rows],
            "high": [each.change.high for each in rows],
            "verdict": [each.verdict for each in rows],
        }
    )
    title = (
        "Time of a step by range. A and B are medians over the runs. change is estimated from the "
        "change within each block (two runs of A and two of B), so it is not exactly B / A."
    )
    if step.change.low is not None:
        title += (
            f" In {100 * (1 - comparison.level):.4g} of 100 comparisons, the true change of every "
            "range is from low to high."
        )
    return Section(
        table,
        known_columns(table),
        title,
        texts={
            "A_ns": text,
            "B_ns": text,
            **dict.fromkeys(("change", "low", "high"), percent_change),
        },
        all_columns="--json",
    )


def _one_sided(comparison: Comparison) -> list[str]:
    text = durations_like(comparison.step.a_ns)
    return [
        f"Only in {label}: {path}, {text(time_ns)}"
        for label in LABELS
        for path, time_ns in comparison.only_in(label).items()
    ]


def _counters(counters: Sequence[CounterValues]) -> list[str]:
    if not counters:
        return ["Counters: none, because the runs recorded no window."]
    lines = []
    for each in counters:
        a, b = _values(each.name, each.a), _values(each.name, each.b)
        if each.differs:
            lines.append(f"  {each.name}: {a} in A, {b} in B")
        elif each.a != each.b or each.a[0] < each.a[1]:
            lines.append(f"  {each.name}: {a} in A, {b} in B (varies, no clear difference)")
    equal = [each.name for each in counters if each.a == each.b and each.a[0] == each.a[1]]
    heading = "Counters of a step" if lines else "These counters of a step are equal in A and B"
    if lines and equal:
        lines.append(f"  equal: {', '.join(equal)}")
    return [f"{heading}:" if lines else f"{heading}: {', '.join(equal)}", *lines]


def _values(counter: str, values: tuple[int, int]) -> str:
    low, high = map(amount_of(counter), values)
    return low if low == high else f"{low} to {high}"


def _waits(comparison: Comparison) -> list[str]:
    """How long the steps waited for a CPU: a busy machine makes a verdict need more blocks."""
    known = [
        [run.cpu_wait for run in comparison.runs(label) if run.cpu_wait is not None]
        for label in LABELS
    ]
    if not all(known):
        return []
    a, b = (f"{percent(median(each))} ({percent(min(each))} to {percent(max(each))})"
            for each in known)  # fmt: skip
    return [
        "Waiting for a CPU that another program uses, median (minimum to maximum) over the runs: "
        f"{a} of the window in A, {b} in B"
    ]
