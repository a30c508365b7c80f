"""`Diagnosis`: the findings of a run, as text, as JSON and as Markdown.

Names of ranges, operators, kernels and files come from a trace, which may come from a stranger.
Text and Markdown escape the unprintable characters of these names. In Markdown, the names also
cannot become markup, such as links, mentions of people, emoji, formulas or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from instrument.base.printable import printable
from instrument.base.prose import (
    NAMES_ARE_DATA,
    PROSE_WIDTH,
    byte_count,
    code,
    escaped,
    shortened,
    wrapped,
)
from instrument.base.units import counted, duration
from instrument.read.advise.finding import Evidence, Finding, Saving, labels_of
from instrument.read.advise.verdict import notes, saved, saving_text, verdict, without_cause
from instrument.read.views.json_text import json_text
from instrument.read.views.layers import LayerEvidence
from instrument.read.views.layout import plain
from instrument.read.views.section import Part, Section
from instrument.read.views.table import Table, known_columns

#: What the keys of the JSON mean.
JSON_KEYS = {
    "captures": "the names of the captures",
    "verdict": "what slows a step most, as the sentence at the top of the text",
    "step_ns": "the mean of the recorded steps that count: all but the first, and whole periods if "
    "long and short steps take turns; with several captures, the median of these means, or of "
    "those of training if phases differ; the whole recording if no step finished",
    "unexplained": "the share of the window in which device work was late for an unknown reason",
    "layers": "the share of the device time by what its layer is known from, such as `recorded` or "
    "`sequence`; docs/how-to/layers.md. `null` without device time",
    "findings": "the findings: first what ends the run, then sorted by the share of the step that "
    "they save, or else by half of `share`; those of few windows and caveats come last; "
    "communication that waits for late ranks, and what only these have, after these ranks",
    "together": "what the changes of the first three findings save if they are made together: "
    "their `numbers`, from 1, and `saving_ns`, `low_ns`, `high_ns` and `step_ns`; `null` if fewer "
    "than two of them are simulated and blame other events",
    "ignored": "the codes of the findings that were left out on request, such as by `--ignore`",
    "passed": "the codes of the checks that found nothing",
    "not_checked": "sentences on the checks that could not run, with what to record",
    "notes": "sentences on how far the savings can be trusted",
}
#: What the keys of a finding mean.
FINDING_KEYS = {
    "code": "the kind of the problem, such as `loader-wait`",
    "title": "the problem with its number, as a sentence",
    "share": "the share of the step, or of the window, that the title names",
    "saving_ns": "how much shorter a step would be; `null` if the change cannot be simulated",
    "low_ns": "the lower bound of `saving_ns`",
    "high_ns": "the upper bound of `saving_ns`",
    "step_ns": "how long a step would take with this change alone: the recorded step minus "
    "`saving_ns`",
    "range": "the path of the range where the problem is; `null` if it is in no single range",
    "source": "the file, line and function, such as `train.py:31 in main`",
    "capture": "the name of the capture with the evidence; `null` for a comparison of ranks",
    "phase": "the phase of the step that the saving shortens, such as `validation`; `null` if all "
    "captures are of one phase",
    "evidence": "the groups of equal events that show the problem, the most important first",
    "assumes": "what `saving_ns` assumes, such as `with half of this time`; empty if it assumes "
    "that the problem is gone",
    "ends_run": "whether the run soon fails because of the problem",
    "change": "the code or the setting to write",
    "verify": "a command for this capture; with a capture of the changed program, it shows whether "
    "the change helped",
    "coverage": "the rows of `capture.coverage` that the finding depends on",
    "is_caveat": "whether the problem makes the recording less exact instead of the program slower",
}
#: What the keys of a row of evidence mean.
EVIDENCE_KEYS = {
    "name": "the name of the events",
    "calls": "how often they occurred",
    "total_ns": "their time; `null` if this time has no meaning",
    "start_ns": "the start of the longest one, on the trace's own clock",
    "end_ns": "its end",
    "detail": "further facts, such as a size; empty if there are none",
}

_PASSED = "Passed, or costs too little to matter: "
_SHOWN_EVIDENCE = 4
# Two words beside each other are prose; code has a sign between them.
_PROSE = re.compile(r"\w \w")
# In names of kernels, a token of a language model has at least 2.5 bytes. So 4,800 bytes are fewer
# than 2,000 tokens.
_MARKDOWN_BYTES, _MARKDOWN_LIST, _MARKDOWN_TEXT, _MARKDOWN_EVIDENCE = 4_800, 900, 300, 3


class Together(NamedTuple):
    """What the changes of several findings save if they are made together."""

    numbers: tuple[int, ...]  # of the findings, from 1
    saving: Saving


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What slows a run, what to change, and what the change saves; see the keys of the JSON, too.

    Attributes:
        step_ns: the mean of the recorded steps that count, or of several captures, the median of
            these means. None if no step could be simulated.
        step_phase: the phase of `step_ns`; None if all captures are of one phase.
        step_kinds: how the steps of this mean differ; "" if they are alike.
        between_ns: the smallest and the largest mean of the captures, if they differ by a fifth or
            more; else None.
        has_steps: whether a step finished; else `step_ns` is the time of the whole recording.
        largest_parts: a sentence on what takes most of a step, for a step without a large finding.
        device_use: a sentence on what the device does in a step; "" without device work.
        heaviest: a sentence on what takes most of a step, and what a change of it saves at most.
        heaviest_share: its share of a step.
        lines: a row of text for each of the lines that take most of the run, by samples; none if
            `profiler.lines` was off.
        layers: what the layers of the device time are known from; None without device time.
        near_peak: the clause on how near the program is to what the machine can do, if it is near.
        lost_events: sentences on a hundredth or more of the events that were not read, have
            impossible times, or break another claim of `instrument.read.views.witness`, with what
            that means; "" if there are fewer.
        together: what the first three findings save together; None if fewer than two are simulated.
        ignored: the codes of the findings that were left out on request.
    """

    captures: tuple[str, ...]
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_checked: tuple[str, ...]
    notes: tuple[str, ...] = ()
    step_ns: int | None = None
    step_phase: str | None = None
    step_kinds: str = ""
    between_ns: tuple[int, int] | None = None
    has_steps: bool = True
    unexplained: float | None = None
    largest_parts: str = ""
    device_use: str = ""
    heaviest: str = ""
    heaviest_share: float = 0.0
    lines: tuple[str, ...] = ()
    near_peak: str = ""
    layers: LayerEvidence | None = None
    lost_events: str = ""
    together: Together | None = None
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The text that `instrument diagnose` prints."""
        return as_text(self)

    def __repr__(self) -> str:
        titles = [finding.title for finding in self.findings[:1]]
        found = counted(len(self.findings), "finding")
        return f"<Diagnosis: {', first: '.join([found, *map(printable, titles)])}>"

    def _repr_markdown_(self) -> str:
        """The findings as Markdown, for a notebook."""
        return as_markdown(self)


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text of at most 80 columns.

    The lines that begin with "verify" may be longer, because a command must stay on one line.
    """
    said = (without_cause(diagnosis), *notes(diagnosis))
    first = [line for each in said for line in wrapped(each)]
    what, found = _summary(diagnosis, str)
    parts: list[Part] = [first, wrapped(f"{what}: {found}", indent="  ")]
    parts += [
        _finding(number, each, diagnosis) for number, each in enumerate(diagnosis.findings, 1)
    ]
    parts += [wrapped(each, indent="  ") for each in below(diagnosis)]
    if diagnosis.passed:
        parts.append(wrapped(", ".join(diagnosis.passed), _PASSED, "  "))
    for title, sentences in _further(diagnosis):
        parts.append([f"{title}:", *(line for each in sentences for line in wrapped(each, "  - "))])
    return plain(parts)


