"""Learn the price of basket options from simulated pay-offs."""

import argparse
import time

import torch
from torch import nn


def simulate(count, assets, generator):
    spot = 0.7 + 0.6 * torch.rand(count, assets, generator=generator)
    volatility = 0.1 + 0.3 * torch.rand(count, assets, generator=generator)
    weights = torch.rand(count, assets, generator=generator)
    weights /= weights.sum(1, keepdim=True)
    shock = torch.randn(count, assets, generator=generator)
    final = spot * torch.exp(volatility * shock - volatility**2 / 2)
    payoff = ((weights * final).sum(1) - 1).clamp(min=0)
    return torch.cat([spot, volatility, weights], 1), payoff


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--assets", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Linear(3 * args.assets, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    started, mean = time.time(), torch.zeros(())
    for step in range(1, args.steps + 1):
        inputs, payoff = simulate(args.batch_size, args.assets, generator)
        loss = (model(inputs).squeeze(1) - payoff).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = 0.99 * mean + 0.01 * loss.detach()
        if step % 200 == 0:
            print(f"step {step}: loss {mean.item():.5f} ({time.time() - started:.0f} s)")


if __name__ == "__main__":
    main()
