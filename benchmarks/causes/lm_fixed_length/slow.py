"""Train a small causal transformer on sentences of an artificial language."""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD, BOS, EOS = 0, 1, 2


class Sentences(Dataset):
    def __init__(self, count, vocabulary, seed=0):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(count):
            word = rng.randrange(3, vocabulary)
            row = [BOS]
            for _ in range(rng.randint(15, 44)):
                row.append(word)
                word = 3 + (word * 7 + rng.choice([1, 1, 1, 2])) % (vocabulary - 3)
            self.rows.append([*row, EOS])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Collator:
    def __init__(self, max_length=128):
        self.max_length = max_length

    def __call__(self, rows):
        batch = torch.full((len(rows), self.max_length), PAD)
        for i, row in enumerate(rows):
            row = row[: self.max_length]
            batch[i, : len(row)] = torch.tensor(row)
        return batch


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, width=96, heads=4, layers=3, max_length=128):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=800)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Sentences(256, args.vocabulary)
    loader = DataLoader(data, args.batch_size, shuffle=True, collate_fn=Collator())
    model = GPT(args.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    for epoch in range(args.epochs):
        began, total = time.time(), 0.0
        for ids in loader:
            logits = model(ids[:, :-1])
            targets = ids[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}  loss {total / len(loader):.4f}  {time.time() - began:.1f} s")


if __name__ == "__main__":
    main()