def below(diagnosis: Diagnosis) -> list[str]:
    """Return the lines below the findings: what the first save together, and what is ignored."""
    lines = []
    if diagnosis.together is not None:
        (*most, last), saving = diagnosis.together
        step = "a step" if diagnosis.has_steps else "the recording"
        takes = "" if saving.is_wide else f": {step} would take {duration(saving.step_ns)}"
        numbers = f"{', '.join(map(str, most))} and {last}"
        lines.append(f"Findings {numbers} together save {saved(saving)}{takes}.")
    if diagnosis.ignored:
        codes = ", ".join(dict.fromkeys(diagnosis.ignored))
        lines.append(f"{counted(len(diagnosis.ignored), 'finding')} ignored: {codes}")
    return lines


def _further(diagnosis: Diagnosis) -> list[tuple[str, Sequence[str]]]:
    found = ("Not checked", diagnosis.not_checked), ("Accuracy of the savings", diagnosis.notes)
    return [each for each in found if each[1]]


class Term(NamedTuple):
    """A line on a finding: its label, its text, and whether the text is code or names."""

    label: str
    text: str
    is_code: bool = False


def terms(finding: Finding, diagnosis: Diagnosis) -> list[Term]:
    """Return what a finding saves, where it is, what to change, and how to verify the change."""
    where = [f"range {finding.range}" if finding.range else "", finding.source or ""]
    found = [
        Term("saves", "" if finding.is_caveat else saving_text(finding, diagnosis)),
        Term("where", ", ".join(filter(None, where)), is_code=True),
        Term("change", finding.change, is_code=not _PROSE.search(finding.change)),
        Term("verify", finding.verify, is_code=finding.verify.startswith("instrument ")),
    ]
    return [term for term in found if term.text]


