"""Profile an Ignite engine and its evaluator.

    pip install 'torch-instrument[ignite]'
    python examples/ignite_engine.py

A step is an iteration. The evaluator is attached to the same session, as the phase `validation`,
with its own count of iterations. They are recorded because `phases` names this phase. The log shows
a table for each window; the captures are in `./profile/`.
"""

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instrument import profiled
from instrument.integrations.ignite import attach


def main() -> None:
    torch.manual_seed(0)
    points = torch.rand(2048, 2) * 2 - 1
    inside = (points.norm(dim=1, keepdim=True) < 0.7).float()
    loader = DataLoader(TensorDataset(points, inside), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = nn.BCEWithLogitsLoss()

    def train_step(_: Engine, batch: tuple[Tensor, Tensor]) -> float:
        inputs, targets = batch
        with profiled("forward"):
            loss = loss_fn(model(inputs), targets)
        with profiled("backward"):
            loss.backward()
        with profiled("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    trainer = Engine(train_step)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(loss_fn)})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loader))

    session = attach(trainer, "summary", phases=["train", "validation"], model=model)
    attach(evaluator, session, phase="validation")
    trainer.run(loader, max_epochs=2)

    for capture in session.captures:
        print(f"{capture.name}: steps {capture.steps.column('number')}")


if __name__ == "__main__":
    main()
