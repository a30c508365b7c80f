"""A long job that records nothing until a user requests it or something unusual happens.

    python examples/long_job.py

While the job trains, run one of these in another shell, or on another node that shares the folder:

    instrument trigger profile --steps 5      # records five steps
    touch profile/record                      # records profiler.active steps
    kill -USR2 PID                            # the same; the job prints its PID at the start

The loader stalls once, and the trigger slow_step then records a window. Ctrl-C ends the job. Then
the job prints the windows that were recorded.
"""

import os
import time
from contextlib import suppress

import torch
from torch import nn

from instrument import Session, profiled

STALLS_AT = 200
TRIGGERS = {
    "file": {},
    "signal": {},
    "slow_step": {"factor": 20},
    "non_finite_loss": {},
    "memory_growth": {},
}


def batches(stalls_at=STALLS_AT):
    """Yield endless batches of points in the plane and their distances from the origin."""
    number = 0
    while True:
        if number == stalls_at:
            time.sleep(0.5)
        points = torch.randn(256, 2)
        yield points, points.norm(dim=1, keepdim=True)
        number += 1


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    print(f"kill -USR2 {os.getpid()} records the next steps", flush=True)

    # at_steps=[]: no scheduled windows, only those that triggers request
    session = Session(
        at_steps=[], warmup=1, active=3, sinks={"table": {"rows": 5}}, triggers=TRIGGERS
    )
    with suppress(KeyboardInterrupt), session:
        for points, distance in session.steps(batches()):
            with profiled("forward"):
                loss = nn.functional.mse_loss(model(points), distance)
            with profiled("backward"):
                loss.backward()
            with profiled("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            session.step(loss=loss)

    print(f"ended after {session.step_number} steps")
    for capture in session.captures:
        window = capture.metadata["window"]
        print(f"{capture.name}: {window['trigger']}, because {window['trigger_reason']}")


if __name__ == "__main__":
    main()
