"""Many windows in one process: memory, open files and folders must not grow (`make soak`)."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from instrument import Session, profiled

pytestmark = pytest.mark.soak

KEPT, WAITING = 5, 8


class Held(NamedTuple):
    """What this process and its worker hold."""

    memory_mb: float
    exporter_mb: float
    files: int
    folders: int


def held(output: Path) -> Held:
    """Samples once the worker and retention have caught up, or after a minute."""
    end = time.monotonic() + 60
    while len(list(output.iterdir())) > KEPT + 1 and time.monotonic() < end:
        time.sleep(0.1)
    gc.collect()
    children = [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    exporter = sum(resident_mb(pid) for pid in children)
    return Held(
        resident_mb("self"),
        exporter,
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(output.iterdir())),
    )


def resident_mb(process: str) -> float:
    return (
        int(Path(f"/proc/{process}/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 1e6
    )


@pytest.mark.parametrize(("export", "windows"), [("inline", 10_000), ("process", 200)])
def test_many_windows_leave_nothing_behind(tmp_path: Path, export: str, windows: int) -> None:
    """Nothing may grow after the first fifth of the windows, which creates everything once."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    options = {"wait": 1, "active": 1, "repeat": windows, "keep": KEPT, "export": export}
    sinks = ["table"] if export == "process" else []
    with Session(options, output_dir=str(tmp_path), sinks=sinks, model=model) as session:
        samples = [
            held(tmp_path) for _ in range(5) if train(session, model, windows // 5, tmp_path)
        ]
    print(export, *samples, sep="\n")
    assert len(session.captures) == len(list(tmp_path.iterdir())) == KEPT
    first, last = samples[0], samples[-1]
    assert last.memory_mb - first.memory_mb < 10
    assert last.exporter_mb - first.exporter_mb < 10
    assert last.files <= first.files + 1  # one that is just being written
    assert max(sample.folders for sample in samples) <= KEPT + 1, "the captures and the run's lock"


def train(session: Session, model: torch.nn.Module, windows: int, output: Path) -> bool:
    """Record windows, no faster than they are finished."""
    for _ in range(windows):
        for _ in range(2):
            with profiled("forward"):
                model(torch.ones(4, 8)).sum().backward()
            session.step()
        while len(list(output.glob(".*"))) >= WAITING:
            pass
    return True
