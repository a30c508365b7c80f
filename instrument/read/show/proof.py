"""A certificate as a block of Markdown for a pull request, and as lines for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from statistics import median

from instrument.base.prose import code, escaped
from instrument.base.units import count, counted, durations_like, percent, percent_change
from instrument.read.compare.ab_runs import LABELS, times
from instrument.read.compare.proof import PROOF_FILE, Proof
from instrument.read.compare.work import Facts, Numbers

# A pull request shows so many differences; the certificate holds them all.
_DIFFERENCES = 10


def markdown(proof: Proof) -> str:
    """A certificate in at most 40 lines of Markdown."""
    a, b = proof.programs
    names = [each.name for each in (a, b) if each.name != shlex.join(each.command)]
    rows = [
        *([("program", *(code(each.name) for each in (a, b)))] if names else []),
        ("command", *(code(shlex.join(each.command)) for each in (a, b))),
        *([("commit", *(code(each.commit[:12]) for each in (a, b)))] if a.commit else []),
        ("step", *_steps(proof)),
        ("machine", *(_machine(proof.work[each.label]) for each in (a, b))),
        ("work", *(escaped(_work(proof.work[each.label])) for each in (a, b))),
    ]
    shown = proof.differences[:_DIFFERENCES]
    left = len(proof.differences) - len(shown)
    return "\n".join(
        [
            f"### {proof.verdict.capitalize()}: step {percent_change(proof.change.share)}",
            "",
            escaped(proof.reason),
            "",
            "| | A | B |",
            "|---|---|---|",
            *(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows),
            "",
            *(f"- {escaped(line)}" for line in _lines(proof)),
            *(
                f"- {'**Not the same work:** ' if each.refuses else ''}{escaped(each.text)}"
                for each in shown
            ),
            *([f"- {counted(left, 'more difference')} in {PROOF_FILE}."] if left else []),
            "",
            f"`instrument verify {PROOF_FILE}` checks this.",
            "",
        ]
    )


def lines(proof: Proof) -> list[str]:
    """A certificate as lines: its verdict, and what differs."""
    return [
        f"Certificate: {proof.verdict}. {proof.reason}",
        *_lines(proof),
        *(f"{'Not the same work: ' * each.refuses}{each.text}" for each in proof.differences),
    ]


def _lines(proof: Proof) -> Iterator[str]:
    speed = proof.change
    interval = "no interval, because of too few blocks"
    if speed.low is not None and speed.high is not None:
        ends = f"{percent_change(speed.low)} to {percent_change(speed.high)}"
        interval = f"{ends} in {100 * (1 - speed.level):.4g} of 100 comparisons"
    blocks = counted(len(proof.blocks), "block")
    yield f"Step: {percent_change(speed.share)} ({interval}), from {blocks}."
    if proof.predicted is not None and proof.predicted.share is not None:
        saving = proof.predicted
        bounds = ""
        if saving.low is not None and saving.high is not None:
            bounds = f" ({percent(saving.low)} to {percent(saving.high)})"
        yield f"Predicted by {saving.finding}: {percent(proof.predicted.share)} less{bounds}."
    if proof.load is not None:
        known = {k: v for k, v in proof.load.items() if v is not None}
        if known:
            load = ", ".join(f"{label} {percent(share)}" for label, share in sorted(known.items()))
            yield f"Time without a CPU, which others used: {load}."
    yield f"Losses: {_numbers(proof.numbers)}."
    if proof.gradients is not None:
        yield f"Norms of gradients: {_numbers(proof.gradients)}."


def _numbers(numbers: Numbers) -> str:
    largest = ""
    if numbers.largest:
        largest = f", largest relative difference {numbers.largest:.2g}"
    why = f" ({numbers.why})" if numbers.why else ""
    return f"{numbers.equality}, {counted(numbers.compared, 'number')} compared{largest}{why}"


def _steps(proof: Proof) -> list[str]:
    runs = [run for block in proof.blocks for run in block]
    medians = [median(times(runs, label)) for label in LABELS]
    return [*map(durations_like(medians[0]), medians)]


def _machine(facts: Facts) -> str:
    where = facts.environment
    threads = "" if where.threads is None else f", {counted(where.threads, 'thread')}"
    devices = f", {', '.join(where.devices[:8])}" if where.devices else ""
    return escaped(f"torch {where.torch}, Python {where.python}{threads}{devices}")


def _work(facts: Facts) -> str:
    found = []
    if facts.steps is not None:
        found.append(counted(facts.steps, "step"))
    for phase, calls in (("training", facts.training), ("evaluation", facts.evaluation)):
        if calls is not None and calls.is_whole:
            tokens = f" ({calls.tokens:,} tokens)" if calls.tokens is not None else ""
            found.append(f"{counted(calls.samples, 'sample')}{tokens} in {phase}")
    if facts.parameters.changed is not None:
        found.append(f"{counted(facts.parameters.changed, 'parameter')} changed")
    if facts.flops is not None:
        kinds = ", ".join(f"{percent(y)} {x}" for x, y in sorted((facts.precision or {}).items()))
        found.append(f"{count(facts.flops)} operations in a step ({kinds})")
    return "; ".join(found) or "not seen"