def as_json(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as JSON; docs/json.md describes the keys."""
    together = diagnosis.together
    content = {
        "captures": diagnosis.captures,
        "verdict": verdict(diagnosis),
        "step_ns": diagnosis.step_ns,
        "unexplained": diagnosis.unexplained,
        "layers": diagnosis.layers and diagnosis.layers.shares,
        "findings": [finding_as_dict(finding) for finding in diagnosis.findings],
        "together": together and {"numbers": together.numbers, **_figures(together.saving)},
        "ignored": diagnosis.ignored,
        "passed": diagnosis.passed,
        "not_checked": diagnosis.not_checked,
        "notes": diagnosis.notes,
    }
    return json_text(content)


def finding_as_dict(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON values; docs/json.md describes the keys."""
    values = {key: getattr(finding, key, None) for key in FINDING_KEYS}
    values["evidence"] = [
        {key: value for key, value in row._asdict().items() if key != "is_kernel"}
        for row in finding.evidence
    ]
    return values | _figures(finding.saving)


def _figures(saving: Saving | None) -> dict[str, int | None]:
    keys = ("saving_ns", "low_ns", "high_ns", "step_ns")
    return {key: None if saving is None else round(getattr(saving, key)) for key in keys}


def as_markdown(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as Markdown, for a pull request or an agent.

    The text has at most 2,000 tokens of a language model. The largest findings come first. If not
    all findings fit, a line says how many are left out.
    """
    what, found = _summary(diagnosis, code)
    parts = [
        f"## Diagnosis of {what}: {found}",
        f"**{escaped(verdict(diagnosis))}**",
        *map(escaped, notes(diagnosis)),
        f"Found by `instrument diagnose`; the savings are simulated. {NAMES_ARE_DATA}",
    ]
    tail = [escaped(each) for each in below(diagnosis)]
    tail += [_PASSED + escaped(", ".join(diagnosis.passed))] if diagnosis.passed else []
    tail += [f"{title}: {_few(sentences)}" for title, sentences in _further(diagnosis)]
    left = _MARKDOWN_BYTES - byte_count([*parts, *tail])
    shown = 0
    for at, finding in enumerate(diagnosis.findings, 1):
        texts = (
            _markdown_finding(at, finding, diagnosis, rows) for rows in (_MARKDOWN_EVIDENCE, 0)
        )
        text = next((text for text in texts if byte_count([text]) <= left), None)
        if text is None:
            break
        parts.append(text)
        left -= byte_count([text])
        shown = at
    if shown < len(diagnosis.findings):
        more = counted(len(diagnosis.findings) - shown, "more finding")
        parts.append(f"… and {more}; `instrument diagnose --json` lists all.")
    return "\n\n".join([*parts, *tail])


def _summary(diagnosis: Diagnosis, shown: Callable[[str], str]) -> tuple[str, str]:
    """Return what was diagnosed, a single capture by its name, and the number of findings."""
    captures, findings = diagnosis.captures, diagnosis.findings
    what = shown(captures[0]) if len(captures) == 1 else f"{len(captures)} captures"
    return what, counted(len(findings), "finding") if findings else "no findings"


def _finding(number: int, finding: Finding, diagnosis: Diagnosis) -> list[str]:
    indent = " " * (len(str(number)) + 2)
    lines = wrapped(finding.title, f"{number}. ")
    for label, text, is_code in terms(finding, diagnosis):
        prefix = f"{indent}{label:8}"
        is_command = is_code and label == "verify"  # a line to copy
        lines += [prefix + text] if is_command else wrapped(text, prefix)
    return [*lines, *_evidence(finding.evidence, indent)]


def _evidence(rows: Sequence[Evidence], indent: str) -> list[str]:
    """The rows of evidence as aligned columns, with the detail of each row below the row."""
    shown = rows[:_SHOWN_EVIDENCE]
    if not shown:
        return []
    table = Table(
        {
            "name": labels_of(shown),
            "calls": [row.calls for row in shown],
            "total_ns": [row.total_ns for row in shown],
        }
    )
    section = Section(
        table,
        known_columns(table),
        below=[[row.detail] if row.detail else [] for row in shown],
        sentences=True,
        text_width=PROSE_WIDTH - len(indent) - 2,
        texts={"calls": "{:,}×".format},
        has_header=False,
    )
    lines = plain([section]).split("\n")
    return [f"{indent}in total, not for each step:", *(f"{indent}  {line}" for line in lines)]


def _markdown_finding(number: int, finding: Finding, diagnosis: Diagnosis, rows: int) -> str:
    title = escaped(shortened(finding.title, _MARKDOWN_TEXT))
    lines = [f"{number}. **{title}**"]
    for each in terms(finding, diagnosis):
        if each.label == "saves":
            lines[0] += escaped(f" Saves {each.text}." if finding.saving else " Saving not known.")
        else:
            text = shortened(each.text, _MARKDOWN_TEXT)
            shown = code(text, _MARKDOWN_TEXT) if each.is_code else escaped(text)
            lines.append(f"   - {each.label.title()}: {shown}")
    if finding.evidence[:rows]:
        lines.append("   - In total, not for each step:")
    for row, name in zip(finding.evidence[:rows], labels_of(finding.evidence)):
        total = "" if row.total_ns is None else f", {duration(row.total_ns)}"
        detail = f", {code(row.detail)}" if row.detail else ""
        lines.append(f"     - {code(name)}: {row.calls:,} calls{total}{detail}")
    return "\n".join(lines)


def _few(sentences: Sequence[str]) -> str:
    """Join the sentences that fit into `_MARKDOWN_LIST` bytes, and say how many are left out."""
    shown: list[str] = []
    for sentence in sentences:
        text = escaped(shortened(sentence, _MARKDOWN_TEXT))
        if byte_count([" ".join([*shown, text])]) <= _MARKDOWN_LIST:
            shown.append(text)
    left = len(sentences) - len(shown)
    return " ".join([*shown, f"… and {left} more."] if left else shown)
