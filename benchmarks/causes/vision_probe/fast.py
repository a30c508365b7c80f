"""Transfer learning: a classifier on top of a frozen convolutional network."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Shapes(Dataset):
    """Images of a bright rectangle on noise; the label is its shape and place."""

    def __init__(self, count, size=48, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 8, (count,), generator=generator)
        self.images = 0.3 * torch.randn(count, 3, size, size, generator=generator)
        for image, label in zip(self.images, self.labels.tolist()):
            row, column, wide = label & 1, label >> 1 & 1, label >> 2
            top, left = row * size // 2, column * size // 2
            image[:, top + 4 : top + (8 if wide else 20), left + 4 : left + 20] += 1.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Backbone(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.stage1 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.stage2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.stage1(x))
        x = F.relu(self.stage2(x))
        return F.adaptive_avg_pool2d(x, 6)


class Classifier(nn.Module):
    def __init__(self, channels, classes=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 128, 3, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128 * 36, classes),
        )

    def forward(self, x):
        return self.layers(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    backbone = Backbone().eval().requires_grad_(False)
    classifier = Classifier(96)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.005, momentum=0.9)
    train_set = Shapes(args.images)
    features = torch.cat([backbone(images) for images in train_set.images.split(args.batch_size)])
    loader = DataLoader(TensorDataset(features, train_set.labels), args.batch_size, shuffle=True)

    for epoch in range(args.epochs):
        start, loss_sum, hits = time.time(), 0.0, 0
        for features, labels in loader:
            logits = classifier(features)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            hits += (logits.argmax(1) == labels).sum().item()
        print(
            f"epoch {epoch} loss {loss_sum / args.images:.4f} "
            f"accuracy {hits / args.images:.3f} seconds {time.time() - start:.1f}"
        )


if __name__ == "__main__":
    main()
