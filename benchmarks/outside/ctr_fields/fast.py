"""Click-through rate with a factorisation machine over many categorical fields."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F


class FieldEmbeddings(nn.Module):
    """One small table and one gate for each field."""

    def __init__(self, sizes, dim):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in sizes)
        self.weights = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, fields):
        columns = fields.unbind(1)
        vectors = torch.stack([table(c) for table, c in zip(self.tables, columns)], dim=1)
        linear = torch.cat([weight(c) for weight, c in zip(self.weights, columns)], dim=1)
        return vectors, linear.sum(1)


class DeepFM(nn.Module):
    def __init__(self, sizes, dim=8, hidden=128):
        super().__init__()
        self.embed = FieldEmbeddings(sizes, dim)
        self.deep = nn.Sequential(
            nn.Linear(len(sizes) * dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, fields):
        vectors, linear = self.embed(fields)
        total = vectors.sum(1)
        pairs = 0.5 * (total * total - (vectors * vectors).sum(1)).sum(1)
        return linear + pairs + self.deep(vectors.flatten(1)).squeeze(1)


def make_log(rows, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    fields = torch.stack(
        [(size * torch.rand(rows, generator=generator) ** 2).long() for size in sizes], dim=1
    )
    score = torch.zeros(rows)
    for column, size in enumerate(sizes[:12]):
        score += torch.randn(size, generator=generator)[fields[:, column]]
    return fields, (score > 1.5).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fields", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(5)
    sizes = [20 + 7 * (i % 13) for i in range(args.fields)]
    fields, clicks = make_log(30_000, sizes, seed=5)
    model = DeepFM(sizes)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4, fused=True)
    for epoch in range(1, args.epochs + 1):
        started, losses = time.perf_counter(), []
        for rows in torch.randperm(len(fields)).split(args.batch_size):
            logits = model(fields[rows])
            loss = F.binary_cross_entropy_with_logits(logits, clicks[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - started
        print(f"epoch {epoch} log-loss {sum(losses) / len(losses):.4f} {seconds:.1f} s")


if __name__ == "__main__":
    main()
