"""Bayesian personalised ranking of songs: two large embedding tables with sparse gradients."""

import time

import torch
from torch import nn
from torch.nn.functional import logsigmoid

LISTENERS, SONGS, DIM = 100_000, 200_000, 128
BATCH, STEPS = 16_384, 3000


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.listeners = nn.Embedding(LISTENERS, DIM, sparse=True)
        self.songs = nn.Embedding(SONGS, DIM, sparse=True)
        nn.init.normal_(self.listeners.weight, std=0.05)
        nn.init.normal_(self.songs.weight, std=0.05)

    def forward(self, listener, liked, other):
        taste = self.listeners(listener)
        gain = self.songs(liked) - self.songs(other)
        return torch.linalg.vecdot(taste, gain)


def plays(generator):
    listener = torch.randint(LISTENERS, (BATCH,), generator=generator)
    rank = torch.rand(BATCH, generator=generator) ** 3
    liked = (listener * 7919 + (rank * SONGS / 10).long()) % SONGS
    other = torch.randint(SONGS, (BATCH,), generator=generator)
    return listener, liked, other


torch.manual_seed(9)
generator = torch.Generator().manual_seed(10)
model = Factors()
optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
start = time.time()
for step in range(1, STEPS + 1):
    loss = -logsigmoid(model(*plays(generator))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"{step}: {loss.item():.4f} ({time.time() - start:.0f} s)")
