import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, random_split


class Customers(Dataset):
    """Numbers and categories of a customer; the label says whether she left."""

    CARDINALITIES = (12, 50, 7, 300)

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.randn(count, 20, generator=generator)
        self.categories = torch.stack(
            [torch.randint(n, (count,), generator=generator) for n in self.CARDINALITIES], dim=1
        )
        effect = self.numbers[:, :3].sum(dim=1) + (self.categories[:, 2] - 3) * 0.8
        self.left = (effect + torch.randn(count, generator=generator) > 0).float()

    def __len__(self):
        return len(self.left)

    def __getitem__(self, index):
        return self.numbers[index], self.categories[index], self.left[index]


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.layers(x)


class TabularResNet(nn.Module):
    def __init__(self, cardinalities, numbers=20, width=256, blocks=4):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 16) for n in cardinalities)
        self.inputs = nn.Linear(numbers + 16 * len(cardinalities), width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers, categories):
        parts = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        x = self.inputs(torch.cat([numbers, *parts], dim=1))
        return self.head(self.blocks(x)).squeeze(1)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    numbers, categories, left = data.dataset[data.indices]
    correct = ((model(numbers, categories) > 0) == (left > 0)).float().mean().item()
    model.train()
    return correct


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, valid = random_split(Customers(2_500), [2_048, 452])
    order = RandomSampler(train, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(
        train, args.batch_size, sampler=order, num_workers=2, persistent_workers=True
    )
    model = TabularResNet(Customers.CARDINALITIES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    for epoch in range(args.epochs):
        total = 0.0
        for numbers, categories, left in loader:
            scores = model(numbers, categories)
            loss = nn.functional.binary_cross_entropy_with_logits(scores, left)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f} valid {evaluate(model, valid):.3f}")


if __name__ == "__main__":
    main()
