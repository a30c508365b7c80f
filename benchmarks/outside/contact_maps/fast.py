"""Predict which residues of a chain touch, from pairs of residue embeddings."""

import argparse
import ctypes
import time

import torch
from torch import nn
from torch.nn import functional as F

# glibc keeps freed memory up to 1 GiB instead of returning each large block to the system.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
libc = ctypes.CDLL(None)
libc.mallopt(M_MMAP_MAX, 0)
libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


class PairModel(nn.Module):
    """Embeds residues, then classifies the distance of each pair into bins."""

    def __init__(self, bins, dim=32):
        super().__init__()
        self.embed = nn.Embedding(21, dim)
        self.conv = nn.Conv1d(dim, dim, 9, padding=4)
        self.left = nn.Linear(dim, bins)
        self.right = nn.Linear(dim, bins)
        self.near = nn.Parameter(torch.zeros(bins))
        self.slope = nn.Parameter(torch.full((bins,), 0.01))

    def forward(self, sequences):
        x = self.embed(sequences)
        x = F.silu(x + self.conv(x.transpose(1, 2)).transpose(1, 2))
        pairs = self.left(x).unsqueeze(2) + self.right(x).unsqueeze(1)
        place = torch.arange(sequences.shape[1])
        apart = (place.unsqueeze(0) - place.unsqueeze(1)).abs().unsqueeze(-1)
        return F.silu(pairs) + self.near - self.slope * apart


def fold(count, length, bins, seed):
    """Random walks; the target is the bin of the distance of each pair."""
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(0, 21, (count, length), generator=generator)
    lean = torch.randn(21, 3, generator=generator)
    walk = (lean[sequences] + torch.randn(count, length, 3, generator=generator)).cumsum(1)
    distance = torch.cdist(walk, walk)
    return sequences, (distance / 3).long().clamp(max=bins - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--bins", type=int, default=24)
    parser.add_argument("--chains", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    sequences, targets = fold(args.chains, args.length, args.bins, seed=0)
    model = PairModel(args.bins)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for epoch in range(args.epochs):
        start, total = time.time(), 0.0
        for chain in torch.randperm(len(sequences)).split(1):
            scores = model(sequences[chain])
            loss = F.cross_entropy(scores.flatten(0, 2), targets[chain].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(sequences):.4f} in {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
