"""Many windows in one process: memory, open files and folders must not grow. Run by `make soak`, which takes minutes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from instrument import Session, profiled

pytestmark = pytest.mark.soak

KEPT = 5


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("export", "windows"), [("inline", 10_000), ("process", 200)])
def test_many_windows_leave_nothing_behind(tmp_path: Path, export: str, windows: int) -> None:
    """After a tenth of the windows everything has been made once; from then on nothing may be left of any."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    seen = []
    options = {"wait": 1, "active": 1, "repeat": windows, "keep": KEPT, "export": export, "export_queue": 1000}
    with Session(
        options, output_dir=str(tmp_path), sinks=["table"] if export == "process" else [], model=model
    ) as session:
        for step in range(2 * windows):
            with profiled("forward"):
                model(torch.ones(4, 8)).sum().backward()
            session.step()
            if step % (windows // 5) == 0:
                seen.append((resident_bytes(), open_files(), len(list(tmp_path.iterdir()))))
    assert len(session.captures) == len(list(tmp_path.iterdir())) == KEPT
    later = seen[len(seen) // 10 + 1 :]
    print(
        export,
        *(f"{memory / 1e6:.1f} MB, {files} files, {folders} folders" for memory, files, folders in later),
        sep="\n",
    )
    first, last = later[0], later[-1]
    assert last[0] - first[0] < max(10e6, 500 * windows), "memory grows with the number of windows"
    assert last[1] - first[1] <= 2
