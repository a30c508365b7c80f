"""Fit the length scales of a Gaussian process to soil samples by exact marginal likelihood."""

import math
import time

import torch
from torch import nn

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)


class MarginalLikelihood(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(features))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))
        self.log_height = nn.Parameter(torch.tensor(0.0))

    def forward(self, x, y):
        scaled = x / self.log_scale.exp()
        squares = scaled.square().sum(1)
        distance = squares.unsqueeze(1) + squares - 2 * scaled @ scaled.T
        covariance = self.log_height.exp() * torch.exp(-distance.clamp(min=0) / 2)
        covariance = covariance + self.log_noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(covariance)
        weights = torch.cholesky_solve(y.unsqueeze(1), factor).squeeze(1)
        fit = 0.5 * y @ weights + factor.diagonal().log().sum()
        return fit / len(x) + 0.5 * math.log(2 * math.pi)


def samples(count, features):
    x = torch.randn(count, features)
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * torch.randn(count)
    return x, y


x, y = samples(20_000, 8)
model = MarginalLikelihood(8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)
start = time.time()
for step in range(1, 2001):
    rows = torch.randint(len(x), (600,))
    loss = model(x[rows], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        scales = ", ".join(f"{s:.2f}" for s in model.log_scale.exp().tolist())
        print(f"{step}: {loss.item():.4f}, scales {scales} ({time.time() - start:.0f} s)")
