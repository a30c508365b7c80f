"""What the end of a window costs the training loop, beside torch's own ways; run by `make bench`.

Each measurement is a process of its own, so that its peak is its own, on one torch thread, which leaves the exporter a
core where there are two; the contestants take turns. torch's table of a million events takes minutes: it is made once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from rounds import Row, report

SIZES = (200_000, 1_000_000)
ROUNDS = 3
EVENTS_OF_A_TURN = 2100
# Enough unrecorded steps around the window to tell what one takes.
BESIDE = 200
Measured = dict[str, float]


class Training:
    """A training loop whose single step inside the window makes so many events."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)
        self.x = torch.randn(2, 5, 16)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.model(self.x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    act()
    return time.perf_counter_ns() - start


def ours(folder: Path, events: int) -> Measured:
    """A session with the table sink, its exporter working while the loop goes on."""
    from loguru import logger

    from instrument import Session

    logger.remove()
    training = Training()
    session = Session(
        wait=BESIDE, active=1, output_dir=str(folder), activities=["cpu"], sinks=["table"]
    )
    session.start()
    before = [step(training, session) for _ in range(BESIDE - 1)]
    training.turns(1)
    stood_still = timed(session.step)  # the window begins
    training.turns(events // EVENTS_OF_A_TURN)
    stood_still += timed(session.step)  # and ends
    peak = peak_bytes()
    while_exporting = []
    while not session.captures:
        while_exporting.append(step(training, session))
    session.stop()
    return {
        "ns": stood_still,
        "peak": peak,
        "step_before_ns": statistics.median(before),
        "step_meanwhile_ns": statistics.median(while_exporting),
    }


def step(training: Training, session: object) -> float:
    """One unrecorded step."""

    def act() -> None:
        training.turns(1)
        session.step()  # type: ignore[attr-defined]

    return timed(act)


def bare(folder: Path, events: int) -> Measured:
    """No more than torch needs, with the options that a session gives it: start, stop, and one plain native export.

    It lets go of the recording as a session does: that takes 0.4 s for a million events, and keeping it their memory.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler.profiler import _KinetoProfile

    from instrument.record.config.schema import ProfilerConfig
    from instrument.record.torch_support import experimental_options

    options = torch._C._profiler._ExperimentalConfig(**experimental_options(ProfilerConfig()))
    profiler = _KinetoProfile(activities=[ProfilerActivity.CPU], experimental_config=options)
    training = Training()
    training.turns(BESIDE)
    stood_still = timed(lambda: (profiler.prepare_trace(), profiler.start_trace()))
    training.turns(events // EVENTS_OF_A_TURN)

    def end() -> None:
        nonlocal profiler
        profiler.stop_trace()
        profiler.export_chrome_trace(str(folder / "trace.json"))
        del profiler

    stood_still += timed(end)
    return {"ns": stood_still, "peak": peak_bytes()}


def torch_profiler(folder: Path, events: int) -> Measured:
    """What torch's documentation shows: a schedule, its TensorBoard handler with gzip, and a table."""
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    warnings.simplefilter("ignore")
    write = tensorboard_trace_handler(str(folder), use_gzip=True)

    def ready(profiler: profile) -> None:
        write(profiler)
        (folder / "table.txt").write_text(
            profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15)
        )

    training = Training()
    training.turns(BESIDE - 2)
    plan = schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready
    ) as profiler:
        training.turns(1)
        stood_still = timed(profiler.step)
        training.turns(1)
        stood_still += timed(profiler.step)
        training.turns(events // EVENTS_OF_A_TURN)
        stood_still += timed(profiler.step)
    return {"ns": stood_still, "peak": peak_bytes()}


CONTESTANTS: dict[str, Callable[[Path, int], Measured]] = {
    "ours": ours,
    "bare": bare,
    "torch": torch_profiler,
}


def peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def measured(name: str, events: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, folder, str(events)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    found: Measured = json.loads(done.stdout.splitlines()[-1])
    print(
        f"  {name:<8}{events:>10,} {found['ns'] / 1e9:8.2f} s{found['peak'] / 1e6:10.0f} MB",
        file=sys.stderr,
    )
    return found


def rows_of(events: int) -> list[Row]:
    runs: dict[str, list[Measured]] = {"ours": [], "bare": []}
    for turn in range(ROUNDS):
        for name in ("ours", "bare") if turn % 2 else ("bare", "ours"):
            runs[name].append(measured(name, events))
    theirs = measured("torch", events)
    middle = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }
    mine, alone = middle["ours"], middle["bare"]
    what = f"loop stands still, {events:,} events"
    return [
        Row(what, mine["ns"], "torch, .gz and key_averages() table", theirs["ns"], 1 / 5),
        Row(what, mine["ns"], "stop_trace, native export, let go of it", alone["ns"], 1.10),
        Row(
            f"peak, {events:,} events",
            mine["peak"] / 1e6,
            "the same two alone",
            alone["peak"] / 1e6,
            1.05,
            "MB",
        ),
        Row(
            "step while exporting",
            mine["step_meanwhile_ns"],
            "step before",
            mine["step_before_ns"],
            1.10,
        ),
    ]


def main() -> int:
    if len(sys.argv) == 4:
        print(json.dumps(CONTESTANTS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
        return 0
    rows = [row for events in SIZES for row in rows_of(events)]
    title = f"The end of a window: torch {version('torch')}, medians of {ROUNDS} turns, torch's own way once"
    return 0 if report(title, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
