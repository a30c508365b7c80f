"""Denoising diffusion of tide curves: a residual network with modulated, gated layers."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Settings:
    length: int = 96
    hidden: int = 256
    depth: int = 6
    batch: int = 1024
    steps: int = 3000
    levels: int = 200
    lr: float = 5e-4
    seed: int = 17


class GatedLayer(nn.Module):
    """x + gate(x, t): normalised by its mean square, scaled and shifted by the noise level."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))
        self.shift = nn.Parameter(torch.zeros(hidden))
        self.rate = nn.Parameter(torch.full((hidden,), 0.1))
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        y = x * torch.rsqrt(mean_square + 1e-6) * self.scale + self.shift * level
        y = self.mix(y)
        inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)
        y = 0.5 * y * (1 + torch.tanh(inner))
        gate = torch.sigmoid(y * self.rate) * (1 - level) + level * torch.exp(-(y * y))
        return x + gate * y - 0.01 * torch.sin(x) * self.rate


class Denoiser(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.enter = nn.Linear(settings.length, settings.hidden)
        self.layers = nn.ModuleList(GatedLayer(settings.hidden) for _ in range(settings.depth))
        self.leave = nn.Linear(settings.hidden, settings.length)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, level)
        return self.leave(x)


def tides(count: int, length: int) -> Tensor:
    t = torch.linspace(0, 4 * math.pi, length)
    phase, height = 6.28 * torch.rand(count, 1), 0.5 + torch.rand(count, 1)
    return height * torch.sin(t + phase) + 0.3 * torch.sin(1.93 * t + 2 * phase)


def main() -> None:
    settings = Settings()
    torch.manual_seed(settings.seed)
    curves = tides(20_000, settings.length)
    keep = torch.cos(torch.linspace(0, 1.55, settings.levels)) ** 2
    model = Denoiser(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    started = time.time()
    for step in range(1, settings.steps + 1):
        clean = curves[torch.randint(len(curves), (settings.batch,))]
        level = torch.randint(settings.levels, (settings.batch, 1))
        noise = torch.randn_like(clean)
        kept = keep[level]
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        predicted = model(noisy, level / settings.levels)
        loss = (predicted - noise).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
