"""Training of a small classifier on synthetic data.

    python train.py

A frozen encoder makes features, and a head is trained on them. With several processes, started by
torchrun, each step averages the gradients with one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from instrument import Session, profiled

WIDTH, CLASSES, BATCH = 32, 10, 64


class Classifier(nn.Module):
    """A frozen encoder and a head with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("encoder", torch.randn(WIDTH, WIDTH))
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.normalize = torch.compile(normalize, backend="eager")

    @profiled("encode")
    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        used = WIDTH // 2
        features = x[:, :used] @ self.encoder[:used]
        return features.relu_()

    @profiled("forward")
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.hidden(self.normalize(self.encode(x))))
        return self.head(hidden)


def normalize(features: Tensor) -> Tensor:
    centered = features - features.mean(dim=1, keepdim=True)
    return centered / centered.std(dim=1, keepdim=True).clamp(min=1e-3)


@profiled("average_gradients")
def average_gradients(model: nn.Module) -> None:
    if not dist.is_initialized():
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, average in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(average.view_as(gradient))


class Trainer:
    """A model, its optimizer, and the sum of the losses so far."""

    def __init__(self) -> None:
        self.model = Classifier()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.total_loss = torch.zeros(())

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        with profiled("loss"):
            loss = functional.cross_entropy(self.model(inputs), targets)
        with profiled("backward"):
            loss.backward()
        average_gradients(self.model)
        self.optimizer.step()
        with profiled("metrics"):
            # The sum stays on the device. To read it in each step would wait for the device.
            self.total_loss.add_(loss.detach())


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random samples, whose classes depend on their largest features."""
    for _ in range(count):
        inputs = torch.randn(BATCH, WIDTH)
        yield inputs, inputs[:, :CLASSES].argmax(dim=1)


def main() -> None:
    torch.manual_seed(0)
    trainer, steps = Trainer(), 50
    with Session("full", sinks={}, wait=2, repeat=3) as session:
        for inputs, targets in session.steps(batches(steps)):
            trainer.step(inputs, targets)
    print(f"mean loss {trainer.total_loss.item() / steps:.3f}, captures in {session.output_dir}")


if __name__ == "__main__":
    main()
