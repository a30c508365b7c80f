# Scores card transactions: a small MLP on tabular features, minority class re-weighted.
import os
import time

import numpy as np
import torch
from torch import nn

CONFIG = {
    "rows": 60_000,
    "features": 96,
    "hidden": 192,
    "depth": 6,
    "batch": 256,
    "steps": 20_000,
    "lr": 2e-3,
    "threads": max(16, os.cpu_count() or 1),
}


def transactions(rows, features):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    x[:, :8] = np.exp(x[:, :8])  # amounts
    hidden = np.tanh(x[:, :32] @ rng.normal(size=(32, 4)).astype(np.float32)).sum(1)
    y = (hidden > np.quantile(hidden, 0.97)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y)


class Scorer(nn.Module):
    def __init__(self, features, hidden, depth):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.first = nn.Linear(features, hidden)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU())
            for _ in range(depth)
        )
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        x = self.first(self.norm(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x).squeeze(1)


def average_precision(scores, labels):
    order = scores.argsort(descending=True)
    hits = labels[order].cumsum(0)
    precision = hits / torch.arange(1, len(hits) + 1)
    return (precision * labels[order]).sum() / labels.sum()


def train(config):
    torch.manual_seed(config["rows"])
    torch.set_num_threads(config["threads"])
    x, y = transactions(config["rows"], config["features"])
    train_x, train_y = x[:50_000], y[:50_000]
    valid_x, valid_y = x[50_000:], y[50_000:]
    model = Scorer(config["features"], config["hidden"], config["depth"])
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(20.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], fused=True)
    started = time.time()
    for step in range(config["steps"]):
        rows = torch.randint(0, len(train_x), (config["batch"],))
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(train_x[rows]), train_y[rows])
        loss.backward()
        optimizer.step()
        if step % 1000 == 999:
            model.eval()
            with torch.no_grad():
                ap = average_precision(model(valid_x), valid_y)
            model.train()
            print(f"{step + 1}: loss {loss.item():.4f} AP {ap:.3f} ({time.time() - started:.0f} s)")


train(CONFIG)
