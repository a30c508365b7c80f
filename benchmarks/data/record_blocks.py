"""Record real ABBA blocks of the same program, for `benchmarks/ab.py` and the tests of `instrument ab`.

A block is four runs. Each run is a process of its own, forked from one that has loaded torch, and records a window of
12 small training steps through a session. All runs execute the same code, so that a difference between them is noise.
In every second group of ten blocks, a process beside keeps a CPU busy.

    python benchmarks/data/record_blocks.py benchmarks/data/blocks.npz
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers load it at their first step
from loguru import logger
from torch import nn

from instrument import Session, profiled
from instrument.read.capture import Capture
from instrument.read.compare.ab_runs import read_run

BLOCKS, RUNS, STEPS, WARM_UP = 400, 4, 12, 2
ALIKE = 10  # consecutive blocks that are all recorded with the hog, or all without it
HOG = [sys.executable, "-c", "while True: pass"]
RANGES = (
    "data",
    "load",
    "attention",
    "mlp",
    "loss",
    "optimizer",
    "optimizer/Optimizer.step#Adam.step",
    "optimizer/Optimizer.zero_grad#Adam.zero_grad",
    "(no range)",
)
COUNTERS = ("calls", "flops")
WIDTH = 96


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    @profiled("attention")
    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(query, key, value)

    @profiled("mlp")
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    options: dict[str, Any] = {"warmup": WARM_UP, "active": STEPS, "with_flops": True}
    with Session(output_dir=folder, export="inline", **options) as session:
        for _ in session.steps(range(WARM_UP + STEPS)):
            with profiled("load"):
                x = torch.randn(8, 64, WIDTH)
            out = model(x)
            with profiled("loss"):
                loss = nn.functional.mse_loss(out, x)
            loss.backward()
            with profiled("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


def measured(folder: Path) -> dict[str, list[int]]:
    """The step times of the window in a folder, the median of each range over the steps but the first, and counters."""
    record = read_run(folder, "A")
    assert set(record.ranges_ns) == set(RANGES), list(record.ranges_ns)
    capture = Capture.load(next(folder.glob("*/capture.json")).parent)
    operators = capture.operators
    return {
        "step_ns": capture.steps.column("duration_ns"),
        "range_ns": [round(record.ranges_ns[name]) for name in RANGES],
        "counters": [sum(value or 0 for value in operators.column(name)) for name in COUNTERS],
    }


def run() -> dict[str, list[int]]:
    """Fork a process that trains; it answers through a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder))
            os.write(writing, json.dumps(measured(Path(folder))).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    found: dict[str, list[int]] = json.loads(text)
    return found


@contextmanager
def hog() -> Iterator[None]:
    """Keep a CPU busy within the block."""
    process = subprocess.Popen(HOG)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    logger.disable("instrument")
    blocks, beside, began = [], [], time.monotonic()
    for first in range(0, BLOCKS, ALIKE):
        with_hog = first // ALIKE % 2 == 1
        with hog() if with_hog else nullcontext():
            blocks += [[run() for _ in range(RUNS)] for _ in range(ALIKE)]
        beside += [with_hog] * ALIKE
        print(f"{len(blocks)} of {BLOCKS} blocks, {time.monotonic() - began:.0f} s", flush=True)
    columns = {
        name: np.array([[each[name] for each in block] for block in blocks])
        for name in blocks[0][0]
    }
    np.savez_compressed(
        sys.argv[1],
        step_us=np.round(columns["step_ns"] / 1e3).astype(np.uint32),
        range_ns=columns["range_ns"].astype(np.uint32),
        counters=columns["counters"],
        hog=np.array(beside),
        ranges=np.array(RANGES),
        counter_names=np.array(COUNTERS),
    )


if __name__ == "__main__":
    main()
