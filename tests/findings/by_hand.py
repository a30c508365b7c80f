"""Checks on traces written by hand: their findings as text for a golden file, and what is no finding."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import builders

from findings.twins import assert_command_runs, check_of
from instrument import Capture
from instrument.base.files import DETAIL_FILE
from instrument.read.advise.check import run_check
from instrument.read.advise.finding import Finding


class Case(NamedTuple):
    """A check, and the trace on which it runs: a bare one, or with facts of a session in its capture.json.

    `detail` are the events of the detail window.
    """

    code: str
    events: list[dict[str, Any]]
    session: Mapping[str, Any] | None = None
    document: Mapping[str, Any] = {}
    detail: list[dict[str, Any]] | None = None

    def findings(self, folder: Path) -> list[Finding]:
        folder.mkdir(parents=True, exist_ok=True)
        if self.session is None:
            return check(builders.capture(folder, self.events, **self.document), self.code)
        written = builders.write_capture(folder, self.events, **self.session)
        if self.detail is not None and written.folder is not None:
            base_ns = self.session.get("base_ns", 0)
            trace = {"traceEvents": self.detail, "baseTimeNanoseconds": base_ns}
            text = gzip.compress(json.dumps(trace).encode())
            (written.folder / DETAIL_FILE).write_bytes(text)
        return check(written, self.code)


def environment(**facts: Any) -> dict[str, Any]:
    """What a session wrote about its environment."""
    return {"environment": facts}


def check(capture: Capture, code: str) -> list[Finding]:
    """The findings of a check, which may raise `NotRecorded`."""
    return [each.finding for each in run_check(check_of(code), capture, capture.whatif)]


def described(cases: Mapping[str, Case], folder: Path) -> str:
    """The one finding of each case; its command can be pasted into a shell."""
    found = []
    for number, (name, case) in enumerate(cases.items()):
        (finding,) = case.findings(folder / str(number))
        assert finding.code == case.code
        if finding.verify.startswith("instrument "):
            assert_command_runs(finding)
        found.append("\n".join([f"## {name}", *_lines(finding)]))
    return "\n\n".join(found)


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.code}: {finding.title}"
    yield f"change: {finding.change}"
    if finding.saving is not None:
        baseline, *savings = (f"{ns / 1000:,.1f}" for ns in finding.saving)
        yield f"saves {savings[0]} of {baseline} µs, from {savings[1]} to {savings[2]}"
    for name in ("share", "range", "source", "variant", "ends_run", "is_caveat"):
        if value := getattr(finding, name):
            yield f"{name}: {value:.3f}" if name == "share" else f"{name}: {value}"
    for row in finding.evidence:
        total = "–" if row.total_ns is None else f"{row.total_ns / 1000:,.1f} µs"
        yield f"- {row.name}: {row.calls} calls, {total}; {row.detail}".rstrip("; ")
