"""Trains a regression on measurements that numpy holds in float64."""

import numpy as np
import torch
from torch import nn


def main() -> None:
    """Train for 200 steps."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(4096, 64)), random.normal(size=(4096, 1))
    model = nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(200):
        chosen = random.choice(4096, 512)
        optimizer.zero_grad()
        outputs = model(torch.from_numpy(inputs[chosen]))
        loss = nn.functional.mse_loss(outputs, torch.from_numpy(targets[chosen]))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
