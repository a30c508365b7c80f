"""Measure what a simulation costs, and compare simulated steps with real ones; run by `make bench`.

The cost of a simulation is compared with the cost of reading the trace. It is measured on real
traces from the folder INSTRUMENT_TRACES, and on a million events: copies of one of these traces.

The edits are those of `tests/whatif/measured_edits.py`. Each edit has a program, which is recorded
with and without the change that the edit simulates.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from loguru import logger
from rounds import Row, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from findings.twins import recorded
from whatif.measured_edits import EDITS

from instrument.read.simulate.scenario import Scenario, scenario
from instrument.read.trace import reader
from instrument.read.views.views import Views

ROUNDS = 5
TRACES = ("v100_216k_events", "v100_resnet50_workers0", "a100_nccl_2ranks_rank0", "mtia_rank0")
REPEATED = "v100_ns_resolution"
EVENTS = 1_000_000
MOST_OFF = 0.03  # of the step as it was recorded
# Names and arguments that must differ between the copies of a trace.
_IDS = ("correlation", "External id", "Sequence number")


def repeated(source: Path, target: Path) -> Path:
    """Write copies of a trace one after the other, until there are at least `EVENTS` events."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    events = document["traceEvents"]
    lasting = [event for event in events if event.get("ph") == "X"]
    begin = min(event["ts"] for event in lasting)
    span = max(event["ts"] + event["dur"] for event in lasting) - begin + 1000
    most = 1 + max(
        event["args"].get(name, 0) for event in lasting for name in _IDS if "args" in event
    )
    copies = -(-EVENTS // len(lasting))
    found = [event for event in events if event.get("ph") != "X"]
    for k in range(copies):
        for event in lasting:
            given = event.get("args", {})
            args = {
                **given,
                **{name: given[name] + k * most for name in _IDS if given.get(name, 0) > 0},
            }
            name = event["name"]
            if name.startswith("ProfilerStep#"):
                name = f"ProfilerStep#{int(name[13:]) + 1000 * k}"
            found.append({**event, "name": name, "ts": event["ts"] + k * span, "args": args})
    target.write_text(json.dumps({**document, "traceEvents": found}))
    return target


def timed(act: Callable[[], object]) -> float:
    start = time.process_time_ns()
    act()
    return time.process_time_ns() - start


def simulated(capture: Views) -> Scenario:
    """Return the scenario of a capture, with the model that its first simulation has built."""
    found = scenario(capture)
    _ = found.baseline_ns
    return found


def costs(name: str, path: Path) -> list[Row]:
    """Measure by turns how long it takes to read, to build the model, to edit, and to profile."""
    times: dict[str, list[float]] = {"read": [], "build": [], "edit": [], "profile": []}
    for _ in range(ROUNDS):
        times["read"].append(timed(lambda: reader.read(path)))
        capture = Views.load(path)
        _ = capture.events
        built: list[Scenario] = []
        times["build"].append(
            timed(lambda capture=capture, to=built: to.append(simulated(capture)))
        )
        (whatif,) = built
        times["edit"].append(
            timed(lambda whatif=whatif: whatif.scale(operator="*", by=0.5).step_ns)
        )
        times["profile"].append(timed(lambda whatif=whatif: whatif.profile()))
    ns = {what: statistics.median(values) for what, values in times.items()}
    return [
        Row(f"{name}: build the model", ns["build"], "reading the trace", ns["read"], 1.0),
        Row(f"{name}: one edit", ns["edit"], "reading the trace", ns["read"], 0.1),
        Row(f"{name}: causal profile", ns["profile"], "reading the trace", ns["read"], 2.0),
    ]


def reality() -> bool:
    """Print the predicted and the measured step of each edit.

    Returns:
        Whether all errors are small enough.
    """
    print(f"\nSimulated edits, compared with the changed programs: torch {torch.__version__}")
    print(f"{'edit':<36}{'step':>12}{'predicted':>12}{'measured':>12}{'error of the step':>20}")
    reached = True
    for twin, edit in EDITS:
        rounds = []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                both = recorded(twin, Path(folder))
                rounds.append((both.slow_ns, both.fixed_ns, edit(both.slow.whatif).step_ns))
        # Other programs disturbed the fastest recording least.
        slow, fixed, predicted = min(rounds)
        error = (predicted - fixed) / slow
        reached &= abs(error) <= MOST_OFF
        times = "".join(f"{ns / 1e6:>9.3f} ms" for ns in (slow, predicted, fixed))
        verdict = "reached" if abs(error) <= MOST_OFF else "MISSED"
        print(f"{twin.name:<36}{times}{error:>19.2%}  {verdict}")
    return reached


def main() -> int:
    logger.remove()
    warnings.simplefilter("ignore")
    reached = reality()
    folder = os.environ.get("INSTRUMENT_TRACES")
    if folder is None:
        print("No costs were measured: set INSTRUMENT_TRACES to a folder with real traces.")
        return 0 if reached else 1
    rows = []
    with tempfile.TemporaryDirectory() as made:
        rows += costs(
            "10⁶ events", repeated(Path(folder, f"{REPEATED}.json.gz"), Path(made, "million.json"))
        )
        for name in TRACES:
            rows += costs(name, Path(folder, f"{name}.json.gz"))
    is_fast = report("Simulating a step, compared with reading its trace", rows)
    return 0 if is_fast and reached else 1


if __name__ == "__main__":
    sys.exit(main())
