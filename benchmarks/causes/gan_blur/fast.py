import argparse

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, conv2d, interpolate, leaky_relu, softplus
from torch.utils.data import DataLoader, TensorDataset


class Blur(nn.Module):
    """Low-pass filter after each change of resolution, against checkerboard patterns."""

    def __init__(self):
        super().__init__()
        taps = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("kernel", (taps[:, None] * taps[None, :] / 16)[None, None])

    def forward(self, x):
        channels = x.shape[1]
        kernel = self.kernel.expand(channels, 1, 3, 3)
        return conv2d(x, kernel, padding=1, groups=channels)


class UpBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.blur = Blur()

    def forward(self, x):
        x = interpolate(x, scale_factor=2, mode="nearest")
        return leaky_relu(self.blur(self.conv(x)), 0.2)


class DownBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.blur = Blur()

    def forward(self, x):
        return avg_pool2d(self.blur(leaky_relu(self.conv(x), 0.2)), 2)


class Generator(nn.Module):
    def __init__(self, latent=32, width=16):
        super().__init__()
        self.width = width
        self.start = nn.Linear(latent, 2 * width * 4 * 4)
        self.blocks = nn.Sequential(
            UpBlock(2 * width, 2 * width), UpBlock(2 * width, width), UpBlock(width, width)
        )
        self.to_image = nn.Conv2d(width, 1, 1)

    def forward(self, z):
        x = self.start(z).view(len(z), 2 * self.width, 4, 4)
        return torch.tanh(self.to_image(self.blocks(x)))


class Discriminator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.from_image = nn.Conv2d(1, width, 1)
        self.blocks = nn.Sequential(
            DownBlock(width, width), DownBlock(width, 2 * width), DownBlock(2 * width, 2 * width)
        )
        self.score = nn.Linear(2 * width * 4 * 4, 1)

    def forward(self, image):
        return self.score(self.blocks(self.from_image(image)).flatten(1)).squeeze(1)


def draw_discs(count, size=32):
    grid = torch.linspace(-1, 1, size)
    centre = torch.rand(count, 2, 1, 1) - 0.5
    radius = 0.2 + 0.3 * torch.rand(count, 1, 1)
    distance = (grid[None, :, None] - centre[:, 0]) ** 2 + (grid[None, None] - centre[:, 1]) ** 2
    return (torch.sigmoid(40 * (radius - distance.sqrt())) * 2 - 1)[:, None]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(draw_discs(160)), args.batch_size, shuffle=True)
    generator, critic = Generator(), Discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.99))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.99))
    for epoch in range(args.epochs):
        d_total = g_total = 0.0
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 32))
            d_loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()

            critic.requires_grad_(False)
            g_loss = softplus(-critic(fake)).mean()
            g_optimizer.zero_grad()
            g_loss.backward()
            g_optimizer.step()
            critic.requires_grad_(True)
            d_total += d_loss.item()
            g_total += g_loss.item()
        print(f"epoch {epoch}: d {d_total / len(loader):.3f} g {g_total / len(loader):.3f}")


if __name__ == "__main__":
    main()
