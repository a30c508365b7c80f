"""Recognise minerals by texture with a plain convolutional network."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class TextureNet(nn.Module):
    def __init__(self, classes, width=48):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.conv4 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(conv(x))
        return self.head(x.mean((2, 3)))


def textures(count, classes, size=32):
    generator = torch.Generator().manual_seed(8)
    labels = torch.randint(classes, (count,), generator=generator)
    kernels = torch.randn(classes, 3, 3, 5, 5, generator=generator)
    noise = torch.randn(count, 3, size, size, generator=generator)
    images = torch.empty_like(noise)
    for c in range(classes):
        images[labels == c] = F.conv2d(noise[labels == c], kernels[c], padding=2) / 8
    return images, labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = textures(2000, args.classes)
    images = images.contiguous(memory_format=torch.channels_last)
    model = TextureNet(args.classes).to(memory_format=torch.channels_last)
    step_model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    for epoch in range(args.epochs):
        start, total = time.time(), 0.0
        for rows in torch.randperm(len(images))[: 62 * args.batch_size].split(args.batch_size):
            loss = F.cross_entropy(step_model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / 62:.4f} in {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
