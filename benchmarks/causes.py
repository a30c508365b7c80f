"""Whether `instrument run` names the fault that is hidden in each program benchmarks/causes/NAME/slow.py.

Columns: the cause is named `first` (the verdict or the first change matches `words` of cause.toml), on the first `screen`
(the words, or the line), `located` (line or function, anywhere, also in JSON), `missed` (none of these); `misled`: not on
the first screen, and the first change promises a tenth of a step; the promised and the measured saving; and what is wrongly
said of fast.py, the repaired program. On a busy machine, run it with OMP_NUM_THREADS=1 in the environment.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAUSES, ROOT = Path(__file__).parent / "causes", Path(__file__).parents[1]
SCREEN, LARGE = 24, 0.1  # non-empty lines; the share of a step that is a large promise
COLUMNS = ("first", "screen", "located", "missed", "misled")
COMMON = {"main", "forward", "__init__", "__call__", "__getitem__", "__iter__", "step", "run"}
TEXTS = ("title", "change", "assumes", "source", "range")


@dataclass
class Cause:
    """The hidden fault: words that name it, its lines in slow.py, the name of its function or class, its share of a step."""

    words: re.Pattern[str]
    lines: range
    scope: str
    saving: float

    def named(self, text: str) -> bool:
        return bool(self.words.search(" ".join(text.split())))  # sentences are wrapped into lines

    def lined(self, text: str) -> bool:
        lines = re.findall(r"slow\.py(?::|\"?,? line )(\d+)", " ".join(text.split()))
        return any(int(line) in self.lines for line in lines)


class Output:
    """What `instrument run` says of a script: standard error, its parts, and the diagnosis as JSON."""

    def __init__(self, script: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(script, folder)
            self.stderr = _instrument(folder, "run", script.name).stderr
            self.json = _instrument(folder, "diagnose", "--json", "profile").stdout
        diagnosis = json.loads(self.json)
        change = re.search(
            r"^(1\. |Change: ).*?(?=^2\. |\n\n|\Z)", self.stderr, re.DOTALL | re.MULTILINE
        )
        self.first = f"{diagnosis['verdict']} {change.group() if change else ''}"
        self.screen = "\n".join(
            [text for text in self.stderr.splitlines() if text.strip()][:SCREEN]
        )
        self.findings = [found for found in diagnosis["findings"] if not found["is_caveat"]]
        for found in self.findings:  # the promise: a share of the step
            found["promise"] = (found["saving_ns"] or 0) / (diagnosis["step_ns"] or 1)


def _instrument(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "instrument", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{words} failed:\n{done.stderr}")
    return done


def cause_of(folder: Path) -> Cause:
    told = tomllib.loads((folder / "cause.toml").read_text())
    source = (folder / "slow.py").read_text()
    (line,) = [n for n, text in enumerate(source.splitlines(), 1) if told["line"] in text]
    scopes = [
        node.name
        for node in ast.walk(ast.parse(source))  # outer ones first
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.lineno <= line <= (node.end_lineno or line)
        and node.name not in COMMON
    ]
    words = re.compile(told["words"], re.IGNORECASE)
    return Cause(words, range(line - 1, line + 2), ["", *scopes][-1], told["saving"])


def judged(cause: Cause, slow: Output) -> tuple[list[bool], dict[str, Any] | None]:
    """The columns of the table, and the finding that names the cause."""
    everything = slow.stderr + slow.json
    first = cause.named(slow.first)
    screen = cause.named(slow.screen) or cause.lined(slow.screen)
    in_scope = bool(cause.scope and re.search(rf"\b{re.escape(cause.scope)}\b", everything))
    located = cause.lined(everything) or in_scope
    misled = not (first or screen) and any(f["promise"] >= LARGE for f in slow.findings[:1])
    texts = [" ".join(str(finding[key]) for key in TEXTS) for finding in slow.findings]
    matching = (
        f for f, text in zip(slow.findings, texts) if cause.named(text) or cause.lined(text)
    )
    found = [first, screen, located, not (first or screen or located), misled]
    return found, next(matching, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders of benchmarks/causes")
    parser.add_argument("--save", type=Path, metavar="FILE", help="what the runs say, to read")
    args = parser.parse_args()
    names = args.names or sorted(path.parent.name for path in CAUSES.glob("*/cause.toml"))
    header = "".join(f"{column:>9}" for column in [*COLUMNS, "promised", "measured"])
    print(f"{'program':<24}{header}  wrongly of fast.py", flush=True)
    rows, alarms, said = [], 0, ""
    for name in names:
        cause = cause_of(CAUSES / name)
        slow, fast = Output(CAUSES / name / "slow.py"), Output(CAUSES / name / "fast.py")
        found, finding = judged(cause, slow)
        code = finding and finding["code"]
        wrong = [f["title"] for f in fast.findings if f["code"] == code or f["promise"] >= LARGE]
        promise = f"{finding['promise']:.0%}" if finding and finding["promise"] else "-"
        marks = ["yes" if mark else "" for mark in found] + [promise, f"{cause.saving:.0%}"]
        row = "".join(f"{mark:>9}" for mark in marks)
        print(f"{name:<24}{row}  {'; '.join(wrong)}", flush=True)
        rows.append(found)
        alarms += bool(wrong)
        said += f"===== {name}/slow.py\n{slow.stderr}\n===== {name}/fast.py\n{fast.stderr}\n"
        if args.save:
            args.save.write_text(said)
    totals = "".join(f"{sum(column):>9}" for column in zip(*rows))
    print(f"{f'total of {len(rows)}':<24}{totals}{'':>18}  false alarms: {alarms}")


if __name__ == "__main__":
    main()
