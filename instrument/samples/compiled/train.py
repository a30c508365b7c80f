"""Trains a compiled model that counts its calls, so torch compiles it again in each step."""

import torch
from torch import nn


class Warmed(nn.Module):
    """A network whose result counts more in each of the first calls."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs + min(self.calls / 50, 1.0) * self.layers(inputs)


def main() -> None:
    """Train for 40 steps."""
    torch.manual_seed(0)
    model = torch.compile(Warmed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(40):
        inputs = torch.randn(64, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
