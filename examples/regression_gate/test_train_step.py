"""Budgets for one training step. Times vary on shared machines; these counters do not.

pytest                  # fails if a counter of a step is above its limit
pytest --perf-update    # stores the current counters in perf/; then review the change in git
pytest --perf-report    # prints all counters
"""

import pytest
import torch
import torch.distributed as dist
from train import Trainer, batches


@pytest.fixture
def process_group(tmp_path):
    """A process group with one process, so that collectives run without a second process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


pytestmark = pytest.mark.usefixtures("process_group")


def record(session):
    torch.manual_seed(0)
    trainer, data = Trainer(), list(batches(4))
    with session:
        for inputs, targets in session.steps(data):
            trainer.step(inputs, targets)


@pytest.mark.perf_budget(syncs=0, graph_breaks=0, collectives={"all_reduce": 1}, peak="1MB")
def test_what_a_step_must_never_do(profile_session):
    record(profile_session)


@pytest.mark.perf_budget
def test_a_step_does_no_more_than_before(profile_session):
    record(profile_session)
