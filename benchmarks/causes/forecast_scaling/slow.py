import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_load_curves(households, hours, seed=0):
    """Hourly use of electricity: a day, a week, and noise."""
    rng = np.random.default_rng(seed)
    hour = np.arange(hours)[:, None]
    phase = rng.uniform(0, 2 * np.pi, households)
    scale = rng.uniform(0.5, 4, households)
    day = np.sin(2 * np.pi * hour / 24 + phase)
    week = 0.4 * np.sin(2 * np.pi * hour / 168 + 2 * phase)
    noise = 0.3 * rng.standard_normal((hours, households))
    return (scale * (2 + day + week + noise)).astype(np.float32)


class ForecastWindows(Dataset):
    """Pairs of a history and the hours that follow it, in units of the training part."""

    def __init__(self, series, history, horizon, train_share=0.8):
        self.series = series
        self.history = history
        self.horizon = horizon
        self.train_hours = int(train_share * len(series))

    def __len__(self):
        return self.train_hours - self.history - self.horizon

    def scaled(self):
        past = self.series[: self.train_hours]
        return (self.series - past.mean(axis=0)) / past.std(axis=0)

    def __getitem__(self, index):
        middle = index + self.history
        window = self.scaled()[index : middle + self.horizon]
        return window[: self.history], window[self.history :]


class TemporalBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Forecaster(nn.Module):
    def __init__(self, households, history, horizon, width=48):
        super().__init__()
        self.inputs = nn.Conv1d(households, width, 1)
        self.blocks = nn.Sequential(*(TemporalBlock(width, 2**i) for i in range(4)))
        self.time = nn.Linear(history, horizon)
        self.outputs = nn.Conv1d(width, households, 1)

    def forward(self, history):
        x = self.blocks(self.inputs(history.transpose(1, 2)))
        return self.outputs(self.time(x)).transpose(1, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--households", type=int, default=24)
    parser.add_argument("--history", type=int, default=168)
    parser.add_argument("--horizon", type=int, default=24)
    args = parser.parse_args()

    torch.manual_seed(0)
    series = make_load_curves(args.households, hours=10_000)
    data = ForecastWindows(series, args.history, args.horizon)
    model = Forecaster(args.households, args.history, args.horizon)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = 0.0
    loader = DataLoader(data, args.batch_size, shuffle=True)
    for step, (history, future) in enumerate(loader, 1):
        loss = nn.functional.l1_loss(model(history), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 20 == 0:
            print(f"step {step}: mean absolute error {total / 20:.4f}")
            total = 0.0
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
