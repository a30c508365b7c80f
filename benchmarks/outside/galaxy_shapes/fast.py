"""Classify galaxy cut-outs by shape with a small residual network."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, channels_in, channels_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.skip = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.skip = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.skip(x))


def make_net(width, classes):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        ResidualBlock(width, width),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def make_galaxies(count, size=48):
    """Ellipses, spirals and irregular ones, as Gaussian profiles with noise."""
    generator = torch.Generator().manual_seed(11)
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    labels = torch.randint(0, 3, (count,), generator=generator)
    angle = 3.14 * torch.rand(count, 1, 1, generator=generator)
    u, v = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    flat = 1 + 4 * (labels == 0).float().view(-1, 1, 1)
    light = torch.exp(-6 * (u**2 + flat * v**2))
    arms = 1 + 0.6 * torch.cos(2 * torch.atan2(v, u) - 9 * (u**2 + v**2).sqrt())
    light = torch.where((labels == 1).view(-1, 1, 1), light * arms, light)
    images = light.unsqueeze(1).repeat(1, 3, 1, 1)
    images += 0.2 * torch.randn(images.shape, generator=generator)
    return images, labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    images, labels = make_galaxies(2048)
    model = make_net(16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        started, total = time.time(), 0.0
        for batch in torch.randperm(len(images)).split(args.batch_size):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        scheduler.step()
        mean = total / len(images)
        print(f"epoch {epoch:3d}  loss {mean:.4f}  {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
