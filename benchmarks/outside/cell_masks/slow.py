"""Segment cells in microscope images with a small U-Net and mixed precision."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F


def double_conv(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = double_conv(1, width)
        self.down2 = double_conv(width, 2 * width)
        self.middle = double_conv(2 * width, 4 * width)
        self.up2 = double_conv(6 * width, 2 * width)
        self.up1 = double_conv(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2.0)], 1))
        a = self.up1(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1))
        return self.out(a)


def draw_cells(count, size):
    generator = torch.Generator().manual_seed(21)
    axis = torch.arange(size, dtype=torch.float32)
    masks = torch.zeros(count, size, size, dtype=torch.bool)
    for _ in range(5):
        cx, cy, rx, ry = (torch.rand(4, count, 1, 1, generator=generator)).unbind(0)
        dx = (axis.view(1, 1, -1) - size * cx) / (3 + 6 * rx)
        dy = (axis.view(1, -1, 1) - size * cy) / (3 + 6 * ry)
        masks |= dx**2 + dy**2 < 1
    masks = masks.float().unsqueeze(1)
    images = 0.6 * F.avg_pool2d(masks, 3, 1, 1)
    images += 0.3 * torch.randn(images.shape, generator=generator)
    return images, masks


def dice_loss(logits, masks):
    p = logits.sigmoid()
    overlap = 2 * (p * masks).sum((1, 2, 3)) + 1
    return 1 - (overlap / (p.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--amp", default="float16", choices=["float16", "bfloat16", "none"])
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, masks = draw_cells(400, args.size)
    model = UNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    use_amp = args.amp != "none"
    dtype = getattr(torch, args.amp) if use_amp else torch.float32
    for epoch in range(args.epochs):
        start, total = time.time(), 0.0
        batches = torch.randperm(len(images)).split(args.batch_size)
        for rows in batches:
            x, y = images[rows].to(device), masks[rows].to(device)
            with torch.autocast(device, dtype=dtype, enabled=use_amp):
                logits = model(x)
            logits = logits.float()
            loss = F.binary_cross_entropy_with_logits(logits, y) + dice_loss(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(batches):.4f} ({time.time() - start:.1f} s)")


if __name__ == "__main__":
    main()
