import argparse
import tempfile
import threading
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import nn


class PreviewWriter(threading.Thread):
    """Writes sampled points to disk beside the training loop."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder = folder
        self.pending = deque()
        self.closed = False
        self.written = 0

    def submit(self, step, points):
        self.pending.append((step, points.numpy().copy()))

    def run(self):
        while not self.closed or self.pending:
            if not self.pending:
                continue
            step, points = self.pending.popleft()
            np.save(self.folder / f"points{step:05d}.npy", points)
            self.written += 1

    def close(self):
        self.closed = True
        self.join()


class Denoiser(nn.Module):
    def __init__(self, levels, width=512):
        super().__init__()
        self.level = nn.Embedding(levels, width)
        self.inputs = nn.Linear(2, width)
        self.hidden = nn.Linear(width, width)
        self.outputs = nn.Linear(width, 2)

    def forward(self, points, level):
        x = nn.functional.silu(self.inputs(points) + self.level(level))
        return self.outputs(nn.functional.silu(self.hidden(x)))


class Diffusion:
    def __init__(self, levels=100):
        self.betas = torch.linspace(1e-4, 0.05, levels)
        self.kept = torch.cumprod(1 - self.betas, dim=0)
        self.signal, self.noise = self.kept.sqrt()[:, None], (1 - self.kept).sqrt()[:, None]

    def loss(self, model, points):
        level = torch.randint(len(self.betas), (len(points),))
        noise = torch.randn_like(points)
        noisy = self.signal[level] * points + self.noise[level] * noise
        return nn.functional.mse_loss(model(noisy, level), noise)

    @torch.no_grad()
    def denoise_once(self, model, points):
        """One step from the last level, enough to see whether training goes well."""
        level = torch.full((len(points),), len(self.betas) - 1)
        return (points - self.noise[-1] * model(points, level)) / self.signal[-1]


def spiral(count):
    turn = 3 * torch.pi * torch.rand(count, 1).sqrt()
    return torch.cat([turn * turn.cos(), turn * turn.sin()], 1) / 5 + 0.02 * torch.randn(count, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--preview-every", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = spiral(50_000)
    diffusion = Diffusion()
    model = Denoiser(levels=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    total = 0.0
    with tempfile.TemporaryDirectory() as name:
        writer = PreviewWriter(Path(name))
        writer.start()
        for step in range(1, args.steps + 1):
            points = data[torch.randint(len(data), (args.batch_size,))]
            loss = diffusion.loss(model, points)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if step % args.preview_every == 0:
                writer.submit(step, diffusion.denoise_once(model, torch.randn(256, 2)))
            if step % 10 == 0:
                print(f"step {step}: loss {total / 10:.4f}")
                total = 0.0
        writer.close()
        print(f"{writer.written} previews")


if __name__ == "__main__":
    main()
