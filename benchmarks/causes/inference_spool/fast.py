import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Embedder(nn.Module):
    def __init__(self, width=32, outputs=128):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.body = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, images):
        features = self.body(self.stem(images)).mean(dim=(2, 3))
        return nn.functional.normalize(self.head(features))


class Spool:
    """A folder that another job empties; it must never fill the disk."""

    def __init__(self, folder, reserve_mb):
        self.folder = folder
        self.reserve_mb = reserve_mb
        self.files = 0

    def free_mb(self):
        return shutil.disk_usage(self.folder).free // 2**20

    def write(self, ids, embeddings):
        if self.free_mb() < self.reserve_mb:
            raise RuntimeError(f"{self.folder} is almost full")
        np.savez(self.folder / f"part{self.files:05d}.npz", ids=ids, embeddings=embeddings)
        self.files += 1


def image_batches(count, size, seed=0):
    """Stands for the crawler: it yields ids and decoded images."""
    random = torch.Generator().manual_seed(seed)
    colours = torch.rand(16, 3, 1, 1, generator=random)
    for number in range(count):
        ids = np.arange(number * size, (number + 1) * size)
        kind = torch.randint(16, (size,), generator=random)
        yield ids, colours[kind] + 0.1 * torch.randn(size, 3, 32, 32, generator=random)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--reserve-mb", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Embedder().eval()
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        spool = Spool(Path(name), args.reserve_mb)
        norm = torch.zeros(128)
        for ids, images in image_batches(args.batches, args.batch_size):
            embeddings = model(images)
            norm += embeddings.sum(dim=0)
            spool.write(ids, embeddings.numpy())
            if spool.files % 25 == 0:
                mean = norm.norm().item() / (spool.files * args.batch_size)
                print(f"{spool.files} files, length of the mean embedding {mean:.4f}")


if __name__ == "__main__":
    main()
