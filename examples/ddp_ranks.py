"""Many ranks: with DDP under torchrun, each rank records the same steps into one folder.

    torchrun --nproc-per-node 2 examples/ddp_ranks.py
    torchrun --nproc-per-node 4 examples/ddp_ranks.py first_per_node

Each recorded rank prints the mean time of its steps, and the part of this time that it spends in
the all-reduce of gradients. Rank 1 has more work, so all other ranks wait for it. The captures are
in `./profile/`.
"""

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from instrument import Capture, Session, profiled


def train(session: Session, rank: int) -> None:
    """Twenty steps of a small regression, with more samples on rank 1."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(4096 if rank == 1 else 64, 64)
    for _ in session.steps(range(20)):
        with profiled("forward"):
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def report(capture: Capture, rank: int) -> None:
    """Print one line about a window of this rank."""
    numbers = capture.steps.column("number")
    (reduced,) = capture.operators.where(name="gloo:all_reduce")
    step_ms = sum(capture.steps.column("duration_ns")) / len(numbers) / 1e6
    reduced_ms = reduced.cpu_ns / len(numbers) / 1e6
    times = f"{step_ms:.3f} ms a step, {reduced_ms:.3f} ms of it in all_reduce"
    print(f"rank {rank}, steps {numbers}: {times}")


def main() -> None:
    """Train and report; all ranks record, or only those that the command line names."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    chosen = sys.argv[1] if len(sys.argv) > 1 else "all"
    with Session(wait=10, warmup=1, active=3, ranks=chosen) as session:
        train(session, rank)
    for capture in session.captures:
        report(capture, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
