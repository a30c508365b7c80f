"""What each of four ranks runs for `test_watch_command.py` and a picture of the documentation: DDP on gloo, with a rank that sleeps 10 ms in `forward`.

torchrun --nproc-per-node 4 tests/watched_training.py FOLDER SLOW_RANK
"""

from __future__ import annotations

import sys
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instrument import Session, profiled

EVERY, LINES = 20, 3


def main(folder: str, slow: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(32, 64)
    options = {"timings": {"every": EVERY}, "at_steps": [5], "active": 2, "output_dir": folder}
    with Session("trace", **options) as session:
        for _ in session.steps(range(EVERY * LINES)):
            with profiled("forward"):
                loss = model(batch).mean()
                time.sleep(0.03 + 0.01 * (dist.get_rank() == slow))
            with profiled("backward"):
                loss.backward()
            with profiled("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    # destroyed after its process group, it would wait for a thread of gloo that may wait for the GIL
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
