"""Profile a Lightning fit with one callback.

    pip install 'torch-instrument[lightning]'
    python examples/lightning_fit.py

The callback takes the arguments of `Session`: here the name of a preset, and one option. Each
submodule is a range with its qualified name. Each part of a step, from `data` to `optimizer_step`,
is a range too. Only the loss is marked in the code. The log shows a table of the ranges and
operators of batches 5 to 7. The capture is in `./profile/`.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instrument import profiled
from instrument.integrations.lightning import ProfilerCallback


class Encoder(nn.Sequential):
    """Maps a point in the plane to features."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


class Circle(lightning.LightningModule):
    """Learns which points lie inside a circle."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder = Encoder(width)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, inside = batch
        logits = self.head(self.encoder(points)).squeeze(1)
        with profiled("loss"):
            return F.binary_cross_entropy_with_logits(logits, inside)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0)
    points = torch.rand(4096, 2) * 2 - 1
    inside = (points.norm(dim=1) < 0.7).float()
    loader = DataLoader(TensorDataset(points, inside), batch_size=128, shuffle=True)

    profiler = ProfilerCallback("summary", wait=4)
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[profiler],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Circle(), loader)

    for capture in profiler.session.captures:
        for row in capture.ranges.where("name in ('encoder', 'loss')"):
            print(f"{capture.name}: {row.name} took {row.cpu_ns / row.calls / 1e6:.3f} ms a call")


if __name__ == "__main__":
    main()
