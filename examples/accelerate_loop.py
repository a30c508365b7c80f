"""Profile a training loop with Accelerate, and send the results to its trackers.

    pip install 'torch-instrument[accelerate,tensorboard]'
    python examples/accelerate_loop.py

Such a loop needs only a `Session`. `session.steps(loader)` counts each batch as one step, also when
gradients are accumulated over several batches. The callback `Trackers` logs the ranges of each
window with `accelerator.log`, so that any tracker shows them as curves beside the loss. The tracker
is TensorBoard here, in `./runs/`. The captures are in `./profile/`.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instrument import Session, profiled
from instrument.integrations.accelerate import Trackers


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2, log_with="tensorboard", project_dir="runs"
    )
    accelerator.init_trackers("circle")

    points = torch.rand(2048, 2) * 2 - 1
    inside = (points.norm(dim=1, keepdim=True) < 0.7).float()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(points, inside), batch_size=128, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    sinks, trackers = {"table": {"rows": 5}}, Trackers(accelerator)
    with Session("summary", active=3, repeat=3, sinks=sinks, on_capture=trackers) as session:
        for inputs, targets in session.steps(loader):
            with accelerator.accumulate(model):
                with profiled("forward"):
                    loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
                with profiled("backward"):
                    accelerator.backward(loss)
                with profiled("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=session.step_number)
    accelerator.end_training()

    for capture in session.captures:
        (backward,) = capture.ranges.where(name="backward")
        milliseconds = backward.cpu_ns / len(capture.steps) / 1e6
        print(f"{capture.name}: backward took {milliseconds:.3f} ms a step")


if __name__ == "__main__":
    main()
