"""What each rank of a job runs for `test_ranks.py`: sessions one after another, around one model of DDP on gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from instrument import Session, Trigger
from instrument.record import distributed, trigger_runner
from instrument.record.triggers import Step

# A window begins two steps after its announcement. All ranks announce and read within each step.
trigger_runner.POLL_SECONDS = 1000
distributed.POLL_SECONDS = 0
distributed._CONNECT_S = 120
FOLDER = Path(os.environ["FOLDER"])


class OnRank(Trigger):
    """Fires after step 3 of one rank."""

    rank: int

    def fires(self, step: Step) -> str | None:
        return "it is time" if step.number == 3 and dist.get_rank() == self.rank else None


def train_step(model: nn.Module) -> None:
    model(torch.ones(4, 8)).mean().backward()
    model.zero_grad()


def scheduled(model: nn.Module, **options: Any) -> None:
    with Session(wait=1, active=2, export="inline", **options) as session:
        for _ in session.steps(range(6)):
            train_step(model)


def asked_for(model: nn.Module, **options: Any) -> None:
    """Trains some steps, and in each looks for requests, as the polling thread does."""
    with Session(active=3, at_steps=[], export="inline", **options) as session:
        for _ in session.steps(range(20)):
            train_step(model)
            look(session)
            dist.barrier()
            look(session)


def look(session: Session) -> None:
    triggers = session._loop.run.triggers if session._loop.run is not None else None
    if triggers is not None:
        for each in triggers._triggers.values():
            if each.callbacks.poll is not None:
                each.callbacks.poll()
        triggers.exchange()


def roles(model: nn.Module) -> None:
    """Two data-parallel copies of two ranks, whose tensor-parallel groups reduce in each step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options = {"ranks": "one_per_role", "sinks": {"table": {}}, "output_dir": FOLDER / "roles"}
    with Session(wait=1, active=2, export="inline", **options) as session:
        for _ in session.steps(range(6)):
            dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))
            train_step(model)


class Touch(Trigger):
    """Touches a file after step 5 of rank 0, and asks for nothing."""

    path: Path

    def fires(self, step: Step) -> None:
        if step.number == 5 and dist.get_rank() == 0:
            self.path.touch()


def touched(model: nn.Module) -> None:
    """Rank 0 touches the file of the trigger, which all of them see."""
    folder = FOLDER / "touched"
    asked_for(
        model, triggers={"file": {}, "touch": Touch(path=folder / "record")}, output_dir=folder
    )


def killed(model: nn.Module) -> None:
    """Rank 1 is killed in its window."""
    with Session(active=1000, export="inline", output_dir=FOLDER / "killed") as session:
        for number in session.steps(range(50)):
            if number == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(model)


SCENARIOS: dict[str, Callable[[nn.Module], None]] = {
    "all": scheduled,
    "two": lambda model: scheduled(model, ranks=[0, 3], output_dir=FOLDER / "two"),
    "first": lambda model: scheduled(model, ranks="first_per_node", output_dir=FOLDER / "first"),
    "roles": roles,
    "fired": lambda model: asked_for(
        model, triggers={"mine": OnRank(rank=1)}, output_dir=FOLDER / "fired"
    ),
    "fired_of_two": lambda model: asked_for(
        model, triggers={"mine": OnRank(rank=3)}, ranks=[1, 3], output_dir=FOLDER / "fired_of_two"
    ),
    "touched": touched,
    "killed": killed,
}


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    for name in config.scenarios:
        SCENARIOS[name](model)
    # destroyed after its process group, it would wait for a thread of gloo that may wait for the GIL
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    # what torchrun does, but the ranks are forked from the agent and need not load torch
    elastic_launch(
        LaunchConfig(
            min_nodes=2,
            max_nodes=2,
            nproc_per_node=2,
            run_id="none",
            rdzv_backend="c10d",
            rdzv_endpoint=os.environ["ENDPOINT"],
            rdzv_configs={"is_cpu": "false"},
            max_restarts=0,
            start_method="fork",
        ),
        main,
    )()
