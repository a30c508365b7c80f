"""What `instrument try` has measured, as text, Markdown and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from instrument.base.prose import wrapped
from instrument.base.units import duration, durations_like, percent_change
from instrument.read.compare.tries import Tried, Tries
from instrument.read.views.json_text import json_text
from instrument.read.views.section import Part, Section
from instrument.read.views.table import Table

#: What the keys of the JSON mean.
JSON_KEYS = {
    "best": "the words of the change, or of the combination, to recommend; `null` if none is "
    "faster with equal losses",
    "changes": "the changes that were asked for, or all that fit the script, the fastest first",
    "together": "the combination of several changes; `null` if it was not measured",
}
CHANGE_KEYS = {
    "change": "the words for `instrument run --with`, such as `workers=2`",
    "does": "what it changes",
    "by_hand": "how to write it in the script",
    "numbers": "what it may change in the results: `same`, `rounding` or `precision`",
    "predicted": "the share of a step that a finding promises to save; `null` if none does",
    "predicted_low": "the lower bound of `predicted`",
    "predicted_high": "the upper bound of `predicted`",
    "screened": "the change of the step in the run in which changes are alternated, as a share",
    "result": "`faster`, `slower`, `same`, `undecided`, `no promise` (not faster in the run in "
    "which changes are alternated), `failed` or `not tried`",
    "why": "why it failed or was not tried",
    "share": "the change of the step as a share: -0.2 is 20 % less; `null` if it was not measured",
    "low": "the lower end of the interval of `share`",
    "high": "the upper end of the interval of `share`",
    "before_ns": "the median time of a step without the change",
    "after_ns": "the median time of a step with the change",
    "verdict": "of the certificate; see [the verdicts](proof.md)",
    "losses": "`bit-equal`, `equal within rounding`, `different` or `unknown`",
    "proof": "the folder of the certificate",
}

_WIDTH = 80  # of the table


def parts(found: Tries, script: Sequence[str]) -> list[Part]:
    """Return the recommendation, and a row for each change."""
    every = [*found.tried, *([found.together] if found.together else [])]
    measured = [each for each in every if each.share is not None]
    measured.sort(key=lambda each: each.share or 0.0)
    said: list[Part] = [_recommended(found, script), *_faster_but(found, measured)]
    if measured:
        said.append(_table(measured))
    rest = [each for each in found.tried if each.share is None and each.result != "fits"]
    lines = [wrapped(f"{each.words}: {_why_not(each)}", indent="  ") for each in rest]
    said += [[line for some in lines for line in some]] if rest else []
    if any(each.result == "not tried" for each in rest):
        needs = (
            f" A change takes about {duration(found.longest_s * 1e9)}." if found.longest_s else ""
        )
        said.append(
            wrapped(f"The same command tries what was not tried, with a new budget.{needs}")
        )
    return said


def best(found: Tries) -> Tried | None:
    """The change, or the combination, to recommend: the fastest one with the same results."""
    every = [*found.tried, *([found.together] if found.together else [])]
    equal = [each for each in every if each.verdict == "faster and equal"]
    return min(equal, key=lambda each: each.share or 0.0, default=None)


def _recommended(found: Tries, script: Sequence[str]) -> list[str]:
    chosen = best(found)
    if chosen is None:
        return ["No change is known to make this script faster with equal losses."]
    text = durations_like(chosen.before_ns or 0.0)
    said = (
        f"{chosen.words}: a step takes {text(chosen.after_ns or 0.0)} instead of "
        f"{text(chosen.before_ns or 0.0)}, {_interval(chosen)}; the losses are {chosen.losses}."
    )
    return [
        *wrapped(said),
        *wrapped(chosen.by_hand, "In the script: "),
        f"Without an edit: instrument run --with {shlex.quote(chosen.words)} {shlex.join(script)}",
        f"The certificate: {chosen.proof}",
    ]


def _faster_but(found: Tries, measured: Sequence[Tried]) -> list[Part]:
    """The changes that are faster than what is recommended, but do not leave the losses equal."""
    chosen = best(found)
    least = (chosen.share if chosen else None) or 0.0
    said = [
        f"{each.words}: {_interval(each)}, but the losses are {each.losses}; see {each.proof}."
        for each in measured
        if each.result == "faster" and each.verdict != "faster and equal"
        and (each.share or 0.0) < least
    ]  # fmt: skip
    return [[line for each in said for line in wrapped(each)]] if said else []


def _interval(each: Tried) -> str:
    if each.share is None or each.low is None or each.high is None:
        return percent_change(each.share or 0.0)
    low, high = percent_change(each.low), percent_change(each.high)
    return f"{percent_change(each.share)} ({low} to {high})"


def _table(measured: Sequence[Tried]) -> Section:
    text = durations_like(measured[0].before_ns or 0.0)
    table = Table(
        {
            "change": [each.words for each in measured],
            "before_ns": [each.before_ns for each in measured],
            "after_ns": [each.after_ns for each in measured],
            "by": [each.share for each in measured],
            "from": [each.low for each in measured],
            "to": [each.high for each in measured],
            "predicted": [-each.predicted[0] if each.predicted else None for each in measured],
            "verdict": [_verdict(each) for each in measured],
            "losses": [each.losses.removeprefix("equal within ") for each in measured],
        }
    )
    return Section(
        table,
        [*table.columns],
        "Changes that were measured, with the step, its change and the interval",
        missable=["predicted", "before_ns"],
        text_width=_WIDTH,
        narrowest=_WIDTH // 5,
        texts={
            **dict.fromkeys(("before_ns", "after_ns"), text),
            **dict.fromkeys(("by", "from", "to", "predicted"), percent_change),
        },
        all_columns="--json",
    )


def _verdict(each: Tried) -> str:
    return "other work" if each.verdict == "not the same work" else each.result


def _why_not(each: Tried) -> str:
    if each.result == "no promise":
        return f"{percent_change(each.screened or 0.0)} in the first trial, so not measured further"
    return f"{each.result}: {each.why}"


def as_markdown(found: Tries) -> str:
    """Return a table of the measured changes, for a pull request."""
    rows = [
        "| change | step before | after | by | verdict | losses | by hand |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in [*([found.together] if found.together else []), *found.tried]:
        if each.share is not None:
            text = durations_like(each.before_ns or 0.0)
            cells = [
                f"`{each.words}`", text(each.before_ns or 0.0), text(each.after_ns or 0.0),
                _interval(each), each.verdict or each.result, each.losses, f"`{each.by_hand}`",
            ]  # fmt: skip
            rows.append(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
    return "\n".join(rows)


def as_json(found: Tries) -> str:
    """Return what was measured as JSON; docs/json.md describes the keys."""
    chosen = best(found)
    seen = sorted(
        (each for each in found.tried if each.result != "fits"), key=lambda each: each.share or 0.0
    )
    content = {
        "best": chosen.words if chosen else None,
        "changes": [*map(_as_json, seen)],
        "together": found.together and _as_json(found.together),
    }
    return json_text(content)


def _as_json(each: Tried) -> dict[str, Any]:
    predicted = each.predicted or (None, None, None)
    given = asdict(each) | {"change": each.words}
    given |= dict(zip(("predicted", "predicted_low", "predicted_high"), predicted))
    return {key: given[key] for key in CHANGE_KEYS}
