"""A decoder-only transformer that learns sums, written as text."""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)
ALPHABET = "0123456789+=."
DIM, HEADS, DEPTH, LENGTH, BATCH, STEPS = 192, 6, 4, 64, 12, 3000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, DIM // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), DIM)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, DIM))
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.head = nn.Linear(DIM, len(ALPHABET))

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens) + self.places))


def text(count):
    a, b = torch.randint(1000, (2, count)).tolist()
    return "".join(f"{x}+{y}={x + y}." for x, y in zip(a, b))


corpus = torch.tensor([ALPHABET.index(c) for c in text(40_000)])
model = torch.compile(Decoder())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
start = time.time()
for step in range(STEPS):
    begin = torch.randint(len(corpus) - LENGTH - 1, (BATCH, 1))
    window = corpus[begin + torch.arange(LENGTH + 1)]
    loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"{step:5d} {loss.item():.3f} {time.time() - start:.0f} s", flush=True)
