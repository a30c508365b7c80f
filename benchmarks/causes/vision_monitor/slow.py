"""Train a small residual network, and write metrics to a log file in the background."""

import csv
import queue
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MetricsWriter(threading.Thread):
    """Takes rows from a queue and appends them to a CSV file."""

    def __init__(self, path, fields):
        super().__init__(daemon=True)
        self.rows = queue.Queue()
        self.closing = threading.Event()
        self.file = path.open("w", newline="")
        self.csv = csv.DictWriter(self.file, fields)
        self.csv.writeheader()

    def log(self, **row):
        self.rows.put(row)

    def run(self):
        while not self.closing.is_set():
            try:
                row = self.rows.get_nowait()
            except queue.Empty:
                continue
            self.csv.writerow(row)
            self.file.flush()

    def close(self):
        while not self.rows.empty():
            time.sleep(0.01)
        self.closing.set()
        self.join()
        self.file.close()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.pointwise = nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x):
        y = self.pointwise(F.silu(self.depthwise(self.norm(x))))
        return x + self.scale * y


class TinyResNet(nn.Module):
    def __init__(self, channels=16, blocks=8, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def synthetic(count=1536, classes=10):
    labels = torch.randint(0, classes, (count,))
    colours = torch.randn(classes, 3, 1, 1)
    return TensorDataset(colours[labels] + torch.randn(count, 3, 24, 24), labels)


def main(epochs=3, batch_size=48):
    torch.manual_seed(11)
    loader = DataLoader(synthetic(), batch_size=batch_size, shuffle=True)
    model = TinyResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    with tempfile.TemporaryDirectory() as folder:
        writer = MetricsWriter(Path(folder) / "metrics.csv", ["step", "loss"])
        writer.start()
        for epoch in range(epochs):
            began, total = time.time(), 0.0
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                total += loss.item()
                writer.log(step=step, loss=round(loss.item(), 5))
            print(f"epoch {epoch}: loss {total / len(loader):.4f} ({time.time() - began:.1f} s)")
        writer.close()


if __name__ == "__main__":
    main()
