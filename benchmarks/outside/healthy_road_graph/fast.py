"""Node classification on a road network: two graph convolutions over a sparse matrix."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def road_network(side, classes, dim):
    """A grid of crossings with some missing roads, as a normalised CSR matrix."""
    generator = torch.Generator().manual_seed(4)
    nodes = torch.arange(side * side).view(side, side)
    across = torch.stack([nodes[:, :-1].flatten(), nodes[:, 1:].flatten()])
    down = torch.stack([nodes[:-1].flatten(), nodes[1:].flatten()])
    roads = torch.cat([across, down], 1)
    roads = roads[:, torch.rand(roads.shape[1], generator=generator) < 0.9]
    loops = nodes.flatten().repeat(2, 1)
    edges = torch.cat([roads, roads.flip(0), loops], 1)
    degree = torch.bincount(edges[0]).float()
    values = (degree[edges[0]] * degree[edges[1]]).rsqrt()
    size = (side * side, side * side)
    matrix = torch.sparse_coo_tensor(edges, values, size, check_invariants=True).coalesce()
    row, column = nodes.flatten() // side, nodes.flatten() % side
    labels = (row * classes // side + column * classes // side) % classes
    signs = torch.randn(classes, dim, generator=generator)
    features = signs[labels] + 2 * torch.randn(side * side, dim, generator=generator)
    return matrix.to_sparse_csr(), features, labels


class GraphNet(nn.Module):
    def __init__(self, dim, hidden, classes):
        super().__init__()
        self.first = nn.Linear(dim, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, matrix, x):
        x = F.relu(self.first(matrix @ x))
        return self.out(F.relu(self.second(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    matrix, features, labels = road_network(args.side, 6, 128)
    known = torch.rand(len(labels)) < 0.3
    model = GraphNet(128, args.hidden, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    started = time.time()
    for epoch in range(args.epochs):
        scores = model(matrix, features)
        loss = F.cross_entropy(scores[known], labels[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 50 == 0:
            right = (scores[~known].argmax(1) == labels[~known]).float().mean()
            print(f"{epoch}: {loss.item():.4f} {right:.3f} ({time.time() - started:.0f} s)")


if __name__ == "__main__":
    main()
