"""Classify fields in multi-band satellite tiles; the tiles are large, the network is small."""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Tiles(Dataset):
    def __init__(self, count, crops, bands=12, size=128):
        generator = torch.Generator().manual_seed(13)
        self.labels = torch.randint(crops, (count,), generator=generator)
        self.spectra = torch.rand(crops, bands, 1, 1, generator=generator)
        self.noise = torch.randn(64, bands, size, size, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return self.spectra[label] + 0.5 * self.noise[index % len(self.noise)], label


class FieldNet(nn.Module):
    def __init__(self, bands, crops):
        super().__init__()
        self.reduce = nn.Conv2d(bands, 32, 8, stride=8)
        self.conv = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64, crops)

    def forward(self, x):
        return self.head(F.relu(self.conv(F.relu(self.reduce(x)))).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this program needs a GPU")

    torch.manual_seed(0)
    loader = DataLoader(
        Tiles(8192, 10),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=True,
        pin_memory=True,
    )
    model = FieldNet(12, 10).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        begin = time.time()
        for tiles, labels in loader:
            tiles, labels = tiles.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = F.cross_entropy(model(tiles), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f} in {time.time() - begin:.1f} s")


if __name__ == "__main__":
    main()
