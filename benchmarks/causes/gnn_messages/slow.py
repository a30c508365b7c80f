"""Predict a property of random molecules with a message-passing network."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Molecules(Dataset):
    """Random trees with a few rings; the target is a sum over pairs of bonded atoms."""

    def __init__(self, count, kinds=9, seed=0):
        generator = torch.Generator().manual_seed(seed)
        charge = torch.randn(kinds, generator=generator)
        self.graphs = []
        for _ in range(count):
            n = int(torch.randint(14, 26, (1,), generator=generator))
            atoms = torch.randint(0, kinds, (n,), generator=generator)
            parents = (torch.rand(n - 1, generator=generator) * torch.arange(1, n)).long()
            rings = torch.randint(0, n, (2, 2 * n), generator=generator)
            bonds = torch.cat([torch.stack([torch.arange(1, n), parents]), rings], dim=1)
            target = (charge[atoms[bonds[0]]] * charge[atoms[bonds[1]]]).sum() / n
            self.graphs.append((atoms, torch.cat([bonds, bonds.flip(0)], dim=1), target))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        return self.graphs[index]


def collate(graphs):
    sizes = torch.tensor([len(atoms) for atoms, _, _ in graphs])
    starts = (sizes.cumsum(0) - sizes).tolist()
    atoms = torch.cat([atoms for atoms, _, _ in graphs])
    bonds = torch.cat([bonds + start for (_, bonds, _), start in zip(graphs, starts)], dim=1)
    molecule = torch.arange(len(graphs)).repeat_interleave(sizes)
    return atoms, bonds, molecule, torch.stack([target for _, _, target in graphs])


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Linear(dim, dim)
        self.update = nn.GRUCell(dim, dim)

    def forward(self, x, bonds):
        source, target = bonds
        messages = self.message(x.index_select(0, source))
        received = torch.zeros_like(x).index_add_(0, target, messages)
        return self.update(received, x)


class PropertyNet(nn.Module):
    def __init__(self, kinds=9, dim=96, rounds=3):
        super().__init__()
        self.embed = nn.Embedding(kinds, dim)
        self.layers = nn.ModuleList(MessageLayer(dim) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, atoms, bonds, molecule, count):
        x = self.embed(atoms)
        for layer in self.layers:
            x = layer(x, bonds)
        values = self.readout(x).squeeze(1)
        return torch.zeros(count).index_add_(0, molecule, values)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--molecules", type=int, default=768)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=48)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(
        Molecules(args.molecules), args.batch_size, shuffle=True, collate_fn=collate
    )
    model = PropertyNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        began, total = time.time(), 0.0
        for atoms, bonds, molecule, target in loader:
            prediction = model(atoms, bonds, molecule, len(target))
            loss = nn.functional.mse_loss(prediction, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: mse {total / len(loader):.4f} ({time.time() - began:.1f} s)")


if __name__ == "__main__":
    main()
