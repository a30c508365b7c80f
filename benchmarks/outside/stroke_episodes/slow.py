"""Prototypical networks: each epoch is a short meta-batch of few-shot episodes of drawn characters."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Characters(Dataset):
    """Episodes: `ways` characters, each with support and query drawings."""

    def __init__(self, alphabet, episodes, ways=5, shots=5, size=28):
        rng = np.random.default_rng(2)
        self.strokes = rng.uniform(4, size - 4, (alphabet, 4, 2))
        self.episodes = episodes
        self.ways, self.shots, self.size = ways, shots, size

    def __len__(self):
        return self.episodes

    def draw(self, character, rng):
        points = self.strokes[character] + rng.normal(0, 1.2, (4, 2))
        t = np.linspace(0, 1, 40)[:, None]
        path = np.concatenate([a + t * (b - a) for a, b in zip(points, points[1:])])
        image = np.zeros((self.size, self.size), np.float32)
        rows, columns = np.clip(path.round().astype(int), 0, self.size - 1).T
        image[rows, columns] = 1
        return image

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        chosen = rng.choice(len(self.strokes), self.ways, replace=False)
        images = [[self.draw(c, rng) for _ in range(2 * self.shots)] for c in chosen]
        images = torch.from_numpy(np.array(images)).unsqueeze(2)
        return images[:, : self.shots], images[:, self.shots :]


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        layers, channels = [], 1
        for _ in range(3):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.layers = nn.Sequential(*layers, nn.Flatten())

    def forward(self, x):
        return self.layers(x)


def episode_loss(encoder, support, query):
    ways, shots = support.shape[1:3]
    losses, correct = [], 0.0
    embedded = encoder(torch.cat([support, query], 2).flatten(0, 2))
    embedded = embedded.unflatten(0, (-1, ways, 2 * shots))
    prototypes = embedded[:, :, :shots].mean(2)
    targets = torch.arange(ways).repeat_interleave(shots)
    for centres, points in zip(prototypes, embedded[:, :, shots:].flatten(1, 2)):
        scores = -(torch.cdist(points, centres) ** 2) / points.shape[1] ** 0.5
        losses.append(F.cross_entropy(scores, targets))
        correct += (scores.argmax(1) == targets).float().mean().item()
    return torch.stack(losses).mean(), correct / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Characters(60, args.episodes)
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=args.workers)
    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        accuracies = []
        for support, query in loader:
            loss, accuracy = episode_loss(encoder, support, query)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracies.append(accuracy)
        if epoch % 10 == 0:
            mean = sum(accuracies) / len(accuracies)
            print(f"epoch {epoch:3d}: loss {loss.item():.4f}, accuracy {mean:.3f}")


if __name__ == "__main__":
    main()
