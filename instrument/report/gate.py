"""The verdicts of `instrument diff --fail-on` as text, as JSON values and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from instrument.compare.gate import Verdict, amount_of
from instrument.prose import code, escaped, wrapped


def as_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each verdict.

    If a condition on a counter of the whole step fails, more lines name at most five ranges: the
    innermost ranges in which this counter increased.
    """
    lines: list[str] = []
    for verdict in verdicts:
        lines += wrapped(str(verdict), indent="    ")
        for where in _places(verdict):
            lines += wrapped(f"in {where[0]}: {where[1]}", prefix="  ", indent="    ")
    return lines


def as_dicts(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as JSON values; docs/compare.md describes the keys."""
    return [
        {
            "condition": verdict.condition.text,
            "result": verdict.result,
            "before": verdict.before,
            "after": verdict.after,
            "reason": verdict.reason or None,
            "ranges": [each._asdict() for each in verdict.ranges],
        }
        for verdict in verdicts
    ]


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return a list of the verdicts, for a comment on a pull request."""
    lines = []
    for verdict in verdicts:
        rest = str(verdict).partition(verdict.condition.text)[2]
        lines.append(f"- **{verdict.result}** {code(verdict.condition.text)}{escaped(rest)}")
        lines += [f"  - in {code(path)}: {escaped(values)}" for path, values in _places(verdict)]
    return "\n".join(lines)


def _places(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the path of each range in which the verdict's counter increased.

    With each path comes a text with the values of the counter after and before the change.
    """
    text = amount_of(verdict.condition.name)
    for each in verdict.ranges:
        yield each.path, f"{text(each.after)}, before {text(each.before)}"
