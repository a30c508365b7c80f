"""Forecast river levels a day ahead with an LSTM over rain, snow and temperature."""

import argparse
import math
import time

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 24)

    def forward(self, history):
        states, _ = self.lstm(history)
        return self.head(states[:, -1])


def catchment(hours):
    generator = torch.Generator().manual_seed(30)
    t = torch.arange(hours)
    warmth = torch.sin(2 * math.pi * t / 8760) + 0.3 * torch.sin(2 * math.pi * t / 24)
    rain = torch.relu(torch.randn(hours, generator=generator) - 1)
    kernel = torch.exp(-torch.arange(72) / 20)
    padded = torch.nn.functional.pad(rain, (71, 0))
    level = (padded.unfold(0, 72, 1) * kernel.flip(0)).sum(1) + torch.relu(warmth)
    return torch.stack([rain, warmth, level], 1), level


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--history", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs, level = catchment(20_000)
    model = Forecaster(inputs.shape[1], args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    started = time.time()
    past, ahead = torch.arange(args.history), torch.arange(args.history, args.history + 24)
    for step in range(1, args.steps + 1):
        begin = torch.randint(len(inputs) - args.history - 24, (args.batch_size, 1))
        loss = nn.functional.smooth_l1_loss(model(inputs[begin + past]), level[begin + ahead])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.4f} after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
