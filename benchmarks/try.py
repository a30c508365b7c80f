"""Whether `instrument try` finds the fault of each program benchmarks/outside/NAME/slow.py, and leaves healthy ones alone.

Each fault can be mended from outside; fast.py is the same program, mended by hand. `found`: a change of change.toml is
faster, says `try`. Savings are shares of a step: what a finding promised, what `try` measured for that change, and `hand`,
that of fast.py, measured like `try` does, by two runs that take turns. What is recommended is then measured once more:
it is `wrong` if it saves less than 1 %. Healthy programs (healthy_NAME/fast.py) have no fault.

    python benchmarks/try.py [--budget 5m] [NAME ...]
    python benchmarks/try.py --same 20 [NAME ...]

The second command compares each program N times with itself, so every change that is reported is a false one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instrument.base.errors import CaptureError
from instrument.read.compare.proof import RunTime, change_of
from instrument.read.compare.statistics import Change
from instrument.read.compare.trial_runs import ScriptEndedError, ScriptRun
from instrument.read.compare.tries import MARGIN
from instrument.record.applied_changes import variables

OUTSIDE, ROOT = Path(__file__).parent / "outside", Path(__file__).parents[1]
OFF = ["profiler.enabled=false", "profiler.lines=false"]
BLOCKS, BLOCK_S, LEAD, NEAR = 8, 0.3, 5, 1.5
LONGEST_S = 300.0
COLUMNS = ("found", "promised", "try", "hand", "minutes")
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@dataclass
class Program:
    """A script, and the words of the changes that mend it; none if it is healthy."""

    name: str
    script: Path
    repaired: Path | None
    changes: list[str]

    @classmethod
    def of(cls, folder: Path) -> Program | None:
        """The program in a folder; None if it needs a device that is not there."""
        if not (folder / "change.toml").exists():
            return cls(folder.name, folder / "fast.py", None, [])
        fault = tomllib.loads((folder / "change.toml").read_text())
        if fault.get("needs") == "cuda" and not torch.cuda.is_available():
            return None
        return cls(folder.name, folder / "slow.py", folder / "fast.py", fault["changes"])


def started(script: Path, words: str, folder: Path) -> ScriptRun:
    command = [sys.executable, "-m", "instrument", "run", *OFF]
    command += ["--with", words] if words else []
    added = variables(words) if words else {}
    (folder / "run").mkdir()
    return ScriptRun([*command, "--", str(script)], folder, folder / "run", PATH | dict(added))


def compared(before: Path, after: Path, words: str = "") -> Change:
    """The change of a step from one script to another, or to itself with changes, in runs that take turns."""
    blocks: list[list[RunTime]] = []
    until = time.monotonic() + LONGEST_S
    rng = np.random.default_rng()
    while len(blocks) < BLOCKS:
        with (
            tempfile.TemporaryDirectory() as one,
            tempfile.TemporaryDirectory() as two,
            started(before, "", Path(one)) as a,
            started(after, words, Path(two)) as b,
        ):
            try:
                sides = {"A": a, "B": b}
                for run in sides.values():
                    run.start(until)
                step_ns = max(run.run(3, until, lead=LEAD) for run in sides.values())
                steps = min(max(int(BLOCK_S / step_ns * 1e9), 2), 100)
                while len(blocks) < BLOCKS:
                    order = "BAAB" if rng.integers(2) else "ABBA"
                    block = [RunTime(x, sides[x].run(steps, until, lead=1)) for x in order]
                    blocks.append(block)
            except ScriptEndedError:
                if not blocks:
                    raise
    return change_of(blocks)


def tried(script: Path, budget: str) -> dict[str, Any]:
    """What `instrument try` prints as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(script, folder)
        command = [sys.executable, "-m", "instrument", "try", "--yes", "--json", "--budget", budget]
        done = subprocess.run(
            [*command, script.name],
            cwd=folder,
            env=os.environ | PATH,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CaptureError(f"instrument try failed on {script}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def percent(saving: float | None) -> str:
    return "-" if saving is None else f"{saving:.0%}"


def is_near(one: float, other: float) -> bool:
    return one > 0 < other and 1 / NEAR <= one / other <= NEAR


def examined(program: Program, budget: str) -> dict[str, Any]:
    """Try the program, print a row, and return what the totals count."""
    began = time.monotonic()
    found = tried(program.script, budget)
    minutes = (time.monotonic() - began) / 60
    rows = {row["change"]: row for row in found["changes"]}
    meant = [row for word, row in rows.items() if word.partition("=")[0] in program.changes]
    row = min(meant, key=lambda each: 0 if each["share"] is None else each["share"], default={})
    is_found = any(each["result"] == "faster" for each in meant)
    measured, promised = row.get("share"), row.get("predicted")
    hand = -compared(program.script, program.repaired).share if program.repaired else None
    best, again = found["best"], None
    if best:
        again = -compared(program.script, program.script, best).share
    wrong = again is not None and again < MARGIN
    cells = [
        "yes" if is_found else "" if program.repaired is None else "NO",
        percent(promised),
        percent(None if measured is None else -measured),
        percent(hand),
        f"{minutes:.1f}",
    ]
    advice = "nothing" if best is None else f"{best} ({percent(again)})"
    mark = "  WRONG" if wrong else ""
    print(
        f"{program.name:<26}{''.join(f'{cell:>9}' for cell in cells)}  {advice}{mark}", flush=True
    )
    promises = [
        is_near(each["predicted"], -each["share"])
        for each in rows.values()
        if each["predicted"] and each["share"] is not None
    ]
    return {
        "found": is_found,
        "healthy": program.repaired is None,
        "advised": best is not None,
        "wrong": wrong,
        "promises": promises,
    }


def examine(programs: list[Program], budget: str) -> bool:
    header = "".join(f"{column:>9}" for column in COLUMNS)
    print(f"{'program':<26}{header}  recommended (its saving, measured again)", flush=True)
    seen = []
    for program in programs:
        try:
            seen.append(examined(program, budget))
        except CaptureError as error:
            print(f"{program.name:<26} FAILED: {error}", flush=True)
    faulty = [each for each in seen if not each["healthy"]]
    healthy = [each for each in seen if each["healthy"]]
    promises = [each for row in seen for each in row["promises"]]
    wrong = sum(each["wrong"] for each in seen)
    print(
        f"Of {len(faulty)} programs with a fault, {sum(each['found'] for each in faulty)} are found. "
        f"Of {len(healthy)} healthy ones, {sum(each['advised'] for each in healthy)} get advice. "
        f"{wrong} of {sum(each['advised'] for each in seen)} pieces of advice are wrong.\n"
        f"{sum(promises)} of {len(promises)} promised savings are within a factor of {NEAR} of the measured."
    )
    return len(seen) == len(programs) and not wrong


def compare_with_themselves(programs: list[Program], times: int) -> bool:
    """Compare each program with itself; every verdict but "same" and "undecided" is false."""
    false = {"faster": 0, "slower": 0}
    for program in programs:
        found = [compared(program.script, program.script) for _ in range(times)]
        for each in found:
            if (verdict := each.verdict(MARGIN)) in false:
                false[verdict] += 1
        shares = " ".join(f"{each.share:+.1%}" for each in found)
        print(f"{program.name:<26}{shares}", flush=True)
    total = times * len(programs)
    print(f"Of {total} comparisons, {false['faster']} say faster, {false['slower']} say slower.")
    return false["faster"] <= 0.05 * total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders of benchmarks/outside")
    parser.add_argument("--budget", default="5m", help="of `instrument try`, for each program")
    parser.add_argument("--same", type=int, metavar="N", help="compare each with itself N times")
    args = parser.parse_args()
    names = args.names or sorted(path.parent.name for path in OUTSIDE.glob("*/fast.py"))
    programs = [found for name in names if (found := Program.of(OUTSIDE / name))]
    if args.same:
        return 0 if compare_with_themselves(programs, args.same) else 1
    return 0 if examine(programs, args.budget) else 1


if __name__ == "__main__":
    sys.exit(main())
