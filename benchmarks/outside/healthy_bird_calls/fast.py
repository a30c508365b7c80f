"""Detect bird calls in spectrogram patches that worker processes cut and augment."""

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Calls(Dataset):
    def __init__(self, count, species, bands=64, frames=64):
        rng = np.random.default_rng(6)
        self.labels = rng.integers(0, species, count)
        self.chirps = rng.normal(size=(species, bands, frames)).astype(np.float32)
        self.noise = rng.normal(size=(bands, 4096)).astype(np.float32)
        self.frames = frames

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        place = torch.randint(4096 - self.frames, ()).item()
        patch = self.noise[:, place : place + self.frames] + 0.5 * self.chirps[self.labels[index]]
        return torch.from_numpy(patch).unsqueeze(0), int(self.labels[index])


class CallNet(nn.Module):
    def __init__(self, species):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(32, 96, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(96, 96, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(96, species)

    def forward(self, x):
        return self.head(self.convs(x).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(
        Calls(3200, 20),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=True,
        prefetch_factor=4,
    )
    model = CallNet(20).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        begin, right = time.time(), 0
        for patches, labels in loader:
            scores = model(patches)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())
        print(f"epoch {epoch}: {right / 3200:.3f} in {time.time() - begin:.1f} s")


if __name__ == "__main__":
    main()
