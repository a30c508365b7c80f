import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SensorWindows(Dataset):
    """Short windows of a six-axis sensor, each with its index in the memory bank."""

    def __init__(self, count, length=32):
        generator = torch.Generator().manual_seed(1)
        activity = torch.randint(10, (count,), generator=generator)
        patterns = torch.randn(10, 6, length, generator=generator)
        self.windows = patterns[activity] + 0.5 * torch.randn(count, 6, length, generator=generator)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return self.windows[index], index


class Encoder(nn.Module):
    def __init__(self, width=64, outputs=128):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(6, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.project = nn.Linear(width, outputs)

    def forward(self, window):
        return nn.functional.normalize(self.project(self.body(window).mean(dim=2)))


class MemoryBank(nn.Module):
    """One embedding of every window; negatives are drawn from it."""

    def __init__(self, count, size=128, negatives=1024, momentum=0.5, temperature=0.2):
        super().__init__()
        self.register_buffer("memory", nn.functional.normalize(torch.randn(count, size)))
        self.negatives = negatives
        self.momentum = momentum
        self.temperature = temperature

    def forward(self, embedding, index):
        drawn = torch.randint(len(self.memory), (self.negatives,))
        positive = (embedding * self.memory[index]).sum(dim=1, keepdim=True)
        negative = embedding @ self.memory[drawn].T
        return torch.cat([positive, negative], dim=1) / self.temperature

    @torch.no_grad()
    def update(self, embedding, index):
        mixed = torch.lerp(embedding, self.memory[index], self.momentum)
        self.memory.index_copy_(0, index, nn.functional.normalize(mixed))


def augment(window):
    scale = 1 + 0.1 * torch.randn(len(window), 6, 1)
    return window * scale + 0.05 * torch.randn_like(window)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--windows", type=int, default=80_000)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = SensorWindows(args.windows)
    encoder, bank = Encoder(), MemoryBank(len(data))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    total = 0.0
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    for step, (window, index) in enumerate(loader, 1):
        embedding = encoder(augment(window))
        scores = bank(embedding, index)
        loss = nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bank.update(embedding.detach(), index)
        total += loss.item()
        if step % 20 == 0:
            print(f"step {step}: loss {total / 20:.4f}")
            total = 0.0
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
