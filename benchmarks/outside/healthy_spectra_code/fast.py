"""Compress infrared spectra with a wide autoencoder that warms up and decays its learning rate."""

import argparse
import time

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, channels, hidden, code):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.decode = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, channels))

    def forward(self, x):
        return self.decode(self.encode(x))


def spectra(count, channels):
    generator = torch.Generator().manual_seed(77)
    lines = torch.rand(24, 1, generator=generator)
    widths = 0.005 + 0.03 * torch.rand(24, 1, generator=generator)
    axis = torch.linspace(0, 1, channels)
    shapes = torch.exp(-(((axis - lines) / widths) ** 2))
    amounts = torch.rand(count, 24, generator=generator) ** 2
    return amounts @ shapes + 0.01 * torch.randn(count, channels, generator=generator)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--channels", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = spectra(8192, args.channels)
    model = Autoencoder(args.channels, args.hidden, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.95, fused=True)
    steps = args.epochs * (len(data) // args.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
    for epoch in range(args.epochs):
        started, total = time.time(), 0.0
        for rows in torch.randperm(len(data)).split(args.batch_size):
            batch = data[rows]
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(f"epoch {epoch}: {32 * total / len(data):.5f} in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
