import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sessions(Dataset):
    """Clicks of shop visitors; the last click of a session is to be predicted."""

    def __init__(self, count, items, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.sessions = []
        for _ in range(count):
            length = int(torch.randint(16, 48, (1,), generator=random))
            start = torch.randint(items, (1,), generator=random)
            jumps = torch.randint(-3, 4, (length,), generator=random)
            self.sessions.append((start + jumps.cumsum(0)) % items)

    def __len__(self):
        return len(self.sessions)

    def __getitem__(self, index):
        return self.sessions[index]


def collate(sessions):
    """Puts the sessions into one graph: a node for each click, an edge to the click after it."""
    clicks = [session[:-1] for session in sessions]
    lengths = torch.tensor([len(part) for part in clicks])
    nodes = torch.cat(clicks)
    owner = torch.repeat_interleave(torch.arange(len(clicks)), lengths)
    source = torch.arange(len(nodes) - 1)
    source = source[owner[:-1] == owner[1:]]
    edges = torch.cat([torch.stack([source, source + 1]), torch.stack([source + 1, source])], 1)
    weights = torch.full((edges.shape[1],), 0.5)
    adjacency = torch.sparse_coo_tensor(
        edges, weights, (len(nodes), len(nodes)), check_invariants=False
    )
    target = torch.stack([session[-1] for session in sessions])
    return nodes, owner, adjacency.coalesce(), target


class GraphLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, width)
        self.neighbours = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, adjacency):
        received = torch.sparse.mm(adjacency, self.neighbours(x))
        return self.norm(x + torch.relu(self.own(x) + received))


class SessionGNN(nn.Module):
    def __init__(self, items, width=96, layers=3):
        super().__init__()
        self.items = nn.Embedding(items, width)
        nn.init.normal_(self.items.weight, std=0.1)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(layers))

    def forward(self, nodes, owner, adjacency, sessions):
        x = self.items(nodes)
        for layer in self.layers:
            x = layer(x, adjacency)
        pooled = x.new_zeros(sessions, x.shape[1]).index_add(0, owner, x)
        return pooled @ self.items.weight.T / x.shape[1] ** 0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--items", type=int, default=2_000)
    parser.add_argument("--batch-size", type=int, default=48)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Sessions(1_200, args.items)
    loader = DataLoader(data, args.batch_size, shuffle=True, collate_fn=collate)
    model = SessionGNN(args.items)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        total = 0.0
        for nodes, owner, adjacency, target in loader:
            scores = model(nodes, owner, adjacency, len(target))
            loss = nn.functional.cross_entropy(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
