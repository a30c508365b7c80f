"""`instrument try` and `instrument run --with`, with a script that runs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command

# A step sleeps longer while anomalies are searched for, so that a busy machine changes little.
SCRIPT = """
import sys, time
import torch
from torch import nn

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.1 if torch.is_anomaly_enabled() else 0.03)
print("anomalies:", torch.is_anomaly_enabled())
open("result.txt", "w").write("done")
"""


RANKS = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def train(rank, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(train, (os.path.abspath(f"store-{os.getpid()}"),), nprocs=2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_change_is_measured_certified_and_verified(folder: Path, command: Command) -> None:
    words = ["try", "--yes", "--steps", 2, "no-anomaly", "--", "train.py", 100_000]
    printed = command(*words)
    assert "no-anomaly: faster" in printed.err
    assert "Without an edit: instrument run --with no-anomaly train.py 100000" in printed.out
    found = json.loads(command(*words[:2], "--json", *words[2:]).out)  # nothing runs again
    assert found["best"] == "no-anomaly"
    (change,) = found["changes"]
    assert change["verdict"] == "faster and equal"
    assert change["losses"] == "bit-equal"
    assert change["low"] < -0.3 < change["high"] + 0.4
    assert "no-anomaly" in command(*words[:2], "--markdown", *words[2:]).out
    command("verify", change["proof"])
    assert sorted(each.name for each in folder.iterdir()) == ["train.py", "tried"]
    assert not [*folder.rglob("result.txt")]  # each run was ended before


def test_a_script_trains_with_changes(folder: Path) -> None:
    done = _instrument(
        "run", "profiler.enabled=false", "--with", "no-anomaly,threads=1", "train.py", "5"
    )
    assert (done.returncode, done.stdout) == (0, "anomalies: False\n")
    assert (folder / "result.txt").read_text() == "done"
    done = _instrument("run", "profiler.enabled=false", "--with", "fused", "train.py", "5")
    assert done.returncode == 0
    done = _instrument("run", "--with", "nothing", "train.py")
    assert done.returncode == 2
    assert "There is no change 'nothing'" in done.stderr


@pytest.mark.usefixtures("folder")
def test_nothing_runs_unless_somebody_agrees(command: Command) -> None:
    printed = command("try", "train.py", 3, status=2)
    assert "at most" in printed.err
    assert "--yes" in printed.err
    assert "no-anomaly: Stops anomaly detection" in command("try", "--dry-run", "train.py").out
    assert "There is no change 'fast'" in command("try", "fast", "--", "train.py", status=2).err
    assert "needs a script" in command("try", "--yes", "fused", status=2).err


def test_what_cannot_be_tried_is_said(folder: Path, command: Command) -> None:
    words = ["try", "--yes", "fused", "--"]
    assert "launcher" in command(*words, "-m", "torch.distributed.run", "train.py", status=2).err
    Path("tried/copy").mkdir(parents=True)
    Path("tried/copy/train.py").write_text("")
    assert "train.py has changed since" in command(*words, "train.py", status=2).err
    with (folder / "tried/lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "Another instrument try uses" in command(*words, "train.py", status=2).err


@pytest.mark.usefixtures("folder")
def test_a_script_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INSTRUMENT_TRIAL", str(tmp_path / "nobody"))
    assert _instrument("run", "profiler.enabled=false", "train.py", "1000000").returncode == 1


@pytest.mark.usefixtures("folder")
def test_ranks_are_recorded_that_wait_for_each_other(command: Command) -> None:
    Path("train.py").write_text(RANKS)
    printed = command("try", "--yes", "--steps", 1, "bucket-view", "--", "train.py")
    assert "bucket-view: " in printed.err
    assert "not " not in printed.err


def _instrument(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", *words],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
