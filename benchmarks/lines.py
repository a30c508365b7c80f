"""What sampling lines costs a step: tiny operators, pure Python, a step of training, a request; blocks on and off in turn."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rounds import Row, report
from torch import nn

from instrument.record.lines import LineSampler, Moment

PAIRS, BLOCK_S = 60, 0.25
MODEL = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=1e-6)
BATCH, SMALL = torch.randn(64, 256), torch.randn(8)
BODY = json.dumps({"text": "x" * 200, "numbers": list(range(500))})


def tiny_operators() -> None:
    for _ in range(500):
        SMALL + 1


def pure_python() -> None:
    total = 0
    for k in range(50_000):
        total += k & 7


def training() -> None:
    OPTIMIZER.zero_grad()
    MODEL(BATCH).sum().backward()
    OPTIMIZER.step()


def request() -> None:
    numbers = json.loads(BODY)["numbers"]
    with torch.no_grad():
        answer = MODEL(torch.tensor(numbers[:256], dtype=torch.float32)[None])
    json.dumps(answer.tolist())


def steps_of(act: Callable[[], object], seconds: float = BLOCK_S) -> float:
    """The mean time of a call, in ns of the CPU time of this thread and of the sampler together."""
    calls, began, until = 0, time.process_time_ns(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        act()
        calls += 1
    return (time.process_time_ns() - began) / calls


def row(act: Callable[[], object]) -> Row:
    path, moment = Path(tempfile.mkdtemp()) / "lines.json", Moment("train", 1, False)
    on, off = [], []
    steps_of(act)
    for pair in range(PAIRS):
        for is_on in (True, False) if pair % 2 else (False, True):
            sampler = LineSampler(path, lambda: moment)
            if is_on:
                sampler.start()
            (on if is_on else off).append(steps_of(act))
            sampler.stop()
    return Row(f"a call of {act.__name__}, sampled", median(on), "not sampled", median(off), 1.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    acts = (tiny_operators, pure_python, training, request)
    sys.exit(0 if report("Sampling lines", [row(act) for act in acts]) else 1)
