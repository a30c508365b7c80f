"""Run `instrument ab` live: ten times on equal programs, and ten times on each of three changes.

The program is a loop in plain Python that writes the times of its steps as a trace. So a run
takes a tenth of a second. In B, one range takes 0, 5, 10 or 20 % more time. A trial with equal
programs is wrong if it reports a change. A trial with a slower range is wrong if it does not report
this range, if it reports another range, or if the interval does not contain the change.

    python benchmarks/ab_live.py
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from typing import Any

from instrument.cli.command import main as instrument

TRIALS = 10
# For each planted change: the number of blocks, and how many trials must be right. Of 100 trials
# without a change, 5 may be wrong.
WANTED = {0.0: (16, 9), 0.05: (64, 5), 0.1: (32, 8), 0.2: (16, 9)}
ADDITIONS = 6_000
PROGRAM = """
import json, os, sys
from time import perf_counter_ns
folder = os.environ["INSTRUMENT_DIR"] + "/steps_0-39"
os.makedirs(folder)
events = []
for step in range(40):
    times = [perf_counter_ns()]
    for additions in (6000, int(sys.argv[1]), 3000):
        total = 0
        for number in range(additions):
            total += number * number
        times.append(perf_counter_ns())
    spans = [(f"ProfilerStep#{step}", times[0], times[-1]),
             *zip(("attention", "mlp", "loss"), times, times[1:])]
    events += [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1,
         "ts": begin / 1000, "dur": (end - begin) / 1000}
        for name, begin, end in spans
    ]
for name, content in (("trace", {"traceEvents": events}), ("capture", {"format": 1})):
    with open(f"{folder}/{name}.json", "w") as file:
        json.dump(content, file)
"""


def compared(additions: int, blocks: int) -> dict[str, Any]:
    """The result of `instrument ab`, where the range `mlp` of B makes this number of additions."""
    command = shlex.join([sys.executable, "-S", "-E", "-c", PROGRAM])
    options = ["--a", f"{command} {ADDITIONS}", "--b", f"{command} {additions}"]
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        assert instrument(["ab", *options, "--blocks", str(blocks), "--json"]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def is_right(found: dict[str, Any], planted: float) -> bool:
    changed = [each for each in found["ranges"] if each["verdict"] in ("slower", "faster")]
    if not planted:
        return not changed and found["verdict"] not in ("slower", "faster")
    return [each["path"] for each in changed] == ["mlp"] and (
        changed[0]["low"] <= planted <= changed[0]["high"]
    )


def main() -> int:
    reached = True
    for planted, (blocks, wanted) in WANTED.items():
        right = 0
        for number in range(1, TRIALS + 1):
            found = compared(round(ADDITIONS * (1 + planted)), blocks)
            right += is_right(found, planted)
            result = "right" if is_right(found, planted) else "WRONG"
            print(f"mlp {planted:+.0%}, trial {number}: {result}")
            for each in (found["step"], *found["ranges"]):
                interval = f"{each['low']:+.1%} to {each['high']:+.1%}"
                name = each["path"] or "step"
                print(
                    f"  {name:<10} {each['verdict']:<10} {each['share']:+.1%} ({interval})",
                    flush=True,
                )
        reached &= right >= wanted
        result = "reached" if right >= wanted else "MISSED"
        print(
            f"mlp {planted:+.0%}, {blocks} blocks: {right} of {TRIALS} right, "
            f"at least {wanted}: {result}"
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
